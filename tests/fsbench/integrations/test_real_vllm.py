"""The plug-in against vLLM's own source, where vLLM 0.22.1 can be imported. No GPU is needed.

Elsewhere all of it is skipped, with the reason. The fake of the other tests is compared with the
real thing here: names, parameters, fields, and which parameters of a request set which state.
"""

from __future__ import annotations

import inspect
import types
from dataclasses import fields
from typing import Any

import fake_vllm
import numpy as np
import pytest
import torch

from fsbench.errors import EngineMismatch
from fsbench.integrations import vllm as plugin
from fsbench.integrations import vllm_interface as interface
from fsbench.machine.packages import package_version

if (package_version("vllm") or "").split("+")[0] != interface.VERSION:
    pytest.skip(f"vLLM {interface.VERSION} is not installed", allow_module_level=True)
pytest.importorskip("vllm.v1.worker.gpu.model_runner")


def test_what_the_plug_in_calls_and_reads_is_there():
    interface.check_signatures()


def test_the_hooks_go_into_the_real_classes(monkeypatch):
    runner, old, worker = map(
        interface.find, (interface.RUNNER, interface.RUNNER_V1, interface.WORKER)
    )
    for cls, names in (
        (runner, ("load_model", "_dummy_sampler_run", "sample")),
        (old, ("load_model",)),
    ):
        for name in names:  # so that they are put back
            monkeypatch.setattr(cls, name, getattr(cls, name))
    monkeypatch.setattr(runner, "_fsbench", None, raising=False)
    monkeypatch.setattr(worker, "fsbench_counts", None, raising=False)
    before = runner.sample
    plugin._install(runner, old, worker, "flash_sample", False)
    assert runner.sample is not before
    with pytest.raises(EngineMismatch, match="runner V2"):
        old.load_model(object())
    loaded = types.SimpleNamespace(model_runner=types.SimpleNamespace(_fsbench=runner._fsbench))
    assert worker.fsbench_counts(loaded) == {"served": 0, "left": {}}


@pytest.mark.parametrize(
    ("where", "own"),
    [
        (f"{interface.RUNNER}.load_model", fake_vllm.GPUModelRunner.load_model),
        (f"{interface.RUNNER}._dummy_sampler_run", fake_vllm.GPUModelRunner._dummy_sampler_run),
        (f"{interface.RUNNER}.sample", fake_vllm.GPUModelRunner.sample),
        (f"{interface.RUNNER_V1}.load_model", fake_vllm.GPUModelRunnerV1.load_model),
    ],
)
def test_the_fake_has_the_real_parameters(where, own):
    real, fake = (inspect.signature(each).parameters for each in (interface.find(where), own))
    assert [(p.name, p.kind) for p in real.values()] == [(p.name, p.kind) for p in fake.values()]


def test_the_fakes_batch_has_fields_of_the_real_one():
    from vllm.v1.worker.gpu.input_batch import InputBatch

    real = {each.name for each in fields(InputBatch)}
    assert {each.name for each in fields(fake_vllm.InputBatch)} <= real


def test_of_real_batches_the_views_are_those_of_the_gathers():
    """One token each: logits_indices is then the identity."""
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    made = InputBatch.make_dummy(4, 4, InputBuffers(8, 32, torch.device("cpu")))
    assert made.num_tokens == made.num_reqs
    assert made.logits_indices.tolist() == list(range(4))
    assert made.positions.dtype == torch.int64


def test_constants_and_classes_that_are_compared_by_name():
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod,
        VocabParallelEmbeddingShardIndices,
    )
    from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

    assert NO_LOGPROBS == interface.NO_LOGPROBS
    assert UnquantizedEmbeddingMethod.__name__ == "UnquantizedEmbeddingMethod"
    source = inspect.getsource(LogitsProcessor.__init__)
    for name in ("scale", "soft_cap", "org_vocab_size", "logits_as_input"):
        assert f"self.{name} = " in source
    names = {each.name for each in fields(VocabParallelEmbeddingShardIndices)}
    assert {"org_vocab_start_index", "org_vocab_end_index"} <= names


