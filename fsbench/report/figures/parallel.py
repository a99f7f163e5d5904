"""Draw many figures in parallel, one process per core, with a progress bar on a terminal."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")
FEW = 12
"""Up to this many figures are drawn in this process: starting processes takes longer."""

_TASKS: Sequence[Callable[[], Any]] = ()


def drawn(tasks: Sequence[Callable[[], T]]) -> Iterator[T]:
    """Yield the result of each task in order. Tasks may be closures: processes are forked."""
    global _TASKS
    if len(tasks) <= FEW or "fork" not in multiprocessing.get_all_start_methods():
        yield from (task() for task in tasks)
        return
    _TASKS = tasks
    if not sys.stderr.isatty():
        print(f"drawing {len(tasks)} figures", file=sys.stderr, flush=True)
    with multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, 16)) as pool:
        done = pool.imap(_run, range(len(tasks)))
        yield from track(
            done,
            "drawing",
            len(tasks),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )


def _run(number: int) -> Any:
    return _TASKS[number]()
