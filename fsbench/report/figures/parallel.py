"""Draw many figures in parallel, one process per core."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from fsbench.cores import usable_cores

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
    print(f"drawing {len(tasks)} figures", file=sys.stderr, flush=True)
    with multiprocessing.get_context("fork").Pool(min(usable_cores(), 16)) as pool:
        yield from pool.imap(_run, range(len(tasks)))


def _run(number: int) -> Any:
    return _TASKS[number]()
