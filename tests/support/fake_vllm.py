"""The parts of vLLM that fsbench.integrations touches, on a CPU: those of 0.26.0, or of 0.33.0.

Names, parameters and fields are those of vLLM's source (`make check-engines` holds the adapters to
it). Its kernels are written in torch, with the same order of processors; its noise is a function of
seed, position and token, as vLLM's.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

NO_LOGPROBS = -1
V, D, SLOTS = 700, 64, 8


class UvaBackedTensor:
    """np is the truth; gpu is another buffer after each step."""

    def __init__(self, size: int, dtype: Any, fill: float = 0):
        self.np = np.full(size, fill, dtype)
        self.copy_to_uva()

    def copy_to_uva(self) -> None:
        self.gpu = torch.from_numpy(self.np.copy())


class StagedWriteTensor:
    def __init__(self, size: Any, dtype: Any):
        self.gpu = torch.zeros(size, dtype=dtype)

    def stage_write(self, row: int, start: int, values: Any) -> None:
        values = torch.tensor(list(values), dtype=self.gpu.dtype)
        self.gpu[row, start : start + len(values)] = values


def params(**given: Any) -> Any:
    """SamplingParams: what the sampler reads of it."""
    defaults = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None,
        "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        "allowed_token_ids": None, "logit_bias": None, "min_tokens": 0, "all_stop_token_ids": (),
        "bad_words_token_ids": None, "logprobs": None, "logprob_token_ids": None,
        "thinking_token_budget": None,
    }  # fmt: skip
    assert set(given) <= set(defaults)
    made = {**defaults, **given}
    if made["temperature"] == 0:  # as SamplingParams does
        made |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return types.SimpleNamespace(**made)


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
    return num_sampled * complete.to(num_sampled.dtype), torch.zeros_like(num_sampled)


class RequestState:
    def __init__(self) -> None:
        self.prompt_len = UvaBackedTensor(SLOTS, np.int32)
        self.prefill_len = UvaBackedTensor(SLOTS, np.int32)
        self.tokens: list[list[int]] = [[] for _ in range(SLOTS)]  # all_token_ids to total_len


class SamplingStates:
    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.temperature = UvaBackedTensor(SLOTS, np.float32)
        self.top_k = UvaBackedTensor(SLOTS, np.int32, vocab_size)
        self.top_p = UvaBackedTensor(SLOTS, np.float32, 1)
        self.min_p = UvaBackedTensor(SLOTS, np.float32)
        self.seeds = UvaBackedTensor(SLOTS, np.int64)
        self.num_logprobs = np.full(SLOTS, NO_LOGPROBS, np.int32)

    def add_request(self, slot: int, p: Any) -> None:
        self.temperature.np[slot], self.top_p.np[slot] = p.temperature, p.top_p
        self.top_k.np[slot] = p.top_k if 0 < p.top_k <= self.vocab_size else self.vocab_size
        self.min_p.np[slot] = p.min_p
        drawn = np.random.randint(-(2**63), 2**63 - 1) if p.seed is None else p.seed
        self.seeds.np[slot] = drawn
        self.num_logprobs[slot] = NO_LOGPROBS if p.logprobs is None else p.logprobs


class PenaltiesState:
    def __init__(self, req_states: RequestState):
        self.req_states = req_states
        self.repetition_penalty = UvaBackedTensor(SLOTS, np.float32, 1)
        self.frequency_penalty = UvaBackedTensor(SLOTS, np.float32)
        self.presence_penalty = UvaBackedTensor(SLOTS, np.float32)
        self.use_penalty = np.zeros(SLOTS, bool)
        self.prompt_bin_mask = torch.zeros(SLOTS, -(-V // 32), dtype=torch.int32)
        self.output_bin_counts = torch.zeros(SLOTS, V, dtype=torch.int32)

    def add_request(self, slot: int, p: Any) -> None:
        self.repetition_penalty.np[slot] = p.repetition_penalty
        self.frequency_penalty.np[slot] = p.frequency_penalty
        self.presence_penalty.np[slot] = p.presence_penalty
        self.use_penalty[slot] = (
            p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
        )
        if self.use_penalty[slot]:  # bincount; those of others stay what they were
            tokens = self.req_states.tokens[slot]
            length = int(self.req_states.prompt_len.np[slot])
            bits = np.zeros(self.prompt_bin_mask.shape[1], np.uint32)
            for token in tokens[:length]:
                bits[token // 32] |= np.uint32(1 << (token % 32))
            self.prompt_bin_mask[slot] = torch.from_numpy(bits.view(np.int32))
            self.output_bin_counts[slot] = torch.bincount(
                torch.tensor(tokens[length:], dtype=torch.int64), minlength=V
            )

    def apply_penalties(
        self, logits, expanded_idx_mapping, idx_mapping_np, input_ids, expanded_local_pos
    ):
        if not self.use_penalty[idx_mapping_np].any():
            return
        for row, slot in enumerate(expanded_idx_mapping.tolist()):
            repetition = self.repetition_penalty.gpu[slot]
            counts = self.output_bin_counts[slot]
            bits = self.prompt_bin_mask[slot][torch.arange(V) // 32] >> (torch.arange(V) % 32)
            now = logits[row].float()
            if repetition != 1:
                scale = torch.where((bits & 1).bool() | (counts > 0), repetition, 1.0)
                now = now * torch.where(now > 0, 1 / scale, scale)
            now = now - self.frequency_penalty.gpu[slot] * counts
            logits[row] = (now - self.presence_penalty.gpu[slot] * (counts > 0)).to(logits.dtype)

    def apply(self, logits, ctx):
        tokens = (ctx.input_ids, ctx.expanded_local_pos)
        self.apply_penalties(logits, ctx.expanded_idx_mapping, ctx.idx_mapping_np, *tokens)
        return logits


class LogitBiasState:
    def __init__(self) -> None:
        ids = {"dtype": torch.int32}
        self.num_allowed_token_ids = UvaBackedTensor(SLOTS, np.int32)
        self.allowed_token_ids = StagedWriteTensor((SLOTS, 64), **ids)
        self.num_logit_bias = UvaBackedTensor(SLOTS, np.int32)
        self.logit_bias_token_ids = StagedWriteTensor((SLOTS, 64), **ids)
        self.logit_bias = StagedWriteTensor((SLOTS, 64), torch.float32)
        self.min_lens = UvaBackedTensor(SLOTS, np.int32)
        self.num_stop_token_ids = UvaBackedTensor(SLOTS, np.int32)
        self.stop_token_ids = StagedWriteTensor((SLOTS, 16), **ids)
        self.use_logit_bias = np.zeros(SLOTS, bool)

    def add_request(self, slot: int, prompt_len: int, p: Any) -> None:
        allowed, bias = p.allowed_token_ids or [], p.logit_bias or {}
        stop = list(p.all_stop_token_ids) if p.min_tokens > 0 else []
        self.num_allowed_token_ids.np[slot] = len(allowed)
        self.allowed_token_ids.stage_write(slot, 0, allowed)
        self.num_logit_bias.np[slot] = len(bias)
        self.logit_bias_token_ids.stage_write(slot, 0, bias.keys())
        self.logit_bias.stage_write(slot, 0, bias.values())
        self.min_lens.np[slot] = prompt_len + p.min_tokens
        self.num_stop_token_ids.np[slot] = len(stop)
        self.stop_token_ids.stage_write(slot, 0, stop)
        self.use_logit_bias[slot] = bool(allowed or bias or stop)

    def apply_logit_bias(self, logits, expanded_idx_mapping, idx_mapping_np, pos):
        if not self.use_logit_bias[idx_mapping_np].any():
            return
        for row, slot in enumerate(expanded_idx_mapping.tolist()):
            ids = self.allowed_token_ids.gpu[slot, : self.num_allowed_token_ids.gpu[slot]].long()
            if len(ids):
                kept = logits[row, ids].clone()
                logits[row] = -torch.inf
                logits[row, ids] = kept
            n = self.num_logit_bias.gpu[slot]
            ids = self.logit_bias_token_ids.gpu[slot, :n].long()
            biased = logits[row, ids].float() + self.logit_bias.gpu[slot, :n]
            logits[row, ids] = biased.to(logits.dtype)
            if pos[row] + 1 < self.min_lens.gpu[slot]:
                ids = self.stop_token_ids.gpu[slot, : self.num_stop_token_ids.gpu[slot]].long()
                logits[row, ids] = -torch.inf

    def apply(self, logits, ctx):
        self.apply_logit_bias(logits, ctx.expanded_idx_mapping, ctx.idx_mapping_np, ctx.pos)
        return logits


class BadWordsState:
    def __init__(self, req_states: RequestState):
        self.req_states = req_states
        self.words: list[list[list[int]]] = [[] for _ in range(SLOTS)]
        self.num_bad_words = UvaBackedTensor(SLOTS, np.int32)

    def add_request(self, slot: int, p: Any) -> None:
        self.words[slot] = p.bad_words_token_ids or []
        self.num_bad_words.np[slot] = len(self.words[slot])

    def apply_bad_words(
        self, logits, expanded_idx_mapping, idx_mapping_np, input_ids, expanded_local_pos
    ):
        for row, slot in enumerate(expanded_idx_mapping.tolist()):
            output = self.req_states.tokens[slot][self.req_states.prompt_len.gpu[slot] :]
            for word in self.words[slot]:
                if (
                    len(word) - 1 <= len(output)
                    and output[len(output) + 1 - len(word) :] == word[:-1]
                ):
                    logits[row, word[-1]] = -torch.inf

    def apply(self, logits, ctx):
        tokens = (ctx.input_ids, ctx.expanded_local_pos)
        self.apply_bad_words(logits, ctx.expanded_idx_mapping, ctx.idx_mapping_np, *tokens)
        return logits


class LogprobTokenIdsState:
    def __init__(self) -> None:
        self.num_token_ids = UvaBackedTensor(SLOTS, np.int32)

    def add_request(self, slot: int, p: Any) -> None:
        self.num_token_ids.np[slot] = len(p.logprob_token_ids or [])


class ThinkingBudgetState:
    enabled = True

    def __init__(self) -> None:
        self.use_thinking_budget = np.zeros(SLOTS, bool)

    def add_request(self, slot: int, p: Any) -> None:
        self.use_thinking_budget[slot] = p.thinking_token_budget is not None


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
        states, slots = self.sampling_states, batch.idx_mapping_np
        asked = int(states.num_logprobs[slots].max())
        raw = logits.clone()
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
            if T == 0:
                sampled.append(now.argmax())
                continue
            order = (now / T).argsort(descending=True)
            chances = (now / T)[order].softmax(0)
            kept = torch.arange(V) < states.top_k.gpu[slot]
            kept &= chances.cumsum(0) - chances < states.top_p.gpu[slot]
            kept &= chances >= states.min_p.gpu[slot] * chances[0]
            noisy = now / T + gumbel(int(states.seeds.gpu[slot]), int(context.pos[row]))
            noisy[order[~kept]] = -torch.inf
            sampled.append(noisy.argmax())
        tokens = torch.stack(sampled)
        counts = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs), batch.seq_lens, batch.cu_num_logits,
            batch.idx_mapping, self.req_states.prefill_len.gpu,
        )  # fmt: skip
        tensors = None
        if asked != NO_LOGPROBS:
            scores = raw.float().log_softmax(1)
            ids = torch.cat([tokens[:, None], scores.topk(max(asked, 0), 1).indices], 1)
            own = scores.gather(1, ids)
            tensors = LogprobsTensors(ids, own, (scores >= own[:, :1]).sum(1))
        return SamplerOutput(tokens.view(-1, 1), tensors, None, *counts)


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
        row_of = {each: row for row, each in enumerate(input_batch.req_ids)}
        for name, bits in zip(grammar_req_ids, grammar_bitmask, strict=True):
            allowed = torch.from_numpy(bits.copy())[torch.arange(V) // 32] >> (torch.arange(V) % 32)
            logits[row_of[name], (allowed & 1) == 0] = -torch.inf


@dataclass
class GPUModelRunner:
    model: Any = field(default_factory=Model)
    lora_config: Any = None
    speculative_config: Any = None
    batch_sharder: Any = None
    max_num_reqs: int = SLOTS
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
        output = self.sampler(logits, input_batch)
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
