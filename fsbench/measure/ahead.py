"""Compiling ahead: processes that verify samplers and call them once before they are to be timed.

What they compile is on disk, where the process that measures finds it (Triton's, Inductor's and
FlashInfer's caches). They are fed in the order in which cells are needed, stand still while a step
is timed, and are never needed: what one has not done, the measuring process does itself.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from fsbench.discover import available, discover
from fsbench.inputs import TORCH_DTYPES, serving
from fsbench.measure.gate import gate, setting_of
from fsbench.problem import Problem
from fsbench.provider import Kind, Provider
from fsbench.records.cell import Cell

STRAGGLER_S = 10.0
"""Seconds of compiling after which a plan in a hurry times a sampler after the other problems."""

DRAIN_S = 0.1
"""Seconds in which a GPU ends what was launched by processes that stand still now."""

_STOP_S = 1.0  # in which a signal to stop is heeded
_PR_SET_PDEATHSIG = 1


class Next(NamedTuple):
    """Which of some cells to prepare now.

    cell: None while all of them are being compiled; working_s then says how long already.
    ahead_s: seconds of its first call in another process; None: there was none, or it failed.
    passed: its sampler has passed the gate there.
    """

    cell: Cell | None
    ahead_s: float | None = None
    passed: bool = False
    working_s: tuple[float, ...] = ()


class Ahead:
    """What the measuring process asks; here there are no processes that help it."""

    def want(self, cells: Sequence[Cell]) -> None:
        """These cells will be needed, in this order."""

    def next(self, cells: Sequence[Cell]) -> Next:
        """Which of these, one or more, to prepare: a compiled one, else one nobody is at."""
        return Next(cells[0])

    def pause(self) -> None:
        """Return once no other process launches anything."""

    def resume(self) -> None:
        """Let the other processes go on."""


@dataclass(frozen=True)
class Asked(Ahead):
    """Asks the process that has the helpers. ask: (kind, *values) -> answer."""

    ask: Callable[..., Any]

    def want(self, cells: Sequence[Cell]) -> None:
        self.ask("want", cells)

    def next(self, cells: Sequence[Cell]) -> Next:
        found: Next = self.ask("next", cells)
        return found

    def pause(self) -> None:
        if self.ask("pause"):
            time.sleep(DRAIN_S)

    def resume(self) -> None:
        self.ask("resume")


class Task(NamedTuple):
    """Verify a sampler ("gate"), or build and call it once ("first"), on the cell's problem."""

    kind: str
    cell: Cell


class Hand(Protocol):
    """A process that does tasks. line: gives (whether it was done, seconds) for each."""

    line: Any

    def give(self, task: Task) -> None: ...

    def signal(self, number: int) -> None: ...

    def end(self) -> None: ...


@dataclass
class _State:
    began: float | None = None  # None: nobody has begun it
    seconds: float | None = None  # None: not done, or not well
    ended: bool = False


