"""Compile the kernels of public calls into Triton's cache, for a GPU that need not be present.

Triton's key of a kernel has its version and that of ptxas, the environment variables that it reads,
the compute capability, the source, and the types and alignments of the arguments. None of that
needs the GPU. So the public functions run here on tensors without memory, with a driver that only
has the GPU's properties, and Triton derives the keys as at a launch.

It replaces Triton's driver and some of torch.cuda, so it runs in separate processes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
from fsbench.kernels.launch.launch_cache import LAUNCHES
from fsbench.kernels.launch.workspace import forget_workspaces
from fsbench.kernels.truncated.api import truncated_sample

_CLOCKS = ("clock_rate", "memory_clock_rate", "memory_bus_width")


class Chip(NamedTuple):
    """Properties of a GPU that decide which kernels are compiled, and how.

    Attributes:
        shared_bytes: Shared memory that a program may use, opted in.
        clocks: torch's clock_rate, memory_clock_rate (in kHz) and memory_bus_width; 0 if torch does
            not report one.
        amd: Architecture of an AMD GPU, else "".
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    clocks: tuple[int, ...]
    amd: str = ""

    @classmethod
    def current(cls) -> Chip:
        """Return the current GPU.

        Raises:
            DeviceUnavailable: torch sees no GPU.
        """
        if not torch.cuda.is_available():
            raise DeviceUnavailable("--gpu: torch sees no CUDA device here; name the GPU, as h200")
        gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        clocks = tuple(getattr(gpu, name, 0) for name in _CLOCKS)
        shared = gpu.shared_memory_per_block_optin
        return cls(gpu.name, (gpu.major, gpu.minor), gpu.multi_processor_count, shared, clocks)


