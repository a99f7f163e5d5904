"""Times small and uneven heads with whole blocks of tokens and with split ones; writes CSV.

    python tools/measure_split.py results/h200/split/split.csv

On a GPU of compute capability 9.0; graph replay, CUPTI span, cold L2, interleaved in rounds. On a
CPU it is a test of what is not Hopper's. Columns:

    d, v, b     the shape
    what        portable; hopper, with whole blocks, and split (fused.hopper.split); matmul, cuBLAS
                alone; stream, the weight read once
    time_us     median
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import measuring
import torch
from torch import Tensor

from fsbench import inputs
from fsbench.baselines.weight_stream import PROVIDER as STREAM
from fsbench.kernels import flash_sample
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.problem import Problem

COLUMNS = ("d", "v", "b", "what", "time_us")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = (
    (4096, 18_992),
    (4096, 37_984),
    (4096, 75_968),
    (4096, 128_256),
    (8192, 16_032),
    (8192, 64_128),
    (8192, 128_256),
    (3072, 49_216),
    (6144, 32_000),
    (2048, 17_024),
)
"""Heads, and shards of them: the last round of blocks is nearly empty, half full, full."""
BATCHES = (1, 16, 32, 64)
ROUNDS, ITERATIONS = 3, 20
TILES = (1, 128, 128, 4, False)
"""The shipped ones up to 64 rows."""


def ways(D: int, V: int, weight: Tensor) -> dict[str, Callable[..., Any]]:
    """What is timed, as measuring.replay takes it."""
    found: dict[str, Callable[..., Any]] = {"portable": partial(flash_sample, kernel="portable")}
    if weight.is_cuda:
        for name, split in (("hopper", False), ("split", True)):
            found[name] = partial(flash_sample, config=HopperConfig(*TILES, split=split))
        stream = STREAM.build(Problem(1, D, V, device=DEVICE), weight)
        found["stream"] = lambda hidden, weight, seed, offset: stream(hidden, seed, offset)
    found["matmul"] = lambda hidden, weight, **_: hidden @ weight.T
    return found


def table() -> Iterator[list[object]]:
    """The rows of every shape and batch size."""
    for D, V in SHAPES:
        weight = inputs.make_weight(Problem(1, D, V, device=DEVICE), 0)
        for B in BATCHES:
            hidden = inputs.make_hidden(Problem(B, D, V, device=DEVICE), 0)
            steps = {
                what: measuring.replay(way, hidden, weight)
                for what, way in ways(D, V, weight).items()
            }
            found = measuring.in_rounds(steps, ROUNDS, ITERATIONS)
            for what, rounds in found.items():
                time = statistics.median(us for one in rounds for us in one.span_us)
                yield [D, V, B, what, f"{time:.2f}"]


if __name__ == "__main__":
    measuring.write(Path(sys.argv[1]), COLUMNS, table(), DEVICE)
