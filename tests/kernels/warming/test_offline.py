"""Compile for a GPU that is absent: the kernels of calls, and that a later call finds them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import astuple

import pytest
import torch
from compile_kernels import OLDEST, tritons
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.kernels.warming.offline import CHIPS, REQUESTS, Chip, Shape, compiled


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache of Triton, and no interpreter, also in subprocesses."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def warm(*options: str) -> dict:
    done = CliRunner().invoke(app, ["warm", "--json", "--processes", "1", *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


HEAD = ("--d", "512", "--v", "8192")


@pytest.mark.full
def test_compiled_kernels_are_in_the_cache(cache):
    """Batches of one bucket of the tables share a kernel."""
    options = (*HEAD, "--gpu", "a100", "--request", "greedy", "--batch", "2,16,17")
    first, second = warm(*options), warm(*options)
    assert [each["kernel"] for each in first["kernels"]] == ["flash_sampling_kernel"] * 2
    assert [each["call"].split()[1] for each in first["kernels"]] == ["B=2", "B=17"]
    assert not any(each["cached"] for each in first["kernels"])
    assert all(each["cached"] for each in second["kernels"])
    assert first["gpu"] == CHIPS["a100"].name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--model: expected an LM head"),
        ((*HEAD, "--dtype", "fp32"), "--dtype: expected bf16 or fp16"),
        ((*HEAD, "--request", "plan"), "plan"),
        ((*HEAD, "--gpu", "h201"), "h201"),
    ],
)
def test_wrong_options_are_refused(options, message):
    done = CliRunner().invoke(app, ["warm", *options])
    assert done.exit_code != 0
    assert message in f"{done.output} {done.exception}"


def test_an_interpreter_compiles_nothing(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="TRITON_INTERPRET: expected 0"):
        list(compiled(CHIPS["h200"], [Shape("plain", 1, 64, 512, "bf16")], 1))


OLDER = """
import triton
from fsbench.kernels.warming.offline import CHIPS, Shape, compiled
if __name__ == "__main__":
    shape = Shape("plain", 1, 64, 1024, "bf16")
    print(len(list(compiled(CHIPS["h100"], [shape], 1))), triton.__version__)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="builds a library of Linux")
def test_the_functions_that_launch_are_built_too(cache, monkeypatch, tmp_path):
    """Triton 3.6 builds one in C for each signature. It needs the driver's library: here a stub."""
    (tmp_path / "stub.c").write_text("int cuGetErrorString(int e, void* s) { return 0; }\n")
    library = ["-shared", "-fPIC", "-o", "libcuda.so.1", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", "stub.c", *library], cwd=tmp_path, check=True)
    (tmp_path / "warm.py").write_text(OLDER)
    for variable in ("TRITON_LIBCUDA_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tritons()[OLDEST]), prepend=os.pathsep)
    command = [sys.executable, "warm.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", OLDEST]
    assert len(list(tmp_path.rglob("__triton_launcher*.so"))) == 1


LAUNCHED = """
import torch
from fsbench.kernels.warming.offline import CHIPS, Shape, use_cpu_guard, without_gpu
use_cpu_guard()
with without_gpu(CHIPS["h200"]) as launches:
    Shape("filters", 65, 512, 8192, "bf16")()
    print(*(launch.kernel.__name__ for launch in launches))
with without_gpu(CHIPS["h200"]) as launches:
    Shape("row-filters", 3, 512, 6144, "bf16")()
    print(torch.zeros(8, device="cuda")[1:].data_ptr() % 16)
for launch in launches:
    if launch.kernel.__name__ == "sampling_narrow_kernel":
        print(launch.key.count("('*fp32', '')"))
"""


def test_launches_are_those_of_a_hopper_gpu_and_slices_as_aligned():
    """Filters follow the Hopper kernel there.

    Triton compiles another kernel for each pointer that is no multiple of 16 bytes. The scratch of
    the search for a cutoff is aligned at any batch size: 3 rows of 3 blocks here.
    """
    command = [sys.executable, "-c", LAUNCHED]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines() == [
        "hopper_kernel sampling_look_kernel",
        *("4", "0", "0", "0"),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_name_is_needed():
    with pytest.raises(Exception, match="--gpu: torch sees no CUDA device"):
        Chip.current()


NEW_PROCESS = """
import json, sys, triton
from fsbench.kernels.warming.offline import Shape
hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
Shape(*json.loads(sys.argv[1]))()
print(json.dumps(hits))
"""


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("request_", REQUESTS)
def test_a_call_on_the_gpu_finds_what_was_compiled_without_touching_it(cache, request_):
    shape = Shape(request_, 16, 512, 8192, "bf16")
    list(compiled(Chip.current(), [shape], 2))
    command = [sys.executable, "-c", NEW_PROCESS, json.dumps(astuple(shape))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    hits = json.loads(done.stdout)
    assert hits and all(hits)
