"""`vllm_gumbel` on vLLM's own sampler, from its files, with its kernels in the interpreter.

`make check-engines` downloads the files to build/engines; without them all tests are skipped. The
other modules of vLLM are stubs, and host buffers are plain memory. Triton's filters do not run in
the interpreter; below 8 rows vLLM sorts.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from check_engines import FOLDER
from tree import ROOT

from fsbench.baselines.vllm_gumbel import PROVIDER
from fsbench.problem import Problem
from fsbench.verify.drawing import exact_head, random_logits

pytestmark = pytest.mark.interpreter

FILES = ROOT / FOLDER / "vllm-0.26.0"
REAL = ("vllm.v1.worker.gpu.sample", "vllm.v1.sample.ops", "vllm.v1.outputs",
        "vllm.v1.worker.gpu.states", "vllm.v1.worker.gpu.buffer_utils")  # fmt: skip


class Anything(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The files of REAL; a stub for every other module of vllm."""

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] != "vllm":
            return None
        file = FILES / f"{name.replace('.', '/')}.py"
        if name.startswith(REAL) and file.exists():
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Anything(spec.name)

    def exec_module(self, module):
        module.__path__ = []


@triton.jit
def log1p(x):
    return tl.where(tl.abs(x) < 1e-4, x - x * x * 0.5, tl.log(1.0 + x))


def params(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    off = dict.fromkeys(
        ("seed", "logprobs", "logprob_token_ids", "logit_bias", "allowed_token_ids",
         "bad_words_token_ids"))  # fmt: skip
    return types.SimpleNamespace(
        **off, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, min_tokens=0,
        repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0,
        all_stop_token_ids=set(),
    )  # fmt: skip


class PlainBuffer:
    def __init__(self, size: Any, dtype: torch.dtype):
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np, self.uva = self.cpu.numpy(), self.cpu


@pytest.fixture(scope="module")
def sampler():
    if not FILES.is_dir():
        pytest.skip(f"no {FOLDER}/vllm-0.26.0: run `make check-engines`")
    patch = pytest.MonkeyPatch()
    patch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    platform = types.SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False)
    for name, parts in {
        "triton_utils": dict(tl=tl, triton=triton, HAS_TRITON=True,
                             tldevice=types.SimpleNamespace(log1p=log1p)),
        "platforms": dict(current_platform=platform),
        "envs": dict(VLLM_COMPUTE_NANS_IN_LOGITS=False),
        "logger": dict(init_logger=lambda name: None),
        "utils.math_utils": dict(cdiv=triton.cdiv, next_power_of_2=triton.next_power_of_2),
        "sampling_params": dict(MAX_LOGPROB_TOKEN_IDS=128, SamplingParams=params),
    }.items():  # fmt: skip
        module = Anything(f"vllm.{name}")
        vars(module).update(parts)
        patch.setitem(sys.modules, module.__name__, module)
        setattr(importlib.import_module("vllm"), name, module)  # `import vllm.envs as envs`
    buffers = importlib.import_module("vllm.v1.worker.gpu.buffer_utils")
    patch.setattr(buffers, "UvaBuffer", PlainBuffer)
    able = replace(PROVIDER.capabilities, devices=("cpu",), dtypes=("fp32",))
    yield replace(PROVIDER, capabilities=able)
    patch.undo()
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def tokens(sampler, seed=5, step=9, **options):
    problem = Problem(5, 64, 1500, "fp32", **{"temperature": 0.5, "device": "cpu", **options})
    hidden, weight, logits = exact_head(problem, random_logits(problem, 0))
    launch = sampler.build(problem, weight)
    return launch(hidden, torch.tensor([seed]), torch.tensor([step])), logits


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}]
)
def test_options_that_leave_one_token_are_greedy(sampler, options):
    drawn, logits = tokens(sampler, **options)
    assert torch.equal(drawn, logits.argmax(1))


def test_draws_depend_on_seed_and_step_and_repeat(sampler):
    hot = {"temperature": 8.0}
    first = tokens(sampler, **hot)[0]
    assert torch.equal(first, tokens(sampler, **hot)[0])
    for other in ({"seed": 6}, {"seed": 5 + 2**40}, {"step": 10}):
        assert not torch.equal(first, tokens(sampler, **other, **hot)[0]), other


def test_the_full_call_has_seeds_and_temperatures(sampler):
    problem = Problem(5, 64, 1500, "fp32", device="cpu")
    hidden, weight, logits = exact_head(problem, random_logits(problem, 0))
    T = torch.tensor([0.5, 2.0, 0.0, 1.0, 1.0])
    seed, offset = torch.arange(5), torch.tensor([3])
    drawn = sampler.sample(hidden, weight, seed=seed, offset=offset, temperature=T).tokens
    assert drawn[2] == logits[2].argmax()
    flipped = {"seed": seed.flip(0), "offset": offset, "temperature": T.flip(0)}
    assert torch.equal(sampler.sample(hidden.flip(0), weight, **flipped).tokens.flip(0), drawn)
