"""The parts of vLLM that fsbench.integrations touches, on a CPU: those of 0.26.0, or of 0.33.0.

Names, parameters and fields are those of vLLM's source (`make check-engines` holds the adapters to
it). Its kernels are written in torch, with the same order of processors; its noise is a function of
seed, position and token, as vLLM's.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from fake_vllm_states import (
    NO_LOGPROBS,
    SLOTS,
    BadWordsState,
    D,
    LogitBiasState,
    LogprobTokenIdsState,
    PenaltiesState,
    RequestState,
    SamplingStates,
    ThinkingBudgetState,
    UvaBackedTensor,
    V,
)
from torch import Tensor


@dataclass
class SamplerOutput:
    sampled_token_ids: Any
    logprobs_tensors: Any
    num_nans: Any
    num_sampled: Any
    num_rejected: Any = None


class LogprobsTensors(NamedTuple):
    logprob_token_ids: Tensor
    logprobs: Tensor
    selected_token_ranks: Tensor
    cu_num_generated_tokens: Any = None


@dataclass
class GrammarOutput:
    structured_output_request_ids: list[str]
    grammar_bitmask: np.ndarray


@dataclass
class InputBatch:
    req_ids: list[str]
    num_reqs: int
    num_tokens: int
    num_draft_tokens: int
    idx_mapping: Tensor
    idx_mapping_np: np.ndarray
    expanded_idx_mapping: Tensor
    expanded_local_pos: Tensor
    input_ids: Tensor
    positions: Tensor
    logits_indices: Tensor
    seq_lens: Tensor
    seq_lens_cpu_upper_bound: Tensor
    cu_num_logits: Tensor
    cu_num_logits_np: np.ndarray


@dataclass(frozen=True)
class LogitsContext:
    expanded_idx_mapping: Tensor
    idx_mapping: Tensor
    idx_mapping_np: np.ndarray
    expanded_local_pos: Tensor
    input_ids: Tensor
    pos: Tensor
    seq_lens_upper_bound_np: np.ndarray


def get_num_sampled_and_rejected(num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len):
    complete = seq_lens[: len(num_sampled)] >= prefill_len[idx_mapping.long()]
    complete = complete.to(num_sampled.dtype)
    num_sampled = num_sampled * complete
    return num_sampled, (cu_num_logits.diff() - num_sampled) * complete


def gumbel(seed: int, position: int) -> Tensor:
    """Noise of all tokens: a function of both and nothing else."""
    generator = torch.Generator().manual_seed(hash((seed, position)) % 2**62)
    return -torch.log(-torch.log(torch.rand(V, generator=generator)))


class Sampler:
    """Of 0.26.0: processors work in place on the model's dtype."""

    def __init__(self, req_states: RequestState):
        self.compute_nans, self.logprobs_mode = False, "raw_logprobs"
        self.req_states = req_states
        self.sampling_states = SamplingStates(V)
        self.penalties_state = PenaltiesState(req_states)
        self.logit_bias_state = LogitBiasState()
        self.bad_words_state = BadWordsState(req_states)
        self.logprob_token_ids_state = LogprobTokenIdsState()

    def processors(self) -> list[Any]:
        return [self.logit_bias_state, self.penalties_state, self.bad_words_state]

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        self.logit_bias_state.add_request(req_idx, prompt_len, sampling_params)
        for state in (self.sampling_states, self.penalties_state, self.bad_words_state,
                      self.logprob_token_ids_state):  # fmt: skip
            state.add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        for state in (self.sampling_states, self.logprob_token_ids_state, *self.processors()):
            for each in vars(state).values():
                if isinstance(each, UvaBackedTensor):
                    each.copy_to_uva()

    def __call__(self, logits: Tensor, batch: Any) -> SamplerOutput:
        tokens, tensors = self.draw(logits, batch)
        counts = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs), batch.seq_lens, batch.cu_num_logits,
            batch.idx_mapping, self.req_states.prefill_len.gpu,
        )  # fmt: skip
        return SamplerOutput(tokens.view(-1, 1), tensors, None, *counts)

    def draw(self, logits: Tensor, batch: Any) -> tuple[Tensor, Any]:
        """(a token of each row, what is told of it)."""
        states, slots = self.sampling_states, batch.expanded_idx_mapping.numpy()
        asked = int(states.num_logprobs[slots].max())
        given = self.logprob_token_ids_state.token_ids
        raw, processed = logits.clone(), []
        last = batch.logits_indices
        context = LogitsContext(
            batch.expanded_idx_mapping, batch.idx_mapping, slots, batch.expanded_local_pos,
            batch.input_ids[last], batch.positions[last], batch.seq_lens_cpu_upper_bound.numpy(),
        )  # fmt: skip
        for each in self.processors():
            each.apply(logits, context)
        sampled = []
        for row, slot in enumerate(slots.tolist()):
            now, T = logits[row].float(), float(states.temperature.gpu[slot])
            processed.append(now)
            if T == 0:
                sampled.append(now.argmax())
                continue
            order = (now / T).argsort(descending=True)
            chances = (now / T)[order].softmax(0)
            kept = torch.arange(V) < states.top_k.gpu[slot]
            kept &= chances >= states.min_p.gpu[slot] * chances[0]
            chances = chances * kept / chances[kept].sum()
            kept &= chances.cumsum(0) - chances < states.top_p.gpu[slot]
            processed[row] = (now / T).index_fill(0, order[~kept], -torch.inf)
            noise = gumbel(int(states.seeds.gpu[slot]), int(context.pos[row]))
            sampled.append((processed[row] + noise).argmax())
        tokens = torch.stack(sampled)
        tensors = None
        widest = max([asked, *(len(given[slot]) or NO_LOGPROBS for slot in slots)])
        if widest != NO_LOGPROBS:
            by, _, scale = self.logprobs_mode.partition("_")
            scores = raw.float() if by == "raw" else torch.stack(processed)
            scores = scores.log_softmax(1) if scale == "logprobs" else scores
            ids = torch.cat([tokens[:, None], scores.topk(widest, 1).indices], 1)
            for row, slot in enumerate(slots.tolist()):
                if given[slot]:
                    ids[row, 1 : 1 + len(given[slot])] = torch.tensor(given[slot])
            own = scores.gather(1, ids)
            tensors = LogprobsTensors(ids, own, (scores >= own[:, :1]).sum(1))
        return tokens, tensors


