"""vLLM 0.26.0: the functions and fields that the plug-in relies on, read and filled here alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fsbench.integrations.compile_ahead import DTYPE_NAMES, PADDING, EngineSpec
from fsbench.integrations.draw import SERVING, TokenLogprobs
from fsbench.integrations.routing import FLASH_SAMPLE, Need, logprob_needs
from fsbench.integrations.vllm_expected import ExpectedApi, check_parts, find
from fsbench.kernels import Penalties, TokenHistory

RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
WORKER = "vllm.v1.worker.gpu_worker:Worker"
BATCH = "vllm.v1.worker.gpu.input_batch:InputBatch"
NUM_SAMPLED = "vllm.v1.worker.gpu.input_batch:get_num_sampled_and_rejected"
SAMPLER = "vllm.v1.worker.gpu.sample.sampler:Sampler"
STATES = "vllm.v1.worker.gpu.sample.states:SamplingStates"
PENALTIES = "vllm.v1.worker.gpu.sample.penalties:PenaltiesState"
BIAS = "vllm.v1.worker.gpu.sample.logit_bias:LogitBiasState"
BAD_WORDS = "vllm.v1.worker.gpu.sample.bad_words:BadWordsState"
LOGPROB_IDS = "vllm.v1.worker.gpu.sample.logprob:LogprobTokenIdsState"
REQUESTS = "vllm.v1.worker.gpu.states:RequestState"
REJECTION = "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler"
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator"
OUTPUT = "vllm.v1.worker.gpu.sample.output:SamplerOutput"
LOGPROBS = "vllm.v1.outputs:LogprobsTensors"
GRAMMAR = "vllm.v1.core.sched.output:GrammarOutput"
TP_GROUP = "vllm.distributed.parallel_state:get_tp_group"
PROCESSOR = "vllm.model_executor.layers.logits_processor:LogitsProcessor"
UNQUANTIZED = "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod"

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


def parts(runner: Any) -> dict[str, Any]:
    """Return objects of a loaded runner by class, for check_parts."""
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


def engine_spec(runner: Any, sampler: str) -> EngineSpec | None:
    """Return what a runner will launch, from its configuration, before its model is loaded.

    None where nothing is compiled ahead: LoRA, another sampler or dtype.
    """
    model = runner.model_config
    ranks = runner.parallel_config.tensor_parallel_size
    samplers = SERVING if ranks == 1 else (FLASH_SAMPLE,)
    if sampler not in samplers or runner.lora_config or model.dtype not in DTYPE_NAMES:
        return None
    V = model.get_vocab_size()
    return EngineSpec(
        sampler,
        V=V,
        rows=-(-V // PADDING) * PADDING,
        D=model.get_hidden_size(),
        dtype=DTYPE_NAMES[model.dtype],
        soft_cap=getattr(model.hf_text_config, "final_logit_softcapping", None),
        max_rows=runner.max_num_reqs * (1 + draft_steps(runner)),
        raw=model.logprobs_mode == "raw_logprobs",
        ranks=ranks,
        rank=dist.get_rank(find(TP_GROUP)().cpu_group) if ranks > 1 else 0,
    )


def draft_steps(runner: Any) -> int:
    """Return the drafts of a request per step; 0 without speculation."""
    return 0 if runner.speculative_config is None else int(runner.num_speculative_steps)


def unsupported_reason(runner: Any, drafts: bool = False) -> str | None:
    """Return what this engine does at every step that only vLLM can do, or None.

    Args:
        drafts: whether the plug-in may verify drafts.
    """
    if runner.speculative_config is not None:
        rejection, speculator = runner.rejection_sampler, runner.speculator
        if not drafts:
            return "engine: drafts"
        if type(rejection).__name__ != "RejectionSampler":
            return f"engine: {type(rejection).__name__}"
        check_parts(EXPECTED, {REJECTION: rejection, SPECULATOR: speculator})
        if rejection.synthetic_conditional_rates is not None or rejection.use_block_verification:
            return "engine: another rule for drafts"
        if speculator.draft_logits is not None:
            return "engine: sampled drafts"
    if type(runner.sampler).__name__ != "Sampler":
        return f"engine: {type(runner.sampler).__name__}"
    return "engine: NaN counts" if runner.sampler.compute_nans else None


def request_needs(runner: Any, slots: np.ndarray) -> np.ndarray:
    """Return the Need of each request but for a grammar's, int64 [B]."""
    sampler = runner.sampler
    states, penalties = sampler.sampling_states, sampler.penalties_state
    temperature = states.temperature.np[slots]
    filtered = (
        (states.top_k.np[slots] != states.vocab_size)
        | (states.top_p.np[slots] != 1)
        | (states.min_p.np[slots] != 0)
    )
    repetition = penalties.repetition_penalty.np[slots] != 1
    biased = (
        sampler.logit_bias_state.use_logit_bias[slots]
        | (sampler.bad_words_state.num_bad_words.np[slots] > 0)
        | (penalties.use_penalty[slots] & ~repetition)
    )
    needs = np.where(temperature != 1, Need.TEMPERATURE, 0)
    needs |= np.where(filtered & (temperature != 0), Need.FILTER, 0)
    needs |= np.where(repetition, Need.REPETITION, 0) | np.where(biased, Need.BIAS, 0)
    specified = sampler.logprob_token_ids_state.num_token_ids.np[slots] > 0
    num_logprobs = np.where(specified, states.vocab_size, states.num_logprobs[slots])
    return needs | logprob_needs(needs, temperature, num_logprobs, sampler.logprobs_mode)


