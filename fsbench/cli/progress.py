"""Progress of `fsbench run`, `tune` and `verify`: finished work, a bar or a heartbeat."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from rich.console import Console

    from fsbench.measure.plan import Job
    from fsbench.records.cell import CellRecord

HEARTBEAT_S = 8.0
"""Seconds without a line after which one is printed, where there is no terminal for a bar."""


def duration(seconds: float) -> str:
    """Return seconds as text, such as 8.1s, 42s, 3m20s or 2h05m."""
    if seconds < 99.5:
        return f"{seconds:.2g}s" if seconds < 9.95 else f"{seconds:.0f}s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}m{seconds:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def time_of_step(microseconds: float) -> str:
    """Return the time of a step with three digits, in us, ms or s."""
    for unit, scale in (("us", 1.0), ("ms", 1e3)):
        if microseconds < 999.5 * scale:
            value = microseconds / scale
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    return f"{microseconds / 1e6:.3g} s"


class Heartbeat:
    """Print lines, and after HEARTBEAT_S without one `activity()`; a context.

    Args:
        show: prints a line.
        activity: returns the text of a heartbeat.
    """

    def __init__(self, show: Callable[[str], None], activity: Callable[[], str]) -> None:
        self._show, self._activity = show, activity
        self._printed = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the heartbeat and wait for its thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def print(self, line: str) -> None:
        """Print a line now."""
        self._printed = time.monotonic()
        self._show(line.rstrip())

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S / 16):
            if time.monotonic() - self._printed > HEARTBEAT_S:
                self.print(self._activity())


class Progress:
    """Shows what is measured and how long it takes; a context, from the first line to the last.

    Args:
        console: where to print. On a terminal there is a bar, elsewhere a line every HEARTBEAT_S.
        is_silent: print nothing.
    """

    def __init__(self, console: Console, is_silent: bool = False) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        activity = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._bar = Bar(
            TextColumn("{task.fields[cells]}/{task.total:.0f} cells"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}", markup=False, table_column=activity),
            console=console,
            expand=True,
            transient=True,
            disable=not console.is_terminal or is_silent,
        )
        self._console = console
        self._is_silent = is_silent
        self._task = self._bar.add_task("", total=1, cells=0, left="")
        self._cells = (0, 0)
        self._left = self._activity = ""
        self._first: tuple[float, float] | None = None  # time and cells of the first report
        self._heartbeat = Heartbeat(
            lambda line: console.print(line, soft_wrap=True),
            lambda: f"{self._count()} {self._activity}   {self._left}",
        )

    def __enter__(self) -> Progress:
        if not (self._is_silent or self._console.is_terminal):
            self._heartbeat.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bar, or end the heartbeat."""
        self._heartbeat.stop()
        if self._bar.live.is_started:
            self._bar.stop()

    def announce(self, job: Job, preset: str) -> None:
        """Print what will be measured, and on what."""
        from fsbench.machine import hardware

        plan = job.plan
        gpus = hardware.gpus()
        where = gpus[0].name if job.device == "cuda" and gpus else hardware.cpu_name()
        cells = len(plan.problems) * len(plan.providers)
        self._print(
            f"{cells} cells: {len(plan.providers)} samplers x {len(plan.problems)} problems of "
            f"preset {preset} on {where}"
        )
        if job.device == "cpu" and preset == "smoke":
            self._print("for a real LM head on this CPU: fsbench run --preset cpu (some minutes)")
        self._cells, self._activity = (0, cells), "importing torch"

    def report(self, done: float, total: int, activity: str) -> None:
        """Show progress, see `Recorder.report`; the bar appears with the first call."""
        self._cells, self._activity = (int(done), total), activity
        seconds = self._estimate(done, total)
        self._left = f"about {duration(seconds)} left" if seconds else ""
        if self._is_silent:
            return
        self._bar.start()
        fields: dict[str, Any] = {"cells": self._cells[0], "left": self._left}
        self._bar.update(self._task, completed=done, total=total, description=activity, **fields)

    def finished(self, record: CellRecord) -> None:
        """Print a line: the cell, its median time or status, and the time left."""
        from fsbench.records.summary import row

        problem = record.cell.problem
        median = row(record)["median_us"]
        is_timed = record.status == "ok" and median is not None
        result = time_of_step(median) if is_timed else record.status
        shape = f"B={problem.B} D={problem.D} V={problem.V}"
        self._print(f"{self._count()} {record.cell.provider}  {shape}  {result}   {self._left}")

    def _estimate(self, done: float, total: int) -> float | None:
        """Return the seconds left, as if all cells take as long as those since the first report.

        None until a tenth is done: imports, compilation and verification come first.
        """
        now = time.monotonic()
        began, before = self._first = self._first or (now, done)
        if total <= before or done - before < (total - before) / 10:
            return None
        return (now - began) * (total - done) / (done - before)

    def _count(self) -> str:
        done, total = self._cells
        return f"[{done}/{total}]"

    def _print(self, line: str) -> None:
        if not self._is_silent:
            self._heartbeat.print(line)