class RejectionSampler:
    """Of greedy drafts: one is right if it is drawn, which has the probability that vLLM's has."""

    def __init__(self, sampler: Sampler, steps: int):
        self.sampler, self.num_speculative_steps = sampler, steps
        self.synthetic_conditional_rates, self.use_block_verification = None, False

    def __call__(self, logits: Tensor, input_batch: Any, draft_logits: Any = None) -> SamplerOutput:
        batch = input_batch
        assert batch.num_draft_tokens == len(logits) - batch.num_reqs > 0
        drawn, tensors = self.sampler.draw(logits, batch)
        fed = batch.input_ids[batch.logits_indices]
        tokens = torch.full((batch.num_reqs, self.num_speculative_steps + 1), 10**9)
        sampled = batch.seq_lens.new_zeros(batch.num_reqs)
        for request, (first, end) in enumerate(pairwise(batch.cu_num_logits_np.tolist())):
            for row in range(first, end):
                tokens[request, row - first] = drawn[row]
                sampled[request] += 1
                if row + 1 == end or drawn[row] != fed[row + 1]:
                    break
        counts = get_num_sampled_and_rejected(
            sampled, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )  # fmt: skip
        if tensors is not None:
            tensors = tensors._replace(cu_num_generated_tokens=batch.cu_num_logits_np.tolist())
        return SamplerOutput(tokens, tensors, None, *counts)


class DraftModelSpeculator:
    """With the head of a model, as EAGLE's; d2t: a reduced vocabulary's differences."""

    def __init__(self, model: Any, d2t: Tensor | None = None):
        self.model, self.draft_logits, self.dtype = model, None, model.lm_head.weight.dtype
        if d2t is not None:
            model.draft_id_to_target_id = d2t
            whole = model.compute_logits

            def compute_logits(hidden: Tensor) -> Tensor:
                spread = hidden.new_full((len(hidden), V), -torch.inf)
                spread[:, d2t + torch.arange(len(d2t))] = whole(hidden)
                return spread

            model.compute_logits = compute_logits

    def _greedy_sample_draft(self, hidden_states: Tensor) -> Tensor:
        return self.model.compute_logits(hidden_states).argmax(dim=-1)