def max_logprobs(runner: Any, slots: np.ndarray) -> int:
    """Return the most further tokens with log-probabilities of a request; -1 without any."""
    return int(runner.sampler.sampling_states.num_logprobs[slots].max())


def largest_k(runner: Any, slots: np.ndarray) -> int:
    """Return the largest top_k of requests: V where it is off, 1 for a greedy request."""
    states = runner.sampler.sampling_states
    top_k = np.where(states.temperature.np[slots] == 0, 1, states.top_k.np[slots])
    return int(np.where(top_k < 1, states.vocab_size, top_k).max())


def settings(runner: Any, slots: Tensor) -> tuple[Tensor, ...]:
    """Return temperature, seed, top_k, top_p and min_p of requests, new tensors [B] on the GPU."""
    states = runner.sampler.sampling_states
    # .gpu is another buffer after each step, so it is not kept.
    return tuple(
        getattr(states, name).gpu[slots]
        for name in ("temperature", "seeds", "top_k", "top_p", "min_p")
    )


def add_biases(runner: Any, batch: Any, logits: Tensor, penalties: bool) -> None:
    """Apply the biases of a batch's requests to logits [B, V], -inf where a token is forbidden.

    vLLM's functions edit logits in place: applied to zeros, they leave what they add.

    Args:
        penalties: also apply frequency and presence penalties. No row may then have a repetition
            penalty.
    """
    sampler = runner.sampler
    rows = (logits, batch.expanded_idx_mapping, batch.idx_mapping_np)
    tokens = (batch.input_ids[batch.logits_indices], batch.expanded_local_pos)
    sampler.logit_bias_state.apply_logit_bias(*rows, batch.positions[batch.logits_indices])
    if penalties:
        sampler.penalties_state.apply_penalties(*rows, *tokens)
    sampler.bad_words_state.apply_bad_words(*rows, *tokens)


def request_penalties(runner: Any, slots: Tensor, V: int, capacity: int) -> Penalties:
    """Return the penalties of requests that have at most `capacity` distinct tokens."""
    state = runner.sampler.penalties_state
    return Penalties(
        token_history(state.prompt_bin_mask[slots], state.output_bin_counts[slots, :V], capacity),
        repetition=state.repetition_penalty.gpu[slots],
        presence=state.presence_penalty.gpu[slots],
        frequency=state.frequency_penalty.gpu[slots],
    )


def token_history(prompt_bits: Tensor, counts: Tensor, capacity: int) -> TokenHistory:
    """Build a TokenHistory from a bitmap of prompts and counts of outputs, without a host sync.

    Args:
        prompt_bits: int32 [B, V / 32 or more], token v of the prompt in bit v % 32 of word v // 32.
        counts: int32 [B, V], how often each token is in the output.
        capacity: most distinct tokens of a row; no row may have more.
    """
    B, V = counts.shape
    tokens = torch.arange(V, device=counts.device)
    bits = prompt_bits[:, tokens // 32] >> (tokens % 32).to(torch.int32)
    seen = (bits & 1).bool() | (counts > 0)
    columns = seen.cumsum(1)
    history = TokenHistory(B, capacity, counts.device)
    # Seen tokens have columns from 1; all others share column 0, which is cut off.
    target = torch.where(seen, columns, 0)
    for field, values in (
        (history.tokens, tokens.to(torch.int32).expand(B, V)),
        (history.counts, counts),
    ):
        wide = torch.zeros(B, capacity + 1, dtype=torch.int32, device=counts.device)
        field.copy_(wide.scatter_(1, target, values)[:, 1:])
    history.lengths.copy_(columns[:, -1])
    return history


def num_sampled(runner: Any, batch: Any, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens sampled, tokens rejected), int32 [B]; 0 where the prompt is incomplete."""
    sampled, rejected = find(NUM_SAMPLED)(
        num_sampled=sampled,
        seq_lens=batch.seq_lens,
        cu_num_logits=batch.cu_num_logits,
        idx_mapping=batch.idx_mapping,
        prefill_len=runner.req_states.prefill_len.gpu,
    )
    return sampled, rejected


def sampler_output(
    tokens: Tensor,
    logprobs: TokenLogprobs | None,
    counts: tuple[Tensor, Tensor],
    bounds: list[int] | None = None,
) -> tuple[Any, Tensor, Tensor]:
    """Return what GPUModelRunner.sample returns.

    Args:
        tokens: int64 [B]; with drafts [B, steps + 1].
        logprobs: of each token; with drafts of each row of logits.
        counts: of num_sampled.
        bounds: with drafts, the first row of each request in logprobs.
    """
    sampled, rejected = counts
    tensors = None
    if logprobs is not None:
        tensors = find(LOGPROBS)(
            logprob_token_ids=logprobs.tokens,
            logprobs=logprobs.values,
            selected_token_ranks=logprobs.ranks,
            cu_num_generated_tokens=bounds,
        )
    output = find(OUTPUT)(
        sampled_token_ids=tokens.view(len(sampled), -1),
        logprobs_tensors=tensors,
        num_nans=None,
        num_sampled=sampled,
        num_rejected=rejected,
    )
    return output, sampled, rejected
