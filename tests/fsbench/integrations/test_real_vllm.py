"""The plug-in against vLLM itself, where the measured version can be imported. No GPU is needed.

Elsewhere all of it is skipped; `make check-engines` reads vLLM's source without importing it.
"""

from __future__ import annotations

import ast
import types
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fsbench.e2e.vllm_worker as worker
from fsbench.integrations import vllm as plugin
from fsbench.integrations.routing import Need
from fsbench.integrations.vllm_expected import check_parts, check_source, find
from fsbench.machine.packages import package_version

if (package_version("vllm") or "").split("+")[0] != plugin.MEASURED:
    pytest.skip(f"vLLM {plugin.MEASURED} is not installed", allow_module_level=True)
pytest.importorskip("vllm.v1.worker.gpu.model_runner")

ADAPTER = plugin.adapter_of(plugin.MEASURED)


def test_what_the_plug_in_calls_and_reads_is_there():
    check_source(ADAPTER.expected)
    states = find("vllm.v1.worker.gpu.sample.states:NO_LOGPROBS")
    assert states == -1


def test_of_real_batches_the_views_are_those_of_the_gathers():
    """One token each: logits_indices is then the identity, and expanded rows are the rows."""
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    made = InputBatch.make_dummy(4, 4, InputBuffers(8, 32, torch.device("cpu")))
    assert made.num_tokens == made.num_reqs
    assert made.logits_indices.tolist() == made.expanded_idx_mapping.tolist() == list(range(4))
    assert made.positions.dtype == torch.int64


@pytest.fixture
def runner(monkeypatch) -> Any:
    """vLLM's own Sampler for 8 requests over 700 tokens, its host buffers in plain memory."""
    import vllm.v1.worker.gpu.buffer_utils as buffers
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    class PlainBuffer:
        def __init__(self, size: Any, dtype: torch.dtype):
            self.cpu = torch.zeros(size, dtype=dtype)
            self.np, self.uva = self.cpu.numpy(), self.cpu

    monkeypatch.setattr(buffers, "UvaBuffer", PlainBuffer)
    device = torch.device("cpu")
    states = RequestState(8, 64, 64, 0, 700, device)
    sampler = Sampler(8, 700, device, states)
    return types.SimpleNamespace(
        sampler=sampler,
        req_states=states,
        **dict.fromkeys(("model", "lora_config", "parallel_config", "max_num_reqs")),
        **dict.fromkeys(("speculative_config", "model_memory_usage", "speculator")),
        **dict.fromkeys(("rejection_sampler", "num_speculative_steps", "max_num_tokens")),
    )


CASES = {
    "plain": ({"temperature": 0.7}, Need.TEMPERATURE),
    "greedy": ({"temperature": 0, "top_k": 5}, Need.TEMPERATURE),
    "seed": ({"seed": 7}, Need(0)),
    "all tokens by top_k": ({"top_k": 700}, Need(0)),
    "top_k": ({"top_k": 50}, Need.FILTER),
    "top_p": ({"top_p": 0.9}, Need.FILTER),
    "min_p": ({"min_p": 0.1}, Need.FILTER),
    "presence": ({"presence_penalty": 0.1}, Need.BIAS),
    "frequency": ({"frequency_penalty": 0.1}, Need.BIAS),
    "repetition": ({"repetition_penalty": 1.1}, Need.REPETITION),
    "logit_bias": ({"logit_bias": {3: 1.0}}, Need.BIAS),
    "allowed": ({"allowed_token_ids": [1, 2]}, Need.BIAS),
    "min_tokens": ({"min_tokens": 2, "stop_token_ids": [5]}, Need.BIAS),
    "bad_words": ({"_bad_words_token_ids": [[1], [2, 3]]}, Need.BIAS),
    "logprobs": ({"logprobs": 0}, Need.LOGPROB),
    "top logprobs": ({"logprobs": 2}, Need.LOGPROB | Need.TOP_LOGPROBS),
    "many logprobs": ({"logprobs": 21}, Need.LOGPROB | Need.MORE_LOGPROBS),
    "logprobs of": ({"logprob_token_ids": [3]}, Need.LOGPROB | Need.MORE_LOGPROBS),
    "default logprobs": (
        {"top_k": 50, "logprobs": 2},
        Need.FILTER | Need.LOGPROB | Need.OTHER_LOGPROB | Need.TOP_LOGPROBS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_requests_need(runner, name):
    from vllm import SamplingParams

    parameters, expected = CASES[name]
    check_parts(ADAPTER.expected, ADAPTER.parts(runner))
    assert ADAPTER.lacks(runner) is None
    for row in (0, 2, 5):
        runner.sampler.add_request(row, 4, SamplingParams(**(parameters if row == 5 else {})))
    needs = ADAPTER.needs(runner, np.array([0, 5, 2], np.int32))
    assert needs.tolist() == [0, int(expected), 0]
    runner.sampler.add_request(5, 4, SamplingParams())  # the row's next request is plain
    assert not ADAPTER.needs(runner, np.array([5], np.int32)).any()


def test_the_engine_takes_what_fsbench_e2e_gives_it():
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    from fsbench.e2e.models import kinds

    source = Path(worker.__file__).with_name("vllm_served.py").read_text(encoding="utf-8")
    (call,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LLM"
    ]
    assert {each.arg for each in call.keywords} <= {each.name for each in fields(EngineArgs)}
    asked = {name for kind in kinds().values() for each in kind for name in each} - {"seeded"}
    assert asked | {"seed", "max_tokens", "ignore_eos"} <= set(SamplingParams.__struct_fields__)