class Sampler033(Sampler):
    """Of 0.33.0: processors are a list."""

    def __init__(self, req_states: RequestState):
        super().__init__(req_states)
        self.logits_processors = super().processors()
        del self.logit_bias_state, self.bad_words_state
        self.thinking_budget_state = ThinkingBudgetState()
        self.trace_replay_state, self.return_sampling_mask = None, False

    def processors(self) -> list[Any]:
        return self.logits_processors

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        prompt_len = int(self.req_states.prompt_len.np[req_idx])
        self.logits_processors[0].add_request(req_idx, prompt_len, sampling_params)
        for state in (self.sampling_states, *self.logits_processors[1:],
                      self.logprob_token_ids_state, self.thinking_budget_state):  # fmt: skip
            state.add_request(req_idx, sampling_params)


Sampler033.__name__ = "Sampler"


class UnquantizedEmbeddingMethod:
    def apply(self) -> None: ...


class LMHead:
    def __init__(self, weight: Tensor, vocab: int):
        self.weight, self.bias = weight, None
        self.quant_method: Any = UnquantizedEmbeddingMethod()
        self.shard_indices = types.SimpleNamespace(
            org_vocab_start_index=0, org_vocab_end_index=vocab
        )


class LogitsProcessor:
    def __init__(self, vocab: int):
        self.org_vocab_size, self.scale, self.soft_cap = vocab, 1.0, None
        self.logits_as_input, self.head_dtype = False, None

    def __call__(self, head: LMHead, hidden: Tensor) -> Tensor:
        logits = (hidden @ head.weight.T)[:, : self.org_vocab_size]
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits * self.scale


class Model:
    """V tokens; the weight has padding rows behind them, as vLLM's may."""

    def __init__(self, padding: int = 4, dtype: Any = torch.bfloat16, scale: float = 0.25):
        generator = torch.Generator().manual_seed(3)
        weight = torch.randn(V + padding, D, generator=generator).to(dtype) * scale
        self.lm_head = LMHead(weight, V)
        self.logits_processor = LogitsProcessor(V)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Any) -> set[str]:
        for _, weight in weights:
            self.lm_head.weight.copy_(weight)
        return {"lm_head.weight"}


