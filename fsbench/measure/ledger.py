"""Where the time of a run goes, by cell and phase; and how long the rest will take.

Phases, in the order in which a cell meets them:

    start        of the process: imports, CUDA, the timer
    inputs       weight and hidden
    gate         a sampler verified, once
    first call   built and called once, compilation included
    check        its tokens on the problem
    capture      of the CUDA graph, and warm-up
    timing       the rounds
    beside       energy, sustained load, forms
    other        what belongs to no cell
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection
from statistics import mean
from typing import NamedTuple

from fsbench.records.cell import Cell

LATER_CALL_S = 1.0
"""At most this of a sampler's first call comes again on its next problem: a variant compiled."""


class Left(NamedTuple):
    """Seconds to the end. open: that is a guess, as nothing is known of some sampler yet."""

    seconds: float
    open: bool = False


class Ledger:
    """Seconds by (cell, phase): what passes from one `enter` to the next belongs to the first."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, since: float | None = None
    ) -> None:
        self._clock = clock
        self._spent: dict[Cell | None, dict[str, float]] = {None: {}}
        self._at: tuple[Cell | None, str] = (None, "start")
        self._since = clock() if since is None else since
        self._end: float | None = None
        self._unseen = False

    def enter(self, phase: str, cell: Cell | None = None) -> None:
        """From now on the time is of this phase, of a cell or of none."""
        now = self._clock()
        before, at = self._at
        spent = self._spent.setdefault(before, {})
        spent[at] = spent.get(at, 0.0) + now - self._since
        self._at, self._since = (cell, phase), now

    def spent(self, cell: Cell) -> float:
        """Seconds of a cell so far."""
        return sum(self._spent.get(cell, {}).values())

    def phases(self) -> dict[str, float]:
        """Seconds of each phase so far."""
        self.enter(self._at[1], self._at[0])
        total: dict[str, float] = {}
        for spent in self._spent.values():
            for phase, seconds in spent.items():
                total[phase] = total.get(phase, 0.0) + seconds
        return total

    @property
    def left(self) -> Left | None:
        """What is left, as far as is known; None until a cell is finished."""
        if self._end is None:
            return None
        return Left(max(0.0, self._end - self._clock()), self._unseen)

    def finish(self, open_cells: Collection[Cell]) -> None:
        """A cell is finished: only these are open. Estimates anew when they will be.

        A cell takes what the last one of its sampler took; of the first one, without the gate and
        most of a long first call. A sampler that nothing is known of is like the others.
        """
        self.enter("other")
        of_sampler: defaultdict[str, list[Cell]] = defaultdict(list)
        for cell in self._spent:
            if cell and cell not in open_cells:
                of_sampler[cell.provider].append(cell)
        once = {name: self._once(first) for name, (first, *_) in of_sampler.items()}
        each = {
            name: self.spent(cells[-1]) - (once[name] if len(cells) == 1 else 0)
            for name, cells in of_sampler.items()
        }
        usual, usual_once = mean(each.values()), mean(once.values())
        left = sum(max(0.0, each.get(c.provider, usual) - self.spent(c)) for c in open_cells)
        unseen = {cell.provider for cell in open_cells} - set(of_sampler)
        self._end = self._clock() + left + usual_once * len(unseen)
        self._unseen = bool(unseen)

    def _once(self, cell: Cell) -> float:
        spent = self._spent[cell]
        return spent.get("gate", 0.0) + max(0.0, spent.get("first call", 0.0) - LATER_CALL_S)
