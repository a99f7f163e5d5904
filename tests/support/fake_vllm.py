"""A fake of vLLM 0.26.0 on a CPU: the parts that fsbench.integrations uses.

Names, parameters and fields are those of vLLM's source, with which `make check-engines` compares
the plug-in. Kernels are written in torch, with processors in the same order. Noise is a function of
seed, position and token, as in vLLM.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from fake_vllm_sampler import (
    GrammarOutput,
    InputBatch,
    LogprobsTensors,
    RejectionSampler,
    Sampler,
    SamplerOutput,
    get_num_sampled_and_rejected,
)
from fake_vllm_states import (
    SLOTS,
    BadWordsState,
    D,
    LogitBiasState,
    PenaltiesState,
    RequestState,
    V,
)
from torch import Tensor


class DraftModelSpeculator:
    """A drafter with the head of a model. d2t: differences of a reduced vocabulary, or None."""

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
    """A model of V tokens, whose weight has padding rows behind them, as vLLM's may."""

    def __init__(self, padding: int = 4, dtype: Any = torch.bfloat16, scale: float = 0.25):
        generator = torch.Generator().manual_seed(3)
        weight = (
            torch.randn(V + padding, D, generator=generator, dtype=torch.float32).to(dtype) * scale
        )
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


class ModelConfig:
    dtype, logprobs_mode = torch.bfloat16, "raw_logprobs"
    hf_text_config = types.SimpleNamespace()

    def get_vocab_size(self) -> int:
        return V

    def get_hidden_size(self) -> int:
        return D


@dataclass
class GPUModelRunner:
    model: Any = field(default_factory=Model)
    lora_config: Any = None
    speculative_config: Any = None
    speculator: Any = None
    max_num_reqs: int = SLOTS
    max_num_tokens: int = 64
    num_speculative_steps: int = 3
    model_memory_usage: int = 1000
    model_config: Any = field(default_factory=ModelConfig)
    calls: list[Any] = field(default_factory=list)
    parallel_config: Any = field(
        default_factory=lambda: types.SimpleNamespace(tensor_parallel_size=1)
    )

    def __post_init__(self) -> None:
        self.req_states = RequestState()
        self.sampler: Any = Sampler(self.req_states)
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
        self.calls.append(list(input_batch.req_ids))
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

    def sample_calls(self) -> list[list[str]]:
        """Return the requests of each call of `sample`."""
        return [call for call in self.calls if isinstance(call, list)]


class GPUModelRunnerV1:
    def load_model(self, load_dummy_weights: bool = False) -> None:
        self.loaded = True


class Worker:
    model_runner: Any = None

    def compile_or_warm_up_model(self) -> float:
        return 1.5

    def finish_weight_update(self) -> None: ...

    def wake_up(self, tags: Any = None) -> None: ...


def modules() -> dict[str, types.ModuleType]:
    """Return new modules with new classes, so that a test's hooks do not reach another test."""

    def module(name: str, **content: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(content)
        return made

    def fresh(cls: type) -> type:
        return type(cls.__name__, (cls,), {n: v for n, v in vars(cls).items() if callable(v)})

    gpu, sample = "vllm.v1.worker.gpu", "vllm.v1.worker.gpu.sample"
    contents = {
        f"{gpu}.model_runner": {"GPUModelRunner": fresh(GPUModelRunner)},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": fresh(GPUModelRunnerV1)},
        "vllm.v1.worker.gpu_worker": {"Worker": fresh(Worker)},
        f"{gpu}.input_batch": {
            "InputBatch": InputBatch,
            "get_num_sampled_and_rejected": get_num_sampled_and_rejected,
        },
        f"{sample}.sampler": {"Sampler": Sampler},
        f"{sample}.logit_bias": {"LogitBiasState": LogitBiasState},
        f"{sample}.penalties": {"PenaltiesState": PenaltiesState},
        f"{sample}.bad_words": {"BadWordsState": BadWordsState},
        f"{gpu}.spec_decode.rejection_sampler": {"RejectionSampler": RejectionSampler},
        f"{gpu}.spec_decode.speculator": {"DraftModelSpeculator": DraftModelSpeculator},
        f"{sample}.output": {"SamplerOutput": SamplerOutput},
        "vllm.v1.outputs": {"LogprobsTensors": LogprobsTensors},
        "vllm.v1.core.sched.output": {"GrammarOutput": GrammarOutput},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: None},
    }
    made = {name: module(name, **content) for name, content in contents.items()}
    for name in list(made):
        while "." in name:
            name = name.rpartition(".")[0]
            made.setdefault(name, module(name, __path__=[]))
    return made


def install(monkeypatch: Any, version: str | None = "0.26.0") -> dict[str, types.ModuleType]:
    """Put the fake where `import vllm` finds it; return its modules by name."""
    installed = modules()
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in installed.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("fsbench.integrations.vllm.package_version", lambda package: version)
    return installed