CHIPS = {
    "a100": Chip("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, (1410000, 1593000, 5120)),
    "h100": Chip("NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, (1980000, 2619000, 5120)),
    "h200": Chip("NVIDIA H200", (9, 0), 132, 232448, (1980000, 3201000, 6144)),
    "b200": Chip("NVIDIA B200", (10, 0), 148, 232448, (1965000, 3996000, 8192)),
}
"""GPUs that need not be present."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Element types of kernels on GPUs."""

REQUESTS = ("plain", "rows", "greedy", "logprobs", "filters", "row-filters")
"""Calls: numbers for all rows; temperature, seed and step of each row, as in engines; T = 0;
log-probabilities, with values of each row; top-k and top-p for all rows; filters of each row."""


@dataclass(frozen=True)
class Shape:
    """One of REQUESTS for an LM head; calling it makes the request with zeros.

    Attributes:
        request: One of REQUESTS.
        dtype: bf16 or fp16.
    """

    request: str
    B: int
    D: int
    V: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.request} B={self.B} D={self.D} V={self.V}"

    def __call__(self) -> None:
        request, B, D, V, dtype = self.request, self.B, self.D, self.V, self.dtype
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


class Compiled(NamedTuple):
    """A compiled kernel.

    Attributes:
        call: Index of the first call that launches it.
        cached: Whether the kernel was in Triton's cache before.
        number, total: Number of this kernel, and of all kernels that are known so far.
    """

    kernel: str
    call: int
    seconds: float
    cached: bool
    number: int
    total: int


class Launch(NamedTuple):
    """A kernel, Triton's key of its specialization, and a function that compiles it."""

    kernel: JITFunction[Any]
    key: str
    compile: partial[Any]


class _Driver:
    """A Triton driver that only reports the architecture of a GPU."""

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


_Key = tuple[str, str]  # a kernel's module and name, and Triton's key of it
_calls: Sequence[Callable[[], object]] = ()
_launches: dict[_Key, Launch] = {}
"""In a worker process: the calls, and a launch of each kernel of the calls made so far."""


def compiled(
    chip: Chip, calls: Sequence[Callable[[], object]], processes: int, start: str = "spawn"
) -> Iterator[Compiled]:
    """Compile the kernels of calls in parallel, earlier calls first; yield each when ready.

    Args:
        chip: The GPU.
        calls: Functions that pickle supports; they allocate on `cuda`.
        processes: Number of worker processes.
        start: Start method of processes. "fork" imports nothing again; it needs a process without
            threads and without CUDA.

    Raises:
        InvalidArgument: Triton is in interpreter mode.
        RuntimeError: A kernel does not compile, or a process died.
    """
    if triton.knobs.runtime.interpret:
        raise InvalidArgument("TRITON_INTERPRET: expected 0 or nothing, to compile; got 1")
    context = multiprocessing.get_context(start)
    arguments = (chip, list(calls))
    with ProcessPoolExecutor(processes, context, _become_worker, arguments) as pool:
        try:
            yield from _by_pool(pool, len(calls), processes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _by_pool(pool: ProcessPoolExecutor, num_calls: int, ahead: int) -> Iterator[Compiled]:
    """Make the calls and compile their kernels in processes; `ahead` calls are made in advance."""
    seen: set[_Key] = set()
    jobs: deque[tuple[_Key, int, Future[tuple[float, bool]]]] = deque()
    calls = [pool.submit(_launched_by, i) for i in range(min(ahead, num_calls))]
    number = 0
    for call in range(num_calls):
        for key in calls[call].result():
            if key not in seen:
                seen.add(key)
                jobs.append((key, call, pool.submit(_compile, call, key)))
        if len(calls) < num_calls:
            calls.append(pool.submit(_launched_by, len(calls)))
        while jobs and (jobs[0][2].done() or call == num_calls - 1):
            key, caller, job = jobs.popleft()
            number += 1
            yield Compiled(key[0].rpartition(".")[2], caller, *job.result(), number, len(seen))


def _become_worker(chip: Chip, calls: Sequence[Callable[[], object]]) -> None:
    global _calls
    use_cpu_guard()
    _calls = [partial(_recorded, chip, call) for call in calls]


def _recorded(chip: Chip, call: Callable[[], object]) -> list[_Key]:
    """Make a call without a GPU; return the kernels that it launches."""
    with without_gpu(chip) as launches:
        call()
    keys = []
    for launch in launches:
        key = (f"{launch.kernel.__module__}.{launch.kernel.__name__}", launch.key)
        _launches.setdefault(key, launch)
        keys.append(key)
    return list(dict.fromkeys(keys))


def _launched_by(number: int) -> list[_Key]:
    try:
        keys: Any = _calls[number]()
    except Exception as error:
        raise RuntimeError(f"call {number} of {len(_calls)}: {one_line(error)}") from None
    return list(keys)


def _compile(number: int, key: _Key) -> tuple[float, bool]:
    """Compile one kernel of a call; return the seconds it took, and whether it was cached."""
    if key not in _launches:  # another process has made the call
        _launched_by(number)
    launch = _launches[key]
    hits: list[bool] = []

    def listen(*, cache_hit: bool, **_: object) -> None:
        hits.append(cache_hit)

    begin = time.perf_counter()
    with mock.patch.object(triton.knobs.compilation, "listener", listen):
        try:
            launch.compile()
        except Exception as error:
            raise RuntimeError(f"{key[0]}: {one_line(error)}") from None
    launch.kernel.device_caches.clear()  # a later call would launch the compiled kernel
    return time.perf_counter() - begin, all(hits)


def use_cpu_guard() -> None:
    """Let torch index fake tensors of `cuda` in this process without a GPU and without a driver.

    DeviceType (0 is the CPU, 1 is CUDA) is the index of c10's table of device guards. The entry of
    CUDA is replaced, so nothing in this process can use a GPU afterwards.
    """
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[0]


@contextmanager
def without_gpu(chip: Chip) -> Iterator[list[Launch]]:
    """Run public calls on tensors of `cuda` without memory; record what each launch would compile.

    Nothing is compiled, and an operator runs its Python code. Triton's driver remains replaced.
    """
    triton.runtime.driver.set_active(_Driver(chip))
    forget_workspaces()  # tensors of an earlier FakeTensorMode cannot be used in this one
    LAUNCHES.clear()  # a cached launch would skip Triton, and not be recorded
    launches: list[Launch] = []
    compile_, run = JITFunction._do_compile, JITFunction.run

    def record(self: Any, key: str, *arguments: Any) -> None:
        launches.append(Launch(self, key, partial(compile_, self, key, *arguments)))

    properties = mock.Mock(
        multi_processor_count=chip.multiprocessors,
        shared_memory_per_block_optin=chip.shared_bytes,
        **dict(zip(_CLOCKS, chip.clocks, strict=True)),
    )
    properties.name = chip.name  # an argument `name` would name the Mock
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
        mock.patch.object(JITFunction, "_do_compile", record),
        mock.patch.object(JITFunction, "run", lambda *a, **k: run(*a, **{**k, "warmup": True})),
        FakeTensorMode(),
    ):
        yield launches
