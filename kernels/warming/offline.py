"""Compiling kernels for a GPU without touching one: what calls would launch, into Triton's cache.

Triton's key of a kernel has its version and that of ptxas, the environment variables that it reads,
the compute capability, the source, and the types and alignments of the arguments. None of that
needs the GPU. So the public functions run here on tensors without memory, on a driver that knows
the GPU's figures only, and Triton's own code derives the keys, as it does at a launch.

It replaces Triton's driver and some of torch.cuda, so it runs in processes of its own.
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


@dataclass(frozen=True)
class Shape:
    """A kind of call on an LM head, which makes that call on zeros. dtype: bf16 or fp16."""

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
    """A kernel that is compiled.

    call: the first of the calls that launches it. number, total: of this kernel among all that are
    known so far. cached: whether the kernel was in Triton's cache before.
    """

    kernel: str
    call: int
    seconds: float
    cached: bool
    number: int
    total: int


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


_Key = tuple[str, str]  # a kernel's module and name, and Triton's key of it


def compiled(
    chip: Chip, calls: Sequence[Callable[[], object]], processes: int
) -> Iterator[Compiled]:
    """Compile what these calls launch on a GPU, in parallel; yield each kernel when it is ready.

    Kernels of earlier calls are compiled first. The work is done by a new process and its children,
    because this process may use CUDA or have threads.

    Args:
        calls: functions that pickle can carry to another process; they allocate on `cuda`.

    Raises:
        InvalidArgument: Triton interprets here.
        RuntimeError: a kernel does not compile, or a process died.
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
    with suppress(BrokenPipeError):  # nobody listens any more
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
    """Receive what another process sends; raise what it raised.

    Raises:
        RuntimeError: the process died.
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
        on_ready: is told the number of each call as soon as all of its kernels are compiled.
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
        """Start what there is room for; yield what is compiled within some seconds."""
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
    """Compute what Triton's cache keys share, which it remembers, before processes are forked."""
    with suppress(OSError):  # the compilation that needs it reports it
        triton_key()
        make_backend(triton.runtime.driver.active.get_current_target()).hash()
        for launch in launches:
            _ = launch.kernel.cache_key


def _send_compilation(sender: Connection, key: _Key, launch: Launch) -> None:
    """Compile a kernel; send how long it took and whether the cache had it, or the error."""
    hits: list[bool] = []

    def listen(*, cache_hit: bool, **_: object) -> None:
        hits.append(cache_hit)

    begin = time.perf_counter()
    triton.knobs.compilation.listener = listen
    try:
        launch.compile()
    except Exception as error:
        sender.send(RuntimeError(f"{key[0]}: {one_line(error)}"))
    else:
        sender.send((time.perf_counter() - begin, all(hits)))


def use_cpu_guard() -> None:
    """Let torch index fake tensors of `cuda` in this process without a GPU and without a driver.

    c10's table of device guards is indexed by DeviceType: 0 is the CPU, 1 is CUDA. CUDA's entry is
    replaced, so nothing in this process can use a GPU afterwards.
    """
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[0]


@contextmanager
def without_gpu(chip: Chip) -> Iterator[list[Launch]]:
    """Run public calls on tensors of `cuda` without memory; note what each launch would compile.

    Nothing is compiled, and an operator runs its own code. Triton's driver stays the chip's.
    """
    triton.runtime.driver.set_active(_Driver(chip))
    forget_workspaces()  # tensors of an earlier FakeTensorMode cannot be used in this one
    LAUNCHES.clear()  # a cached launch would go past Triton, and not be noted
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
