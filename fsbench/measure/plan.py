"""Plan and job of `fsbench run`: plain data that every process of a run gets."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fsbench.cores import usable_cores
from fsbench.discover import Found
from fsbench.errors import InvalidArgument, as_text
from fsbench.machine import hardware
from fsbench.measure import loops
from fsbench.problem import DTYPES, Problem
from fsbench.records.cell import Cell, Conditions

if TYPE_CHECKING:
    from fsbench.verify.check import Setting

_MOST_WARMERS = 12


@dataclass(frozen=True)
class Plan:
    """Problems, samplers and effort. Problems that share a weight should be adjacent.

    graph: replay a CUDA graph where the sampler allows it.
    warmup: untimed steps per cell; iters: timed ones, in `rounds` interleaved rounds.
    seed: of inputs and noise, an int64.
    check: verify before timing.
    forms: also time FORMS of fused samplers.
    energy_s, sustained_s: seconds of a loop after timing that measures a cell's energy, or its
        back-to-back steps; None: no loop.
    given_up: cells to leave out. last: a cell to measure alone, after all others.
    """

    problems: list[Problem]
    providers: list[Found]
    graph: bool = True
    warmup: int = 25
    iters: int = 100
    rounds: int = 5
    seed: int = 0
    check: bool = True
    forms: bool = False
    energy_s: float | None = None
    sustained_s: float | None = None
    given_up: frozenset[Cell] = frozenset()
    last: Cell | None = None

    def __post_init__(self) -> None:
        for name, least in (("warmup", 0), ("iters", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                raise InvalidArgument(
                    f"--{name}: expected an integer >= {least}; got {getattr(self, name)}"
                )
        if self.iters < self.rounds:
            raise InvalidArgument(
                f"--iters: expected at least one step for each of --rounds {self.rounds}; "
                f"got {self.iters}"
            )
        for name, seconds in (("energy", self.energy_s), ("sustained", self.sustained_s)):
            if seconds is not None and not seconds >= loops.SHORTEST_S:
                raise InvalidArgument(
                    f"--{name}: expected at least {loops.SHORTEST_S:g} seconds; got {seconds:g}"
                )
        if not -(2**63) <= self.seed < 2**63:
            raise InvalidArgument(f"--seed: expected an integer of 64 bits; got {self.seed}")

    def iterations(self, number: int) -> int:
        """Return the timed iterations of a round; the first rounds take the remainder."""
        return self.iters // self.rounds + (number < self.iters % self.rounds)

    def turns(self, names: Iterable[str], number: int) -> list[str]:
        """Return the samplers in the order of their turns in a round.

        The order is random by `seed`; every second round reverses the previous one, so over both
        each sampler has the same mean position. Other samplers do not change the relative order.
        """

        def key(name: str) -> float:
            return random.Random(f"{self.seed} {number // 2} {name}").random()

        return sorted(names, key=key, reverse=number % 2 == 1)

    def num_warmers(self, requested: int | None) -> int:
        """Return the number of compile processes; by default what fits a quarter of a GPU."""
        if any(entry.provider and entry.provider.tunes for entry in self.providers):
            return 0
        if requested is not None or self.problems[0].device == "cpu":
            return requested or 0
        memory = min((gpu.memory_bytes or 0 for gpu in hardware.gpus()), default=0)
        largest = max(problem.V * problem.D * DTYPES[problem.dtype] for problem in self.problems)
        return max(0, min(_MOST_WARMERS, usable_cores() - 2, memory // (4 * largest)))

    def cells(self, gpu: str, timer: str, l2: str) -> list[Cell]:
        """Return the cells of all samplers that could be imported, in order."""
        entries = [entry for entry in self.providers if entry.provider]
        return [
            self.cell(one, problem, gpu, timer, l2) for problem in self.problems for one in entries
        ]

    def cell(self, entry: Found, problem: Problem, gpu: str, timer: str, l2: str) -> Cell:
        """Return the cell of a sampler on a problem, as this plan measures it.

        Args:
            gpu: name of the GPU, "" on a CPU.
            timer, l2: see Timer.
        """
        provider = entry.provider
        if provider is None:
            return Cell(
                entry.name, entry.name, "", False, Conditions(gpu, timer, False, l2), problem
            )
        able = provider.capabilities
        graph = self.graph and problem.device == "cuda" and able.graph_safe
        return Cell(
            entry.name,
            as_text(provider.label),
            str(provider.kind_on(problem)),
            able.fused,
            Conditions(gpu, timer, graph, l2),
            problem,
        )


@dataclass(frozen=True)
class Job:
    """Instructions for every process of a run; plain data that can be pickled.

    plan: its providers are not pickled; a process discovers them by `names` and `provider_paths`.
    indices: GPU indices, one per rank.
    timer: name of the timer.
    seconds: how long all processes may be silent.
    together: the processes are ranks that share the vocabulary.
    warmers: number of compile processes.
    first_call_s: see Preparation. gate: see Recorder.
    began: time.monotonic() at which the phase "start" began.
    """

    plan: Plan
    names: list[str]
    provider_paths: list[str]
    device: str
    indices: list[int]
    timer: str
    l2: str
    seconds: float
    together: bool = False
    warmers: int = 0
    first_call_s: dict[tuple[str, Problem], float] = field(default_factory=dict)
    gate: dict[tuple[str, Setting], str] = field(default_factory=dict)
    began: float | None = None

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.indices)


def torchrun_rank(degrees: list[int], folder: Path | None) -> int | None:
    """Return this process's rank if torchrun started it (by its variables), else None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    variables = {name: os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK")}
    for name, value in variables.items():
        if not value.isdecimal():
            raise InvalidArgument(
                f"{name}: expected the number that torchrun sets, since TORCHELASTIC_RUN_ID is "
                f"set; got {value!r}"
            )
    ranks = int(variables["WORLD_SIZE"])
    if degrees != [ranks]:
        raise InvalidArgument(f"--tp: expected {ranks}, the ranks of torchrun; got {degrees}")
    if folder is None:
        raise InvalidArgument("--out: expected a folder, which all ranks of torchrun share")
    return int(variables["RANK"])
