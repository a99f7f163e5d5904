"""vLLM's own sampler, from the files that `make check-engines` downloads to build/engines.

The other modules of vLLM are stubs, and host buffers are plain memory.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from check_engines import FOLDER
from tree import ROOT

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


@contextmanager
def real_vllm() -> Iterator[None]:
    """Let `vllm` be imported inside; skip the test if there are no files."""
    if not FILES.is_dir():
        pytest.skip(f"no {FOLDER}/vllm-0.26.0: run `make check-engines`")
    with pytest.MonkeyPatch.context() as patch:
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
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