class StructuredOutputsWorker:
    def apply_grammar_bitmask(self, logits, input_batch, grammar_req_ids, grammar_bitmask):
        pairs = pairwise(input_batch.cu_num_logits_np.tolist())
        bounds = dict(zip(input_batch.req_ids, pairs, strict=True))
        rows = [row for name in grammar_req_ids for row in range(*bounds[name])]
        for row, bits in zip(rows, grammar_bitmask, strict=True):
            allowed = torch.from_numpy(bits.copy())[torch.arange(V) // 32] >> (torch.arange(V) % 32)
            logits[row, (allowed & 1) == 0] = -torch.inf


@dataclass
class GPUModelRunner:
    model: Any = field(default_factory=Model)
    lora_config: Any = None
    speculative_config: Any = None
    speculator: Any = None
    batch_sharder: Any = None
    max_num_reqs: int = SLOTS
    max_num_tokens: int = 64
    num_speculative_steps: int = 3
    model_memory_usage: int = 1000
    calls: list[Any] = field(default_factory=list)
    parallel_config: Any = field(
        default_factory=lambda: types.SimpleNamespace(tensor_parallel_size=1)
    )

    sampler_class = Sampler

    def __post_init__(self) -> None:
        self.req_states = RequestState()
        self.sampler: Any = self.sampler_class(self.req_states)
        self.structured_outputs_worker = StructuredOutputsWorker()
        self.rejection_sampler: Any = None
        if self.speculative_config is not None:
            self.rejection_sampler = RejectionSampler(self.sampler, self.num_speculative_steps)

    def load_model(self, load_dummy_weights: bool = False, *args: Any, **kwargs: Any) -> None:
        self.calls.append("load_model")

    def _dummy_sampler_run(self, hidden_states: Tensor) -> None:
        self.calls.append("_dummy_sampler_run")

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self.model.load_weights(*args)

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def sample(self, hidden_states, input_batch, grammar_output):
        self.calls.append(("sample", list(input_batch.req_ids)))
        logits = self.model.compute_logits(hidden_states[input_batch.logits_indices])
        if grammar_output is not None:
            self.structured_outputs_worker.apply_grammar_bitmask(
                logits,
                input_batch,
                grammar_output.structured_output_request_ids,
                grammar_output.grammar_bitmask,
            )
        if input_batch.num_draft_tokens == 0 or self.rejection_sampler is None:
            output = self.sampler(logits, input_batch)
        else:
            output = self.rejection_sampler(logits, input_batch, self.speculator.draft_logits)
        return output, output.num_sampled, output.num_rejected


class GPUModelRunnerV1:
    def load_model(self, load_dummy_weights: bool = False) -> None:
        self.loaded = True


class GPUModelRunner033(GPUModelRunner):
    def load_model(
        self, load_dummy_weights: bool = False, *args: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.calls.append("load_model")

    def reload_weights(
        self, weights_iterator=None, weights_path=None, is_checkpoint_format=True
    ) -> None:
        self.model.load_weights(weights_iterator)


class GPUModelRunnerV1033(GPUModelRunnerV1):
    def load_model(self, load_dummy_weights: bool = False, *, model: Any = None) -> None:
        self.loaded = True


class Worker:
    model_runner: Any = None

    def compile_or_warm_up_model(self) -> float:
        return 1.5

    def finish_weight_update(self) -> None: ...

    def wake_up(self, tags: Any = None) -> None: ...


def modules(version: str = "0.26.0") -> dict[str, types.ModuleType]:
    """Fresh modules, with classes of their own, so that hooks of one test do not reach another."""

    def module(name: str, **content: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(content)
        return made

    def fresh(cls: type) -> type:
        return type(cls.__name__, (cls,), {n: v for n, v in vars(cls).items() if callable(v)})

    newer = version == "0.33.0"
    gpu, sample = "vllm.v1.worker.gpu", "vllm.v1.worker.gpu.sample"
    runner = fresh(GPUModelRunner033 if newer else GPUModelRunner)
    runner.sampler_class = Sampler033 if newer else Sampler
    found = {
        f"{gpu}.model_runner": {"GPUModelRunner": runner},
        "vllm.v1.worker.gpu_model_runner": {
            "GPUModelRunner": fresh(GPUModelRunnerV1033 if newer else GPUModelRunnerV1)
        },
        "vllm.v1.worker.gpu_worker": {"Worker": fresh(Worker)},
        f"{gpu}.input_batch": {
            "InputBatch": InputBatch,
            "get_num_sampled_and_rejected": get_num_sampled_and_rejected,
        },
        f"{sample}.sampler": {"Sampler": Sampler033 if newer else Sampler},
        f"{sample}.logit_bias": {"LogitBiasState": LogitBiasState},
        f"{sample}.penalties": {"PenaltiesState": PenaltiesState},
        f"{sample}.bad_words": {"BadWordsState": BadWordsState},
        f"{gpu}.spec_decode.rejection_sampler": {"RejectionSampler": RejectionSampler},
        f"{gpu}.spec_decode.speculator": {"DraftModelSpeculator": DraftModelSpeculator},
        f"{sample}.output": {"SamplerOutput": SamplerOutput},
        f"{sample}.logits_processor.interface": {"LogitsContext": LogitsContext},
        "vllm.v1.outputs": {"LogprobsTensors": LogprobsTensors},
        "vllm.v1.core.sched.output": {"GrammarOutput": GrammarOutput},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: None},
    }
    made = {name: module(name, **content) for name, content in found.items()}
    for name in list(made):
        while "." in name:
            name = name.rpartition(".")[0]
            made.setdefault(name, module(name, __path__=[]))
    return made


def install(monkeypatch: Any, version: str | None = "0.26.0") -> dict[str, types.ModuleType]:
    """Put the fake where `import vllm` finds it."""
    found = modules(version or "")
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("fsbench.integrations.vllm.package_version", lambda package: version)
    return found
