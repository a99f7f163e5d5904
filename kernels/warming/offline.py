"""Compiling kernels for a GPU without touching one: what calls would launch, into Triton's cache.

Triton's key of a kernel has its version and that of ptxas, the environment variables that it reads,
the compute capability, the source, and the types and alignments of the arguments. None of that
needs the GPU. So the public functions run here on tensors without memory, on a driver that knows
the GPU's figures only, and Triton's own code derives the keys, as it does at a launch.

It replaces Triton's driver and some of torch.cuda, so it runs in processes of its own.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from fsbench.errors import DeviceUnavailable, InvalidArgument, one_line
from fsbench.kernels.fused import api
from fsbench.kernels.truncated.api import truncated_sample

_CLOCKS = ("clock_rate", "memory_clock_rate", "memory_bus_width")


class Chip(NamedTuple):
    """What decides how a GPU's kernels are compiled, and which.

    shared_bytes: a program may use, opted in. clocks: as torch's clock_rate, memory_clock_rate (in
    kHz) and memory_bus_width tell them; 0 where it does not. amd: architecture of an AMD GPU.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    clocks: tuple[int, ...]
    amd: str = ""

    @classmethod
    def here(cls) -> Chip:
        """The current GPU.

        Raises:
            DeviceUnavailable: torch sees none.
        """
        if not torch.cuda.is_available():
            raise DeviceUnavailable("--gpu: torch sees no CUDA device here; name the GPU, as h200")
        found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability, shared = (found.major, found.minor), found.shared_memory_per_block_optin
        clocks = tuple(getattr(found, name, 0) for name in _CLOCKS)
        return cls(found.name, capability, found.multi_processor_count, shared, clocks)


CHIPS = {
    "a100": Chip("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, (1410000, 1593000, 5120)),
    "h100": Chip("NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, (1980000, 2619000, 5120)),
    "h200": Chip("NVIDIA H200", (9, 0), 132, 232448, (1980000, 3201000, 6144)),
    "b200": Chip("NVIDIA B200", (10, 0), 148, 232448, (1965000, 3996000, 8192)),
}
"""GPUs that need not be there."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What kernels take on GPUs."""

REQUESTS = ("plain", "rows", "greedy", "logprobs", "filters", "row-filters")
"""Kinds of calls: numbers for all rows; temperature, seed and step of each row, as engines call;
T = 0; log-probabilities of such rows; top-k and top-p for all; filters of each row."""


class Shape(NamedTuple):
    """A kind of call on an LM head; dtype: bf16 or fp16."""

    request: str
    B: int
    D: int
    V: int
    dtype: str


class Compiled(NamedTuple):
    """A kernel, the first shape that needs it, how long it took, whether it was in the cache."""

    kernel: str
    shape: Shape
    seconds: float
    cached: bool


class Launch(NamedTuple):
    """A kernel, Triton's key of what it is compiled for, and a function that compiles it."""

    kernel: JITFunction[Any]
    key: str
    compile: partial[Any]


class _Driver:
    """Triton's driver, for a GPU of which no more than the architecture is asked."""

    def __init__(self, chip: Chip):
        major, minor = chip.capability
        nvidia = GPUTarget("cuda", major * 10 + minor, 32)
        self._target = GPUTarget("hip", chip.amd, 64) if chip.amd else nvidia

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


_jobs: list[tuple[str, Shape, Callable[[], object]]] = []
"""(kernel, shape, compile it): in every process the same, in the same order."""


def compiled(chip: Chip, shapes: Sequence[Shape], processes: int) -> Iterator[Compiled]:
    """Compile what these calls launch on a GPU, in parallel; each kernel as soon as it is ready.

    Raises:
        InvalidArgument: Triton interprets here.
        RuntimeError: a kernel does not compile.
    """
    if triton.knobs.runtime.interpret:
        raise InvalidArgument("TRITON_INTERPRET: expected 0 or nothing, to compile; got 1")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _collect, (chip, shapes)) as pool:
        yield from pool.map(_compile, range(pool.submit(_count).result()))


def _count() -> int:
    return len(_jobs)


def _compile(number: int) -> Compiled:
    kernel, shape, work = _jobs[number]
    hits: list[bool] = []

    def listen(*, cache_hit: bool, **_: object) -> None:
        hits.append(cache_hit)

    begin = time.perf_counter()
    with mock.patch.object(triton.knobs.compilation, "listener", listen):
        try:
            work()
        except Exception as error:
            raise RuntimeError(f"{kernel} for {shape}: {one_line(error)}") from None
    return Compiled(kernel, shape, time.perf_counter() - begin, all(hits))


def _collect(chip: Chip, shapes: Sequence[Shape]) -> None:
    """Become a process on a GPU that is not there, and note what the calls compile."""
    known = set()
    with without_gpu(chip) as launches:
        for shape in shapes:
            call(shape)
            for launch in launches:
                if launch[:2] not in known:
                    known.add(launch[:2])
                    _jobs.append((launch.kernel.__name__, shape, launch.compile))
            launches.clear()


@contextmanager
def without_gpu(chip: Chip) -> Iterator[list[Launch]]:
    """Run public calls on tensors of `cuda` without memory; note what each launch would compile.

    Nothing is compiled, and an operator runs its own code. Triton's driver stays the chip's.
    """
    triton.runtime.driver.set_active(_Driver(chip))
    launches: list[Launch] = []
    compile_, run = JITFunction._do_compile, JITFunction.run

    def note(self: Any, key: str, *rest: Any) -> None:
        launches.append(Launch(self, key, partial(compile_, self, key, *rest)))

    properties = mock.Mock(
        multi_processor_count=chip.multiprocessors,
        shared_memory_per_block_optin=chip.shared_bytes,
        **dict(zip(_CLOCKS, chip.clocks, strict=True)),
    )
    properties.name = chip.name  # which Mock takes for its own
    cuda: dict[str, Any] = {
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: chip.capability,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "current_stream": mock.Mock(),
    }
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(torch.version, "hip", chip.amd or None),
        mock.patch.object(FakeTensor, "data_ptr", lambda tensor: 0),  # aligned, as allocations are
        mock.patch.object(api, "is_traced", lambda tensor: False),
        mock.patch.object(CustomOpDef, "__call__", lambda op, *a, **k: op._init_fn(*a, **k)),
        mock.patch.object(JITFunction, "_do_compile", note),
        mock.patch.object(JITFunction, "run", lambda *a, **k: run(*a, **{**k, "warmup": True})),
        FakeTensorMode(),
    ):
        yield launches


def call(shape: Shape) -> None:
    """What an engine calls, on zeros."""
    request, B, D, V, dtype = shape
    zeros = partial(torch.zeros, device="cuda")
    matrices = [zeros(size, D, dtype=DTYPES[dtype]) for size in (B, V)]
    by_row = request in ("rows", "logprobs", "row-filters")
    rows = B if by_row else 1
    each: dict[str, Any] = {name: zeros(rows, dtype=torch.int64) for name in ("seed", "offset")}
    if by_row:
        each["temperature"] = zeros(B)
    if request == "filters":
        truncated_sample(*matrices, top_k=50, top_p=0.9, **each)
    elif request == "row-filters":
        each |= {name: zeros(B) for name in ("top_p", "min_p")}
        truncated_sample(*matrices, top_k=zeros(B, dtype=torch.int32), **each)
    elif request == "greedy":
        api.flash_sample(*matrices, temperature=0.0, **each)
    else:
        api.flash_sample(*matrices, return_logprob=request == "logprobs", **each)
