"""vLLM 0.26.0: which of its fields are read, called and filled."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fsbench.integrations.compile_ahead import DTYPE_NAMES, PADDING, EngineSpec
from fsbench.integrations.draw import OWN, Told, history
from fsbench.integrations.routing import Need, logprob_needs
from fsbench.integrations.vllm_expected import (
    BAD_WORDS,
    BATCH,
    BIAS,
    GRAMMAR,
    LOGPROB_IDS,
    LOGPROBS,
    NUM_SAMPLED,
    OUTPUT,
    PENALTIES,
    PROCESSOR,
    REJECTION,
    REQUESTS,
    RUNNER,
    RUNNER_V1,
    SAMPLER,
    SPECULATOR,
    STATES,
    TP_GROUP,
    UNQUANTIZED,
    WORKER,
    ExpectedApi,
    check_parts,
    find,
)
from fsbench.kernels import Penalties

_EDIT = ("self", "logits", "expanded_idx_mapping", "idx_mapping_np")
_TOKENS = ("input_ids", "expanded_local_pos")

EXPECTED = ExpectedApi(
    "0.26.0",
    signatures={
        f"{RUNNER}.load_model": ("self", "load_dummy_weights", "args", "kwargs"),
        f"{RUNNER}._dummy_sampler_run": ("self", "hidden_states"),
        f"{RUNNER}.sample": ("self", "hidden_states", "input_batch", "grammar_output"),
        f"{RUNNER}.reload_weights": ("self", "args", "kwargs"),
        f"{RUNNER}.shutdown": ("self",),
        f"{RUNNER_V1}.load_model": ("self", "load_dummy_weights"),
        f"{WORKER}.compile_or_warm_up_model": ("self",),
        f"{WORKER}.finish_weight_update": ("self",),
        f"{WORKER}.wake_up": ("self", "tags"),
        f"{SAMPLER}.add_request": ("self", "req_idx", "prompt_len", "sampling_params"),
        f"{BIAS}.apply_logit_bias": (*_EDIT, "pos"),
        f"{PENALTIES}.apply_penalties": (*_EDIT, *_TOKENS),
        f"{BAD_WORDS}.apply_bad_words": (*_EDIT, *_TOKENS),
        NUM_SAMPLED: (*("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len"),),
        TP_GROUP: (),
        f"{REJECTION}.__call__": ("self", "logits", "input_batch", "draft_logits"),
        f"{SPECULATOR}._greedy_sample_draft": ("self", "hidden_states"),
    },
    fields={
        BATCH: (
            *("req_ids", "num_reqs", "num_tokens", "num_draft_tokens", "idx_mapping"),
            *("idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos", "seq_lens"),
            *("seq_lens_cpu_upper_bound", "input_ids", "positions", "logits_indices"),
            *("cu_num_logits", "cu_num_logits_np"),
        ),
        OUTPUT: (
            *("sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected"),
        ),
        LOGPROBS: (
            *("logprob_token_ids", "logprobs", "selected_token_ranks"),
            "cu_num_generated_tokens",
        ),
        GRAMMAR: ("structured_output_request_ids", "grammar_bitmask"),
    },
    attributes={
        RUNNER: (
            *("model", "sampler", "req_states", "lora_config", "parallel_config", "max_num_reqs"),
            *("speculative_config", "model_memory_usage", "rejection_sampler", "speculator"),
            *("num_speculative_steps", "max_num_tokens", "model_config"),
        ),
        REJECTION: ("synthetic_conditional_rates", "use_block_verification"),
        SPECULATOR: ("model", "draft_logits", "dtype"),
        SAMPLER: (
            *("compute_nans", "logprobs_mode", "sampling_states", "penalties_state"),
            *("logit_bias_state", "bad_words_state", "logprob_token_ids_state", "add_request"),
        ),
        STATES: (
            *("vocab_size", "temperature", "seeds", "top_k", "top_p", "min_p", "num_logprobs"),
        ),
        PENALTIES: (
            *("use_penalty", "repetition_penalty", "frequency_penalty", "presence_penalty"),
            *("prompt_bin_mask", "output_bin_counts"),
        ),
        BIAS: ("use_logit_bias",),
        BAD_WORDS: ("num_bad_words",),
        LOGPROB_IDS: ("num_token_ids",),
        REQUESTS: ("prefill_len",),
        UNQUANTIZED: ("apply",),
        PROCESSOR: ("org_vocab_size", "scale", "soft_cap", "logits_as_input", "head_dtype"),
    },
    filled=(OUTPUT, LOGPROBS),
)


class Adapter:
    """Reads and fills the engine's structures. `slots` are rows of its state arrays."""

    expected = EXPECTED

    def parts(self, runner: Any) -> dict[str, Any]:
        """Objects of a loaded runner by class, for vllm_expected.check_parts."""
        sampler = runner.sampler
        return {
            RUNNER: runner,
            SAMPLER: sampler,
            STATES: sampler.sampling_states,
            PENALTIES: sampler.penalties_state,
            BIAS: sampler.logit_bias_state,
            BAD_WORDS: sampler.bad_words_state,
            LOGPROB_IDS: sampler.logprob_token_ids_state,
            REQUESTS: runner.req_states,
        }

    def engine_spec(self, runner: Any, sampler: str) -> EngineSpec | None:
        """Return what a runner whose model is not loaded yet will launch, by its configuration.

        None where nothing is compiled ahead: several GPUs, LoRA, another sampler or dtype.
        """
        model = runner.model_config
        several = runner.parallel_config.tensor_parallel_size > 1
        if sampler not in OWN or several or runner.lora_config or model.dtype not in DTYPE_NAMES:
            return None
        steps = runner.num_speculative_steps if runner.speculative_config is not None else 0
        V = model.get_vocab_size()
        return EngineSpec(
            sampler,
            V=V,
            rows=-(-V // PADDING) * PADDING,
            D=model.get_hidden_size(),
            dtype=DTYPE_NAMES[model.dtype],
            soft_cap=getattr(model.hf_text_config, "final_logit_softcapping", None),
            max_rows=runner.max_num_reqs * (1 + steps),
            raw=model.logprobs_mode == "raw_logprobs",
        )

    def lacks(self, runner: Any, drafts: bool = False) -> str | None:
        """What this engine does at every step that is left to vLLM, or None.

        drafts: whether to verify drafts.
        """
        if runner.speculative_config is not None:
            rejection, speculator = runner.rejection_sampler, runner.speculator
            if not drafts:
                return "engine: drafts"
            if type(rejection).__name__ != "RejectionSampler":
                return f"engine: {type(rejection).__name__}"
            check_parts(self.expected, {REJECTION: rejection, SPECULATOR: speculator})
            if (
                rejection.synthetic_conditional_rates is not None
                or rejection.use_block_verification
            ):
                return "engine: another rule for drafts"
            if speculator.draft_logits is not None:
                return "engine: sampled drafts"
        if type(runner.sampler).__name__ != "Sampler":
            return f"engine: {type(runner.sampler).__name__}"
        if runner.sampler.compute_nans:
            return "engine: NaN counts"
        return None

    def needs(self, runner: Any, slots: np.ndarray) -> np.ndarray:
        """Need of each of these requests but for a grammar's, int64 [B]."""
        parts = self.parts(runner)
        states, penalties = parts[STATES], parts[PENALTIES]
        temperature = states.temperature.np[slots]
        filtered = (
            (states.top_k.np[slots] != states.vocab_size)
            | (states.top_p.np[slots] != 1)
            | (states.min_p.np[slots] != 0)
        )
        repetition = penalties.repetition_penalty.np[slots] != 1
        biased = (
            parts[BIAS].use_logit_bias[slots]
            | (parts[BAD_WORDS].num_bad_words.np[slots] > 0)
            | (penalties.use_penalty[slots] & ~repetition)
        )
        needs = np.where(temperature != 1, Need.TEMPERATURE, 0)
        needs |= np.where(filtered & (temperature != 0), Need.FILTER, 0)
        needs |= np.where(repetition, Need.REPETITION, 0) | np.where(biased, Need.BIAS, 0)
        given = parts[LOGPROB_IDS].num_token_ids.np[slots] > 0
        asked = np.where(given, states.vocab_size, states.num_logprobs[slots])
        return needs | logprob_needs(needs, temperature, asked, runner.sampler.logprobs_mode)

    def most_logprobs(self, runner: Any, slots: np.ndarray) -> int:
        """Further tokens whose log-probabilities a request asks for, at most; -1 if none asks."""
        return int(self.parts(runner)[STATES].num_logprobs[slots].max())

    def largest_k(self, runner: Any, slots: np.ndarray) -> int:
        """The largest top_k of requests; V of one without, and 1 of a greedy one."""
        states = runner.sampler.sampling_states
        top_k = np.where(states.temperature.np[slots] == 0, 1, states.top_k.np[slots])
        return int(np.where(top_k < 1, states.vocab_size, top_k).max())

    def settings(self, runner: Any, slots: Tensor) -> tuple[Tensor, ...]:
        """Of requests: temperature, seed, top_k, top_p, min_p on the GPU, new tensors [B]."""
        states = runner.sampler.sampling_states
        # .gpu is another buffer after each step: it is read here, and not kept.
        return tuple(
            getattr(states, name).gpu[slots]
            for name in ("temperature", "seeds", "top_k", "top_p", "min_p")
        )

    def add_biases(self, runner: Any, batch: Any, logits: Tensor, penalties: bool) -> None:
        """Add to logits [B, V] what the requests of a batch change in them, -inf where forbidden.

        vLLM's own functions do it: what they make of zeros is what they add. penalties: also the
        frequency and presence penalties; rows with a repetition penalty must not be among them.
        """
        sampler = runner.sampler
        rows = (logits, batch.expanded_idx_mapping, batch.idx_mapping_np)
        tokens = (batch.input_ids[batch.logits_indices], batch.expanded_local_pos)
        sampler.logit_bias_state.apply_logit_bias(*rows, batch.positions[batch.logits_indices])
        if penalties:
            sampler.penalties_state.apply_penalties(*rows, *tokens)
        sampler.bad_words_state.apply_bad_words(*rows, *tokens)

    def penalties(self, runner: Any, slots: Tensor, V: int, capacity: int) -> Penalties:
        """Penalties of requests that have at most `capacity` distinct tokens."""
        state = self.parts(runner)[PENALTIES]
        return Penalties(
            history(state.prompt_bin_mask[slots], state.output_bin_counts[slots, :V], capacity),
            repetition=state.repetition_penalty.gpu[slots],
            presence=state.presence_penalty.gpu[slots],
            frequency=state.frequency_penalty.gpu[slots],
        )

    def num_sampled(self, runner: Any, batch: Any, sampled: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens sampled, tokens rejected) int32 [B]: 0 where a prompt is not complete yet."""
        sampled, rejected = find(NUM_SAMPLED)(
            num_sampled=sampled,
            seq_lens=batch.seq_lens,
            cu_num_logits=batch.cu_num_logits,
            idx_mapping=batch.idx_mapping,
            prefill_len=runner.req_states.prefill_len.gpu,
        )
        return sampled, rejected

    def output(
        self, tokens: Tensor, told: Told | None, counts: Any, bounds: list[int] | None = None
    ) -> tuple[Any, Tensor, Tensor]:
        """What GPUModelRunner.sample returns.

        tokens: int64 [B], or of requests with drafts [B, steps + 1]; then bounds has where what is
        told of a request begins.
        """
        sampled, rejected = counts
        tensors = None
        if told is not None:
            tensors = find(LOGPROBS)(
                logprob_token_ids=told.tokens,
                logprobs=told.logprobs,
                selected_token_ranks=told.ranks,
                cu_num_generated_tokens=bounds,
            )
        made = find(OUTPUT)(
            sampled_token_ids=tokens.view(len(sampled), -1),
            logprobs_tensors=tensors,
            num_nans=None,
            num_sampled=sampled,
            num_rejected=rejected,
        )
        return made, sampled, rejected
