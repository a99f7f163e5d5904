"""Times truncated_sample and each of its launches by filters and laws of logits; writes CSV.

    python tools/measure_truncated.py results/h200/truncated-launches/launches.csv

Graph replay, cold L2, D = 4096, V = 151936. A row of the table has the median CUPTI span of the
step, and the mean time of every launch in it, in microseconds; the difference is what lies between
launches. `plain` is flash_sample, with the kernel that it chooses itself. All cases of one law and
batch size are interleaved in rounds. Beside the CSV lies the environment as JSON.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measuring
from torch import Tensor

from fsbench import inputs
from fsbench.kernels import flash_sample, truncated_sample
from fsbench.problem import Problem

D, V = 4096, 151936
LAWS = ("normal:1", "normal:0.01", "normal:3", "zipf:1.1", "peaked:12")
BATCHES = (1, 16, 64, 256)
FILTERS: tuple[dict[str, Any], ...] = (
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 50},
    {"top_k": 1},
    {"top_k": 200, "top_p": 0.9},
    {"top_k": 1000, "top_p": 0.9},
    {"top_k": 20_000},
    {"min_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.5},
    {"min_p": 0.05, "top_p": 0.9},
    {},
)
ROUNDS = 3
ITERATIONS = 8
LAUNCHES = {
    "fused": ("flash_sampling_kernel", "hopper_kernel"),
    "look": ("sampling_look_kernel",),
    "narrow": ("sampling_narrow_kernel",),
    "cutoff": ("sampling_cutoff_kernel",),
    "race": ("sampling_race_kernel",),
    "redraw": ("sampling_redraw_kernel",),
}
"""Columns, and with what the names of their kernels begin."""


def measure(law: str, B: int, weight: Tensor) -> Iterator[list[object]]:
    """The rows of one law and batch size."""
    hidden = inputs.make_hidden(Problem(B, D, V, logits=law), 0)
    cases: list[tuple[str, dict[str, Any]]] = [("plain", {})]
    cases += [("truncated", filters) for filters in FILTERS]
    samplers: dict[str, Any] = {"plain": flash_sample, "truncated": truncated_sample}
    steps = {
        str(case): measuring.replay(samplers[case[0]], hidden, weight, **case[1]) for case in cases
    }
    found = measuring.in_rounds(steps, ROUNDS, ITERATIONS)
    for case in cases:
        (name, filters), each = case, found[str(case)]
        times = [statistics.median([us for one in each for us in one.span_us])]
        times += [
            statistics.mean(
                sum(us for kernel, us in one.kernels.items() if kernel.startswith(names))
                for one in each
            )
            for names in LAUNCHES.values()
        ]
        given = [filters.get("top_k", 0), filters.get("top_p", 1.0), filters.get("min_p", 0.0)]
        yield [law, B, name, *given, *(f"{us:.1f}" for us in times)]


def table() -> Iterator[list[object]]:
    """Every law and batch size."""
    for law in LAWS:
        weight = inputs.make_weight(Problem(1, D, V, logits=law), 0)
        for B in BATCHES:
            yield from measure(law, B, weight)


if __name__ == "__main__":
    header = ["logits", "b", "sampler", "top_k", "top_p", "min_p", "span_us"]
    header += [f"{launch}_us" for launch in LAUNCHES]
    measuring.write(Path(sys.argv[1]), header, table())
