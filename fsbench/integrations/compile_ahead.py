"""Compile an engine's kernels in other processes while the engine loads its model.

`CompileAhead` starts `python -m fsbench.integrations.compile_ahead`, which compiles one kind of
draws after the other on all cores and fills Triton's cache on disk. The engine waits for a kind
before it draws it, and then loads the kernels from the cache. `fsbench warm --request vllm`
compiles the same kernels. Kernels are compiled for fake tensors (kernels.warming.offline), without
a GPU.

If the processes end early while the engine starts, the engine compiles the kernels itself. If they
end later, vLLM keeps drawing the kinds that are not compiled.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor

from fsbench.cores import usable_cores
from fsbench.errors import one_line
from fsbench.integrations.draw import SERVING, FlashSampleDraw, Head
from fsbench.integrations.draw_kinds import DrawKind, served_kinds, warm
from fsbench.integrations.routing import SCREENED, SHARDED_HEAD_NEEDS, WHOLE_HEAD_NEEDS
from fsbench.kernels import VocabShard
from fsbench.kernels.warming.absent_ranks import absent_ranks
from fsbench.kernels.warming.offline import DTYPES, Chip, compile_with_forks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ROOM_BYTES = 256 << 20
"""Free space in bytes that Triton's cache needs for all kernels of an engine."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""dtype of an LM head -> name in EngineSpec."""
PADDING = 64
"""vLLM pads an LM head to a multiple of this number of rows."""
_LOG = logging.getLogger("vllm.fsbench")
_MODULE = "fsbench.integrations.compile_ahead"
_CACHE_DIR = "TRITON_CACHE_DIR"
_MAX_PROCESSES = 16
_POLL_S = 0.5


class EngineSpec(NamedTuple):
    """The properties of an engine that decide which kernels it launches.

    Attributes:
        sampler: flash_sample or screened.
        V: tokens of the vocabulary.
        rows: rows of the LM head, with padding, on all ranks together.
        D: columns of the LM head.
        dtype: bf16 or fp16.
        soft_cap: as in Head.
        max_rows: rows of the largest batch.
        raw: as served_kinds takes it.
        ranks, rank: GPUs of the model, which have equal shards of the head, and one of them.
    """

    sampler: str
    V: int
    rows: int
    D: int
    dtype: str
    soft_cap: float | None
    max_rows: int
    raw: bool = True
    ranks: int = 1
    rank: int = 0

    @classmethod
    def of_head(cls, sampler: str, head: Head, max_rows: int, raw: bool) -> EngineSpec | None:
        """Return the spec of a loaded head, or None if its kernels are not compiled ahead."""
        if sampler not in SERVING:
            return None
        if isinstance(head.weight, VocabShard):
            weight, sizes, rank = head.weight.weight, head.weight.sizes, head.weight.rank
        else:
            weight, sizes, rank = head.weight, [len(head.weight)], 0
        if weight.dtype not in DTYPE_NAMES or len(set(sizes)) > 1:
            return None
        return cls(
            sampler,
            V=head.vocab_size,
            rows=sum(sizes),
            D=weight.shape[1],
            dtype=DTYPE_NAMES[weight.dtype],
            soft_cap=head.soft_cap,
            max_rows=max_rows,
            raw=raw,
            ranks=len(sizes),
            rank=rank,
        )

    def draw_kinds(self) -> list[DrawKind]:
        """Return the kinds of draws that this engine serves, the most common first."""
        needs = WHOLE_HEAD_NEEDS if self.ranks == 1 else SHARDED_HEAD_NEEDS
        return served_kinds(needs, self.raw, self.sampler == SCREENED)

    def of_all_ranks(self) -> list[EngineSpec]:
        """Return the specs of all ranks, whose kernels may differ."""
        return [self._replace(rank=rank) for rank in range(self.ranks)]