@pytest.fixture
def sampler(monkeypatch) -> Any:
    """vLLM's own Sampler for 8 requests over 700 tokens, its host buffers in plain memory."""
    import vllm.v1.worker.gpu.buffer_utils as buffers
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    class PlainBuffer:
        def __init__(self, size: Any, dtype: torch.dtype):
            self.cpu = torch.zeros(size, dtype=dtype)
            self.np, self.uva = self.cpu.numpy(), self.cpu

    monkeypatch.setattr(buffers, "UvaBuffer", PlainBuffer)
    requests = types.SimpleNamespace(max_num_reqs=8, vocab_size=700, device=torch.device("cpu"))
    return Sampler(8, 700, torch.device("cpu"), requests)


CASES = {
    "plain": ({"temperature": 0.7}, None),
    "greedy": ({"temperature": 0}, None),
    "seed": ({"seed": 7}, None),
    "all tokens by top_k": ({"top_k": 700}, None),
    "top_k": ({"top_k": 50}, "top-k"),
    "top_p": ({"top_p": 0.9}, "top-p"),
    "min_p": ({"min_p": 0.1}, "min-p"),
    "presence": ({"presence_penalty": 0.1}, "penalties"),
    "frequency": ({"frequency_penalty": 0.1}, "penalties"),
    "repetition": ({"repetition_penalty": 1.1}, "penalties"),
    "logit_bias": ({"logit_bias": {3: 1.0}}, "logit bias"),
    "allowed": ({"allowed_token_ids": [1, 2]}, "logit bias"),
    "min_tokens": ({"min_tokens": 2, "stop_token_ids": [5]}, "logit bias"),
    "bad_words": ({"_bad_words_token_ids": [[1], [2, 3]]}, "bad words"),
    "logprobs": ({"logprobs": 0}, "logprobs"),
    "logprobs of": ({"logprob_token_ids": [3]}, "logprobs"),
}


@pytest.mark.parametrize("name", CASES)
def test_which_requests_are_served(sampler, name):
    from vllm import SamplingParams

    parameters, expected = CASES[name]
    runner = types.SimpleNamespace(
        sampler=sampler,
        req_states=types.SimpleNamespace(prefill_len=fake_vllm.Backed([2] * 8, int)),
    )
    interface.check_attributes("runner.sampler", sampler, interface.ATTRIBUTES["runner.sampler"])
    plugged = plugin.Plugged(types.SimpleNamespace(declines=lambda temperature: None))
    for row in (0, 2, 5):
        sampler.add_request(row, 4, SamplingParams(**(parameters if row == 5 else {})))
    assert plugged.declines(runner, fake_vllm.batch([0, 5]), None) == expected
    assert plugged.declines(runner, fake_vllm.batch([2, 0]), None) is None
    sampler.add_request(5, 4, SamplingParams())  # the row's next request is plain
    assert plugged.declines(runner, fake_vllm.batch([0, 5]), None) is None


def test_seed_and_temperature_of_a_request_arrive(sampler):
    from vllm import SamplingParams

    sampler.add_request(3, 4, SamplingParams(temperature=0.25, seed=2**40 + 1))
    states = sampler.sampling_states
    assert states.temperature.np[3] == np.float32(0.25) and states.seeds.np[3] == 2**40 + 1
    assert states.seeds.np.dtype == np.int64 and states.temperature.np.dtype == np.float32


def test_the_engine_takes_what_fsbench_e2e_gives_it():
    """Arguments of LLM and of requests; ProfilerConfig refuses fields that it does not have."""
    import ast
    from pathlib import Path

    from vllm import SamplingParams
    from vllm.config import ProfilerConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    import fsbench.e2e.vllm_worker as worker

    calls = [
        node
        for node in ast.walk(ast.parse(Path(worker.__file__).read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("LLM", "SamplingParams")
    ]
    assert len(calls) == 2
    known = {
        "LLM": {each.name for each in fields(EngineArgs)},
        "SamplingParams": set(SamplingParams.__struct_fields__),
    }
    for call in calls:
        assert {each.arg for each in call.keywords} <= known[call.func.id]  # type: ignore[attr-defined]
    assert RequestOutputKind.DELTA
    ProfilerConfig(
        profiler="torch",
        torch_profiler_dir="/tmp",
        torch_profiler_with_stack=False,
        torch_profiler_use_gzip=False,
        torch_profiler_dump_cuda_time_total=False,
    )
    assert list(inspect.signature(LLMEngine.add_request).parameters)[1:4] == [
        *("request_id", "prompt", "params")
    ]
    for name in ("step", "has_unfinished_requests"):
        assert callable(getattr(LLMEngine, name))
