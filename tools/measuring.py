"""What the tools that measure kernels share: graphs, rounds of timing, the record."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fsbench.graphs import capture
from fsbench.machine import compilers
from fsbench.machine.environment import environment
from fsbench.timers import make_timer
from fsbench.timers.measurement import Measurement

compilers.settle()

Key = TypeVar("Key")

PAPER_SHAPES = ((4096, 151936), (8192, 128256))
"""(D, V)."""


def replay(
    sample: Callable[..., Any], hidden: Tensor, head: object, **options: Any
) -> tuple[Callable[[], Tensor], Tensor]:
    """(a graph of one decode step, the offset that it reads); sample returns tokens or a Sample.

    On a CPU the step itself.
    """

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        drawn = sample(hidden, head, **{"seed": seed, "offset": offset, **options})
        return drawn if isinstance(drawn, Tensor) else drawn.tokens

    seed, offset = torch.ones(2, 1, dtype=torch.int64, device=hidden.device)
    if not hidden.is_cuda:
        return partial(launch, hidden, seed, offset), offset
    return capture(launch, hidden, seed, offset), offset


def in_rounds(
    steps: dict[Key, tuple[Callable[[], Tensor], Tensor]],
    rounds: int,
    iterations: int,
    timed_by: str = "auto",
) -> dict[Key, list[Measurement]]:
    """Time graphs of `replay`, cold L2, one after the other in every round; the offset advances.

    timed_by: of fsbench.timers.TIMERS; `events` takes far less of the host's time than CUPTI.
    """
    timer = make_timer(timed_by, next(iter(steps.values()))[1].device.type)
    found: dict[Key, list[Measurement]] = {name: [] for name in steps}
    for step, _ in steps.values():
        timer.measure(step, 3, lambda: None)
    for _ in range(rounds):
        for name, (step, offset) in steps.items():

            def advance(offset: Tensor = offset) -> None:
                offset.add_(1)

            found[name].append(timer.measure(step, iterations, advance))
    return found


def write(
    path: Path, header: Sequence[str], rows: Iterable[Sequence[object]], device: str = "cuda"
) -> None:
    """A table, row by row as they come, and beside it the environment as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for row in rows:
            writer.writerow(row)
            file.flush()
            print(*row, flush=True)
    record = json.dumps(environment(device, sys.argv), indent=2)
    path.with_suffix(".env.json").write_text(record + "\n")
    print(f"{path}, measured on {torch.cuda.get_device_name() if device == 'cuda' else device}")