@dataclass(frozen=True)
class KindCall:
    """Draw rows of one kind at all batch sizes from an LM head of zeros."""

    spec: EngineSpec
    kind: DrawKind

    def __str__(self) -> str:
        options = [name for name, value in self.kind._asdict().items() if value] or ["plain"]
        rank = f" rank {self.spec.rank} of {self.spec.ranks}" if self.spec.ranks > 1 else ""
        return f"{self.spec.sampler} {'+'.join(options)} D={self.spec.D} V={self.spec.V}{rank}"

    def __call__(self) -> None:
        spec, dtype = self.spec, DTYPES[self.spec.dtype]
        rows = torch.zeros(spec.rows // spec.ranks, spec.D, dtype=dtype, device="cuda")
        hidden = torch.zeros(spec.max_rows, spec.D, dtype=dtype, device="cuda")
        group = nullcontext(None) if spec.ranks == 1 else absent_ranks(spec.ranks, spec.rank)
        with group as others:
            weight = rows if others is None else shard_of(rows, others, spec.V, spec.max_rows)
            head = Head(weight, spec.V, spec.soft_cap)
            draw = FlashSampleDraw(head, screened=spec.sampler == SCREENED)
            warm(draw, self.kind, hidden, spec.V)


def shard_of(weight: Tensor, group: ProcessGroup, V: int, max_rows: int) -> VocabShard:
    """Return a rank's shard of an LM head, with room to exchange the rows of the largest batch."""
    return VocabShard(weight, group, vocab_size=V, slots=max(4096, max_rows))


def engine_calls(spec: EngineSpec) -> list[KindCall]:
    """Return a call for each kind of draws of an engine."""
    return [KindCall(spec, kind) for kind in spec.draw_kinds()]


class CompileAhead:
    """Processes that compile an engine's kernels.

    Args:
        chip: the GPU to compile for; None is the current one.
        command: a command to start in place of this module.

    Attributes:
        cache: the folder of Triton's cache that they fill.
        failure: why the processes ended early, one line, or ''.
    """

    def __init__(
        self,
        spec: EngineSpec,
        chip: Chip | None = None,
        command: Sequence[str] = (sys.executable, "-m", _MODULE),
    ):
        self.spec, self.failure, self.cache = spec, "", triton.knobs.cache.dir
        self._ready: set[DrawKind] = set()
        self._ended = False
        self._changed = threading.Condition()
        # These processes use neither the GPU nor the interpreter of a test.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
        self._pipe, end = Pipe()
        with end:
            self._process = subprocess.Popen(
                [*command, str(end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                pass_fds=[end.fileno()],
                start_new_session=True,  # so that a signal also reaches compilers
            )
        with suppress(OSError):  # it has ended, which the thread notes
            self._pipe.send((spec, chip or Chip.current(), os.getpid()))
        threading.Thread(target=self._listen, daemon=True).start()

    def is_ready(self, kind: DrawKind) -> bool:
        """Return whether all kernels of a kind are in Triton's cache on disk."""
        return kind in self._ready

    def wait(self, draw_kinds: Sequence[DrawKind], seconds: float | None = None) -> bool:
        """Wait until these kinds are compiled or the processes end; return whether they are.

        Args:
            seconds: longest time to wait, or None for as long as the processes run.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or self._ready.issuperset(draw_kinds), seconds
            )
        return self._ready.issuperset(draw_kinds)

    @property
    def is_running(self) -> bool:
        """Whether the processes still run."""
        return not self._ended

    def stop(self) -> None:
        """Kill the processes, with the compilers that they started."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _listen(self) -> None:
        """Receive the number of each compiled kind, a summary or an error, until the end."""
        numbered = self.spec.draw_kinds()
        with suppress(EOFError, OSError):
            while True:
                event = self._pipe.recv()
                with self._changed:
                    if isinstance(event, int):
                        self._ready.add(numbered[event])
                    elif isinstance(event, str):
                        self.failure = event
                    else:
                        _LOG.info(
                            "fsbench: %d kernels compiled ahead in %.0f s, %d of them were in the "
                            "cache",
                            *event,
                        )
                    self._changed.notify_all()
        code = self._process.wait()
        with self._changed:
            if code and not self.failure:
                self.failure = f"exit code {code}"
            self._ended = True
            self._changed.notify_all()


@contextmanager
def triton_cache(folder: str) -> Iterator[None]:
    """Have Triton read and write kernels in a folder.

    torch.compile changes Triton's folder in the engine's process while the engine starts: vLLM
    gives Inductor a folder for each model, and Inductor sets TRITON_CACHE_DIR to a part of it.
    """
    changed = os.environ.get(_CACHE_DIR)
    os.environ[_CACHE_DIR] = folder
    try:
        yield
    finally:
        if changed is None:
            os.environ.pop(_CACHE_DIR, None)
        else:
            os.environ[_CACHE_DIR] = changed


def ensure_cache() -> None:
    """Have Triton compile into a temporary folder if its cache cannot be written or is full."""
    reason = unusable(Path(triton.knobs.cache.dir))
    if not reason:
        return
    for parent in (tempfile.gettempdir(), "/dev/shm"):
        if not unusable(Path(parent)):
            folder = tempfile.TemporaryDirectory(prefix="fsbench-triton-", dir=parent)
            _LOG.warning(
                "fsbench: Triton's cache %s: %s; kernels are compiled into %s for this run only",
                triton.knobs.cache.dir,
                reason,
                folder.name,
            )
            os.environ[_CACHE_DIR] = folder.name
            _temporary.append(folder)
            return
    _LOG.warning("fsbench: Triton's cache %s: %s", triton.knobs.cache.dir, reason)


_temporary: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def unusable(folder: Path) -> str:
    """Return why kernels cannot be written to a folder, or ''."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{error.strerror or error}"
    if free < ROOM_BYTES:
        return f"{free >> 20} MiB free, {ROOM_BYTES >> 20} MiB expected"
    return ""


def compile_kinds(
    spec: EngineSpec, chip: Chip, processes: int, send: Callable[[Any], None]
) -> None:
    """Compile an engine's kernels; send the number of each kind when all its kernels are done.

    Last is a summary: the number of kernels, seconds, and how many kernels were in the cache.
    """
    begin, kernels, cached = time.monotonic(), 0, 0
    for kernel in compile_with_forks(chip, engine_calls(spec), processes, send):
        kernels += 1
        cached += kernel.cached
    send((kernels, time.monotonic() - begin, cached))


def _end_with(parent: int) -> None:
    """Kill this process and its children when the parent has ended."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Compile for the engine that started this process."""
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    spec, chip, parent = pipe.recv()
    os.nice(10)  # the engine loads at the same time
    # Ranks of one machine share its cores.
    processes = max(1, min(_MAX_PROCESSES, (usable_cores() - 1) // spec.ranks))
    watch = threading.Thread(target=_end_with, args=(parent,), daemon=True)
    watch.start()
    try:
        compile_kinds(spec, chip, processes, pipe.send)
    except Exception as error:
        pipe.send(one_line(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
