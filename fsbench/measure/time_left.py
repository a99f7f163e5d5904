"""Seconds of a run by cell and phase, and an estimate of the time left.

Phases, in the order of a cell:

    start        start the process: imports, CUDA, the timer
    inputs       make weight and hidden
    gate         verify a sampler, once
    first call   build and call it once, compilation included
    check        check its tokens on the problem
    capture      capture the CUDA graph and warm up
    timing       the rounds
    beside       energy, sustained load, host time, forms
    other        between cells
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from fsbench.errors import ResultsError
from fsbench.records.cell import Cell
from fsbench.records.store import read_environment, shipped_results

LATER_CALL_S = 1.0
"""Seconds of a sampler's first call that its next problem may take again, to compile a variant."""


class TimeLeft(NamedTuple):
    """Seconds to the end. is_guess: nothing is known of some sampler yet."""

    seconds: float
    is_guess: bool = False


class PhaseTimes:
    """Seconds by (cell, phase): the time from one `enter` to the next belongs to the first.

    Args:
        since: when the first phase, "start", began; by default now.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, since: float | None = None
    ) -> None:
        self._clock = clock
        self._seconds: dict[Cell | None, dict[str, float]] = {None: {}}
        self._current: tuple[Cell | None, str] = (None, "start")
        self._since = clock() if since is None else since
        self._end: float | None = None
        self._is_guess = False
        self._open: Collection[Cell] = ()

    def expect(self, open_cells: Collection[Cell]) -> None:
        """Set the cells that are not finished; the caller removes them as they finish."""
        self._open = open_cells

    def enter(self, phase: str, cell: Cell | None = None) -> None:
        """Begin a phase of a cell, or of none."""
        now = self._clock()
        previous_cell, previous_phase = self._current
        seconds = self._seconds.setdefault(previous_cell, {})
        seconds[previous_phase] = seconds.get(previous_phase, 0.0) + now - self._since
        self._current, self._since = (cell, phase), now

    def total(self, cell: Cell) -> float:
        """Return the seconds of a cell so far."""
        return sum(self._seconds.get(cell, {}).values())

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase so far."""
        self.enter(self._current[1], self._current[0])
        total: dict[str, float] = {}
        for phases in self._seconds.values():
            for phase, seconds in phases.items():
                total[phase] = total.get(phase, 0.0) + seconds
        return total

    @property
    def remaining(self) -> TimeLeft | None:
        """Return the time left; None until a sampler is verified."""
        if self._end is None:
            return self._left_before_first()
        return TimeLeft(max(0.0, self._end - self._clock()), self._is_guess)

    def _left_before_first(self) -> TimeLeft | None:
        """Estimate before a cell is finished: each sampler that waits takes as long to prepare.

        Rounds have not been timed: for a run with many steps the estimate is too small.
        """
        current, phase = self._current
        elapsed = self._clock() - self._since
        prepared = [each for each in self._seconds if each]
        if current in prepared and phase in ("gate", "first call"):
            prepared.remove(current)
        gates = [seconds for each in prepared if (seconds := self._first_only(each)) > 0]
        if not gates:
            return None
        later = mean(self.total(each) - self._first_only(each) for each in prepared)
        waiting = {cell.provider for cell in self._open} - {cell.provider for cell in prepared}
        begun = elapsed if phase == "gate" else 0.0
        first_s = max(0.0, mean(gates) * len(waiting) - begun)
        return TimeLeft(first_s + later * max(0, len(self._open) - len(prepared)), is_guess=True)

    def finish(self, open_cells: Collection[Cell]) -> None:
        """Estimate the time left again, after a cell. open_cells: those that are not finished.

        A cell takes as long as the last one of its sampler, less what a first cell does once: the
        gate and most of a long first call. An unseen sampler takes as long as the others.
        """
        self.enter("other")
        finished: defaultdict[str, list[Cell]] = defaultdict(list)
        for cell in self._seconds:
            if cell and cell not in open_cells:
                finished[cell.provider].append(cell)
        first_only = {name: self._first_only(first) for name, (first, *_) in finished.items()}
        per_cell = {
            name: self.total(cells[-1]) - (first_only[name] if len(cells) == 1 else 0)
            for name, cells in finished.items()
        }
        usual, usual_first = mean(per_cell.values()), mean(first_only.values())
        left_s = sum(max(0.0, per_cell.get(c.provider, usual) - self.total(c)) for c in open_cells)
        begun = {each.provider for each in self._seconds if each}
        unseen = {cell.provider for cell in open_cells} - begun
        self._end = self._clock() + left_s + usual_first * len(unseen)
        self._is_guess = bool(unseen)

    def _first_only(self, cell: Cell) -> float:
        phases = self._seconds[cell]
        return phases.get("gate", 0.0) + max(0.0, phases.get("first call", 0.0) - LATER_CALL_S)


def seconds_of_records(machine: str, device: str, preset: str, cells: int) -> float | None:
    """Return about how long a run takes, by the latest record of such a run; None without one.

    Args:
        machine: name of the GPU, or on a CPU of the CPU.
        cells: how many the run has; a record of another number is scaled.
    """
    latest = ("", 0.0)
    records = {
        path.resolve().parent
        for results in (Path("results"), shipped_results())
        for path in results.glob("*/*/env.json")
    }
    for folder in records:
        try:
            facts = read_environment(folder)
            if (
                facts.get("gpu" if device == "cuda" else "cpu") != machine
                or facts.get("device") != device
                or facts.get("options", {}).get("preset") != preset
            ):
                continue
            rows = (folder / "results.csv").read_bytes().count(b"\n") - 1
        except (ResultsError, OSError):
            continue
        times = [each.get("phases", {}) for each in facts.get("times", [])]
        if times and rows > 0:
            seconds = sum(value for phases in times for value in phases.values())
            latest = max(latest, (facts.get("utc") or "", seconds * cells / rows))
    return latest[1] or None