@dataclass
class Warmers:
    """The processes of a run that compile ahead.

    hire: starts one. count: of them, at most. check: whether samplers are verified. patience:
    seconds after which one that is at a task is taken for hung.
    """

    hire: Callable[[], Hand]
    count: int
    check: bool
    patience: float
    clock: Callable[[], float] = time.monotonic
    hands: list[Hand] = field(default_factory=list)
    _tasks: dict[Task, _State] = field(default_factory=dict)
    _at: dict[int, Task] = field(default_factory=dict)  # by id of the hand
    _gates: dict[tuple[object, ...], Task] = field(default_factory=dict)

    def want(self, cells: Iterable[Cell]) -> None:
        """See `Ahead.want`. What was wanted before stays as it is."""
        for cell in cells:
            for task in self._tasks_of(cell):
                self._tasks.setdefault(task, _State())
        waiting = sum(state.began is None and not state.ended for state in self._tasks.values())
        for _ in range(min(self.count - len(self.hands), waiting)):
            self.hands.append(self.hire())
        self._feed()

    def _tasks_of(self, cell: Cell) -> list[Task]:
        tasks = [Task("first", cell)]
        if self.check and cell.kind != str(Kind.LOWER_BOUND):
            key = (cell.provider, setting_of(cell.problem))
            tasks.insert(0, self._gates.setdefault(key, Task("gate", cell)))
        return tasks

    def next(self, cells: Sequence[Cell]) -> Next:
        """See `Ahead.next`. What nobody has begun of the chosen cell, nobody will begin."""
        self._end_hung()
        states = {cell: [self._tasks.get(t, _State(ended=True)) for t in self._tasks_of(cell)]
                  for cell in cells}  # fmt: skip
        working: dict[Cell, float] = {}
        for cell, own in states.items():
            if not all(state.ended for state in own):
                begun = [
                    self._tasks[task].began or 0.0
                    for task in self._at.values()
                    if task.cell.provider == cell.provider
                ]
                if begun:
                    working[cell] = self.clock() - min(begun)
        ready = [cell for cell, own in states.items() if all(state.ended for state in own)]
        free = [cell for cell in cells if cell not in ready and cell not in working]
        if not (ready or free):
            return Next(None, working_s=tuple(working.values()))
        chosen = (ready or free)[0]
        for state in states[chosen]:
            state.ended = True
        *gated, first = states[chosen]
        passed = bool(gated) and gated[0].seconds is not None
        return Next(chosen, first.seconds, passed)

    def heard(self, hand: Hand) -> None:
        """A hand has something to say, or is gone."""
        task = self._at.pop(id(hand), None)
        try:
            done, seconds = hand.line.recv()
        except (EOFError, OSError):
            self._gone(hand, task)
        else:
            if task:
                self._tasks[task].ended = True
                self._tasks[task].seconds = seconds if done else None
        self._feed()

    def _feed(self) -> None:
        for hand in [hand for hand in self.hands if id(hand) not in self._at]:
            waiting = [
                task
                for task, state in self._tasks.items()
                if not state.ended and state.began is None
            ]
            if not waiting:  # and never will: its memory is needed
                self._gone(hand, None)
                continue
            # One at a time of a sampler, since what its problems share is compiled once.
            busy = {(task.kind, task.cell.provider) for task in self._at.values()}
            task = next((t for t in waiting if (t.kind, t.cell.provider) not in busy), None)
            if task:
                self._tasks[task].began = self.clock()
                self._at[id(hand)] = task
                try:
                    hand.give(task)
                except OSError:
                    self._gone(hand, self._at.pop(id(hand)))

    def _gone(self, hand: Hand, task: Task | None) -> None:
        self.hands.remove(hand)
        hand.end()
        if task:
            self._tasks[task].ended = True

    def _end_hung(self) -> None:
        for hand in list(self.hands):
            task = self._at.get(id(hand))
            if task and self.clock() - (self._tasks[task].began or 0.0) > self.patience:
                self._gone(hand, self._at.pop(id(hand)))

    def pause(self) -> bool:
        """See `Ahead.pause`. Whether there is any process that was at work."""
        for hand in self.hands:
            hand.signal(signal.SIGSTOP)
        return bool(self.hands)

    def resume(self) -> None:
        """See `Ahead.resume`."""
        for hand in self.hands:
            hand.signal(signal.SIGCONT)

    def spent(self) -> dict[str, float]:
        """Seconds of the tasks that were done well, by kind."""
        done = [(task.kind, state.seconds or 0.0) for task, state in self._tasks.items()]
        return {kind: sum(s for of, s in done if of == kind) for kind in ("gate", "first")}

    def end(self) -> None:
        """End them all."""
        for hand in self.hands:
            hand.end()
        self.hands.clear()


class Process:
    """A Hand that is a process of its own, on one device."""

    def __init__(self, context: ForkServerContext, paths: Sequence[str], device: str, index: int):
        self.line, theirs = context.Pipe()
        self._process = context.Process(
            target=main, args=(list(paths), device, index, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def give(self, task: Task) -> None:
        """Let it do a task."""
        self.line.send((task.kind, task.cell.provider, task.cell.problem))

    def signal(self, number: int) -> None:
        """Stop it (until it stands still) or let it go on; not the compilers that it started."""
        pid = self._process.pid
        assert pid
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        until = time.monotonic() + _STOP_S
        while number == signal.SIGSTOP and _runs(pid) and time.monotonic() < until:
            time.sleep(0.001)

    def end(self) -> None:
        """End it and what it started."""
        assert self._process.pid
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.line.close()


def _runs(pid: int) -> bool:
    """Whether a process neither stands still nor has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "TtZX"


def main(paths: Sequence[str], device: str, index: int, line: Connection) -> None:
    """The whole of a process: do what comes by the line, until that ends."""
    os.setsid()
    # Ends with the server that it was forked from, also where it stands still; and that ends with
    # the process that started it, if no child holds this.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    os.nice(10)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # there are processes enough
    # Reads that, and takes seconds.
    autotune_cache = importlib.import_module("torch._inductor.runtime.autotune_cache")
    if device == "cuda":
        torch.cuda.set_device(index)
    known = discover(map(Path, paths))
    # What several processes at once find fastest is not to be kept for the one that measures.
    autotune_cache.AutotuneCache.create = staticmethod(lambda *_, **__: None)
    weights: dict[tuple[object, ...], torch.Tensor] = {}
    with suppress(EOFError, OSError):
        while True:
            kind, name, problem = line.recv()
            begin = time.perf_counter()
            try:
                provider = available(known[name], device)
                done = True
                if kind == "gate":
                    done = not gate(provider, problem)
                else:
                    _call_once(provider, problem, weights)
            except BaseException:  # the measuring process finds it again, and says so
                done = False
            line.send((done, time.perf_counter() - begin))
    os._exit(0)


def _call_once(
    provider: Provider, problem: Problem, weights: dict[tuple[object, ...], torch.Tensor]
) -> None:
    """As the first call of the measuring process, on zeros. weights: the last one, kept."""
    dtype = TORCH_DTYPES[problem.dtype]
    key = (problem.V, problem.D, dtype)
    if key not in weights:
        weights.clear()
        weights[key] = torch.zeros(problem.V, problem.D, dtype=dtype, device=problem.device)
    launch = serving(provider, problem.weights).build(problem, weights[key])
    counter = torch.zeros(1, dtype=torch.int64, device=problem.device)
    launch(weights[key].new_zeros(problem.B, problem.D), counter, counter)
    if problem.device == "cuda":
        torch.cuda.synchronize()
