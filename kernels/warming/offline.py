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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from fsbench.errors import DeviceUnavailable, InvalidArgument, one_line
from fsbench.kernels.fused import api
from fsbench.kernels.launch.launch_cache import LAUNCHES
from fsbench.kernels.launch.workspace import forget_workspaces
from fsbench.kernels.truncated.api import truncated_sample
from fsbench.kernels.warming.launchers import build_launcher

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


def compiled(
    chip: Chip, calls: Sequence[Callable[[], object]], processes: int
) -> Iterator[Compiled]:
    """Compile the kernels of calls in parallel, earlier calls first; yield each when ready.

    A new process and its children do the work, because this process may use CUDA or have threads.

    Args:
        chip: The GPU.
        calls: Functions that pickle supports; they allocate on `cuda`.
        processes: Most kernels that are compiled at a time.

    Raises:
        InvalidArgument: Triton is in interpreter mode.
        RuntimeError: A kernel does not compile, or a process died.
    """
    if triton.knobs.runtime.interpret:
        raise InvalidArgument("TRITON_INTERPRET: expected 0 or nothing, to compile; got 1")
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, chip, list(calls), processes)
    coordinator = context.Process(target=_send_compiled, args=arguments)
    coordinator.start()
    sender.close()
    try:
        while (event := _received(receiver)) is not None:
            yield event
    finally:
        receiver.close()  # a coordinator that still works ends when it sends
        coordinator.join()


def _send_compiled(
    sender: Connection, chip: Chip, calls: Sequence[Callable[[], object]], processes: int
) -> None:
    """Send each kernel that is compiled, then None or the error."""
    with suppress(BrokenPipeError):  # the receiver was closed
        try:
            for kernel in compile_with_forks(chip, calls, processes):
                sender.send(kernel)
        except BrokenPipeError:
            raise
        except Exception as error:
            sender.send(error)
        else:
            sender.send(None)


def _received(receiver: Connection) -> Any:
    """Receive an object from another process; raise it if it is an exception.

    Raises:
        RuntimeError: The process died.
    """
    try:
        event = receiver.recv()
    except EOFError:
        raise RuntimeError("a process that compiles died") from None
    if isinstance(event, Exception):
        raise event
    return event


def compile_with_forks(
    chip: Chip,
    calls: Sequence[Callable[[], object]],
    processes: int,
    on_ready: Callable[[int], object] = lambda call: None,
) -> Iterator[Compiled]:
    """Compile as `compiled` does, from a process that has used neither CUDA nor threads.

    The calls are made here, one after the other; each kernel is compiled by a fork of this process,
    which therefore makes no call again. Nothing in this process can use a GPU afterwards.

    Args:
        on_ready: Called with the number of each call as soon as all of its kernels are compiled.
    """
    use_cpu_guard()
    context = multiprocessing.get_context("fork")
    queue: deque[tuple[_Key, int, Launch]] = deque()
    running: dict[Any, tuple[_Key, int, Any]] = {}  # pipe -> kernel, call, process
    missing: dict[int, set[_Key]] = {}  # call -> kernels that are not compiled yet
    done: set[_Key] = set()
    seen: set[_Key] = set()

    def report_ready() -> None:
        for number in [number for number, kernels in missing.items() if not kernels - done]:
            del missing[number]
            on_ready(number)

    def step(seconds: float | None) -> Iterator[Compiled]:
        """Start processes up to the limit; yield kernels that are compiled within `seconds`."""
        while queue and len(running) < processes:
            key, call, launch = queue.popleft()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send_compilation, args=(sender, key, launch))
            process.start()
            sender.close()
            running[receiver] = key, call, process
        pipes: list[Any] = connection.wait(list(running), seconds)
        for pipe in pipes:
            key, call, process = running.pop(pipe)
            took, cached = _received(pipe)
            pipe.close()
            process.join()
            done.add(key)
            yield Compiled(key[0].rpartition(".")[2], call, took, cached, len(done), len(seen))
        report_ready()

    try:
        for number, call in enumerate(calls):
            try:
                launches = _launches_of(chip, call)
            except Exception as error:
                message = f"call {number} of {len(calls)}: {one_line(error)}"
                raise RuntimeError(message) from None
            missing[number] = set(launches)
            queue.extend((key, number, launches[key]) for key in launches if key not in seen)
            seen.update(launches)
            yield from step(0)
        while queue or running:
            yield from step(None)
    finally:
        for _, _, process in running.values():
            process.kill()
            process.join()


def _launches_of(chip: Chip, call: Callable[[], object]) -> dict[_Key, Launch]:
    """Make a call without a GPU; return the kernels that it launches."""
    with without_gpu(chip) as launches:
        call()
    _hash_ahead(launches)
    names = [f"{launch.kernel.__module__}.{launch.kernel.__name__}" for launch in launches]
    return {(name, each.key): each for name, each in zip(names, launches, strict=True)}


def _hash_ahead(launches: Sequence[Launch]) -> None:
    """Compute the shared parts of Triton's cache keys before processes are forked."""
    with suppress(OSError):  # the compilation that needs it reports it
        triton_key()
        make_backend(triton.runtime.driver.active.get_current_target()).hash()
        for launch in launches:
            _ = launch.kernel.cache_key


def _send_compilation(sender: Connection, key: _Key, launch: Launch) -> None:
    """Compile a kernel; send the seconds it took and whether it was cached, or the error."""
    hits: list[bool] = []

    def listen(*, cache_hit: bool, **_: object) -> None:
        hits.append(cache_hit)

    begin = time.perf_counter()
    triton.knobs.compilation.listener = listen
    try:
        build_launcher(launch.compile())
    except Exception as error:
        sender.send(RuntimeError(f"{key[0]}: {one_line(error)}"))
    else:
        sender.send((time.perf_counter() - begin, all(hits)))


def use_cpu_guard() -> None:
    """Let torch index fake tensors of `cuda` in this process without a GPU and without a driver.

    DeviceType (0 is the CPU, 1 is CUDA) is the index of c10's table of device guards. The entry of
    CUDA is replaced, so nothing in this process can use a GPU afterwards.
    """
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[0]


def _offset_in_bytes(tensor: torch.Tensor) -> int:
    """Return the distance of a tensor from its allocation; kernels differ by its alignment."""
    return int(tensor.storage_offset()) * tensor.element_size()


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
        mock.patch.object(FakeTensor, "data_ptr", _offset_in_bytes),  # allocations are aligned
        mock.patch.object(api, "is_traced", lambda tensor: False),
        mock.patch.object(CustomOpDef, "__call__", lambda op, *a, **k: op._init_fn(*a, **k)),
        mock.patch.object(JITFunction, "_do_compile", record),
        mock.patch.object(JITFunction, "run", lambda *a, **k: run(*a, **{**k, "warmup": True})),
        FakeTensorMode(),
    ):
        yield launches
