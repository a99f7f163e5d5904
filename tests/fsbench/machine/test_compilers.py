"""Variables that are set for compilers."""

import os
from types import SimpleNamespace

import pytest
import triton
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from fsbench.machine import compilers


@pytest.fixture
def reported(monkeypatch, tmp_path):
    """Has a torch with these files and an nvcc with this help; what `settle` then set."""

    def settle(torch_has=(), nvcc_says=None, **environ):
        for name in ("TRITON_PTXAS_PATH", "TRITON_CACHE_DIR", "NVCC_APPEND_FLAGS", "CUDA_PATH"):
            monkeypatch.setenv(name, "")  # a variable that `settle` sets is removed afterwards
            monkeypatch.delenv(name)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        (tmp_path / "bin").mkdir()
        for name in torch_has:
            (tmp_path / "bin" / name).write_text("")
            (tmp_path / "bin" / name).chmod(0o755)
        if nvcc_says is not None:
            (tmp_path / "bin" / "nvcc").write_text(f"#!/bin/sh\necho '{nvcc_says}'\n")
            (tmp_path / "bin" / "nvcc").chmod(0o755)
        result = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr(compilers, "find_spec", lambda name: result)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        compilers.settle()
        return os.environ.get("TRITON_PTXAS_PATH"), os.environ.get("NVCC_APPEND_FLAGS")

    return settle


def test_triton_takes_the_assembler_that_inductor_would_have_it_take(reported, tmp_path):
    assert reported(["ptxas"]) == (str(tmp_path / "bin" / "ptxas"), None)


def test_a_kernel_of_inductor_does_not_move_tritons_cache(reported):
    reported()
    before = triton.knobs.cache.dir
    device = DeviceProperties("cuda", 0, 132, 90)
    kernel = SimpleNamespace(__name__="kernel")
    CachingAutotuner(kernel, {"device": device}, [triton.Config({})], None, [], False, None)
    assert triton.knobs.cache.dir == before


def test_a_torch_without_assembler_and_a_machine_without_nvcc_leave_all_as_it_is(reported):
    assert reported() == (None, None)


def test_variables_of_the_user_are_kept(reported):
    user_variables = {"TRITON_PTXAS_PATH": "mine", "NVCC_APPEND_FLAGS": "-lineinfo"}
    assert reported(["ptxas"], "--split-compile <number>", **user_variables) == (
        "mine",
        "-lineinfo --split-compile=0",
    )


@pytest.mark.parametrize(
    "says, flags", [("--split-compile <number>", "--split-compile=0"), ("--threads <number>", None)]
)
def test_an_nvcc_that_can_takes_all_cores(reported, says, flags):
    assert reported(nvcc_says=says)[1] == flags
