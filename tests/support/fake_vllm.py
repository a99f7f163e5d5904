"""The parts of vLLM 0.22.1 that fsbench.integrations.vllm touches, and nothing else, on a CPU.

Names, parameters and fields are those of vLLM's source (test_real_vllm.py compares them where vLLM
can be imported). Its own sampler is an argmax here, marked by `SamplerOutput.by`.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

NO_LOGPROBS = -1


class Backed:
    """UvaBackedTensor: np is the truth."""

    def __init__(self, values: Any, dtype: Any):
        self.np = np.array(values, dtype=dtype)

    @property
    def gpu(self) -> torch.Tensor:
        return torch.from_numpy(self.np)


@dataclass
class SamplerOutput:
    sampled_token_ids: Any
    logprobs_tensors: Any
    num_nans: Any
    num_sampled: Any


@dataclass
class InputBatch:
    num_reqs: int
    num_tokens: int
    num_draft_tokens: int
    idx_mapping: torch.Tensor
    idx_mapping_np: np.ndarray
    positions: torch.Tensor
    logits_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor
    cu_num_logits: torch.Tensor


def get_num_sampled_and_rejected(num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len):
    complete = seq_lens[: len(num_sampled)] >= prefill_len[idx_mapping.long()]
    return num_sampled * complete.to(num_sampled.dtype), torch.zeros_like(num_sampled)


class Sampler:
    """States of 8 requests over a vocabulary, as after add_request of plain parameters."""

    def __init__(self, V: int, requests: int = 8):
        spaces = types.SimpleNamespace
        self.compute_nans = False
        self.sampling_states = spaces(
            vocab_size=V,
            temperature=Backed([1.0] * requests, np.float32),
            seeds=Backed(range(100, 100 + requests), np.int64),
            top_k=Backed([V] * requests, np.int32),
            top_p=Backed([1.0] * requests, np.float32),
            min_p=Backed([0.0] * requests, np.float32),
            num_logprobs=np.full(requests, NO_LOGPROBS, np.int32),
        )
        self.penalties_state = spaces(use_penalty=np.zeros(requests, bool))
        self.logit_bias_state = spaces(use_logit_bias=np.zeros(requests, bool))
        self.bad_words_state = spaces(num_bad_words=Backed([0] * requests, np.int32))
        self.logprob_token_ids_state = spaces(num_token_ids=Backed([0] * requests, np.int32))


class UnquantizedEmbeddingMethod:
    pass


class LMHead:
    def __init__(self, weight: torch.Tensor, V: int):
        self.weight = weight
        self.quant_method: Any = UnquantizedEmbeddingMethod()
        self.shard_indices = types.SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=V)


class LogitsProcessor:
    def __init__(self, V: int, scale: float = 1.0, soft_cap: float | None = None):
        self.org_vocab_size, self.scale, self.soft_cap = V, scale, soft_cap
        self.logits_as_input = False

    def __call__(self, head: LMHead, hidden: torch.Tensor) -> torch.Tensor:
        logits = (hidden @ head.weight.T)[:, : self.org_vocab_size]
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits * self.scale


class Model:
    """V tokens; the weight has padding rows behind them, as vLLM's may."""

    def __init__(self, V: int = 700, D: int = 64, padding: int = 4, dtype: Any = torch.bfloat16):
        torch.manual_seed(3)
        self.lm_head = LMHead(torch.randn(V + padding, D).to(dtype) / 4, V)
        self.logits_processor = LogitsProcessor(V)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.lm_head, hidden_states)


@dataclass
class GPUModelRunner:
    model: Any = field(default_factory=Model)
    lora_config: Any = None
    max_num_reqs: int = 8
    calls: list[str] = field(default_factory=list)
    parallel_config: Any = field(
        default_factory=lambda: types.SimpleNamespace(tensor_parallel_size=1)
    )

    def __post_init__(self) -> None:
        self.sampler: Any = Sampler(self.model.logits_processor.org_vocab_size)
        self.req_states = types.SimpleNamespace(prefill_len=Backed([2] * 8, np.int32))

    def load_model(self, load_dummy_weights: bool = False, *args: Any, **kwargs: Any) -> None:
        self.calls.append("load_model")

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        self.calls.append("_dummy_sampler_run")

    def sample(self, hidden_states, input_batch, grammar_output):
        self.calls.append("sample")
        logits = self.model.compute_logits(hidden_states[input_batch.logits_indices])
        ones = input_batch.seq_lens.new_ones(input_batch.num_reqs)
        output = SamplerOutput(logits.argmax(1).view(-1, 1), None, None, ones)
        return output, ones, torch.zeros_like(ones)


class GPUModelRunnerV1:
    def load_model(self, load_dummy_weights: bool = False) -> None:
        self.loaded = True


class Worker:
    model_runner: Any = None

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        pass


def modules() -> dict[str, types.ModuleType]:
    """Fresh modules, with classes of their own, so that hooks of one test do not reach another."""

    def module(name: str, **content: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(content)
        return made

    def fresh(cls: type) -> type:
        return type(cls.__name__, (cls,), {n: v for n, v in vars(cls).items() if callable(v)})

    found = {
        "vllm.v1.worker.gpu.model_runner": module("m", GPUModelRunner=fresh(GPUModelRunner)),
        "vllm.v1.worker.gpu_model_runner": module("m1", GPUModelRunner=fresh(GPUModelRunnerV1)),
        "vllm.v1.worker.gpu_worker": module("w", Worker=fresh(Worker)),
        "vllm.v1.worker.gpu.input_batch": module(
            "i", InputBatch=InputBatch, get_num_sampled_and_rejected=get_num_sampled_and_rejected
        ),
        "vllm.v1.worker.gpu.sample.output": module("o", SamplerOutput=SamplerOutput),
        "vllm.distributed": module("d", get_tp_group=lambda: None),
    }
    for name in list(found):
        while "." in name:
            name = name.rpartition(".")[0]
            found.setdefault(name, module(name, __path__=[]))
    return found


def install(monkeypatch: Any, version: str = "0.22.1") -> dict[str, types.ModuleType]:
    """Put the fake where `import vllm` finds it."""
    found = modules()
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("fsbench.integrations.vllm.package_version", lambda package: version)
    return found


def batch(rows: list[int], lengths: list[int] | None = None, start: int = 9) -> InputBatch:
    """Requests of these rows of the states, each feeding some tokens (one by default).

    The last token of the request at row r is at position start + r.
    """
    counts = lengths or [1] * len(rows)
    ends = np.cumsum(counts)
    positions = torch.cat(
        [start + r + 1 - n + torch.arange(n) for r, n in zip(rows, counts, strict=True)]
    )
    seq_lens = torch.tensor([start + r + 1 for r in rows], dtype=torch.int32)
    return InputBatch(
        num_reqs=len(rows),
        num_tokens=int(ends[-1]),
        num_draft_tokens=0,
        idx_mapping=torch.tensor(rows, dtype=torch.int32),
        idx_mapping_np=np.array(rows, dtype=np.int32),
        positions=torch.cat([positions, torch.zeros(5, dtype=torch.int64)]),  # padding
        logits_indices=torch.from_numpy(ends) - 1,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens.clone(),
        cu_num_logits=torch.arange(len(rows) + 1, dtype=torch.int32),
    )
