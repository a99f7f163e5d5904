"""Times truncated_sample and each of its launches by filters and laws of logits; writes CSV.

    python tools/measure_truncated.py results/h200/truncated-launches/launches.csv

Graph replay, cold L2, D = 4096, V = 151936. A row of the table has the median CUPTI span of the
step, and the mean time of every launch in it, in microseconds; the difference is what lies between
launches. `plain` is flash_sample, with the kernel that it chooses itself. All cases of one law and
batch size are interleaved in rounds. Beside the CSV lies the environment as JSON.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsbench import inputs
from fsbench.graphs import capture
from fsbench.kernels import flash_sample, truncated_sample
from fsbench.machine.environment import environment
from fsbench.problem import Problem
from fsbench.timers import make_timer

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
    "sections": ("sampling_sections_kernel",),
    "cutoff": ("sampling_cutoff_kernel",),
    "race": ("sampling_race_kernel",),
}
"""Columns, and with what the names of their kernels begin."""


def measure(law: str, B: int, weight: Tensor) -> list[list[object]]:
    """The rows of one law and batch size."""
    hidden = inputs.make_hidden(Problem(B, D, V, logits=law), 0)
    seed, offset = torch.ones(2, 1, dtype=torch.int64, device="cuda")

    def plain(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return flash_sample(hidden, weight, seed=seed, offset=offset).tokens

    def truncated(filters: dict[str, Any]) -> Any:
        def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
            return truncated_sample(hidden, weight, seed=seed, offset=offset, **filters).tokens

        return capture(launch, hidden, seed, offset)

    steps = {"plain": capture(plain, hidden, seed, offset)}
    steps |= {json.dumps(filters): truncated(filters) for filters in FILTERS}
    timer = make_timer("cupti", "cuda")
    spans: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, list[dict[str, float]]] = defaultdict(list)
    for step in steps.values():
        timer.measure(step, 3, lambda: None)
    for _ in range(ROUNDS):
        for name, step in steps.items():
            found = timer.measure(step, ITERATIONS, lambda: offset.add_(1))
            spans[name] += found.span_us
            parts[name].append(found.kernels)
    rows: list[list[object]] = []
    for name in steps:
        filters = {} if name == "plain" else json.loads(name)
        of_launch = [
            statistics.mean(
                sum(us for kernel, us in each.items() if kernel.startswith(names))
                for each in parts[name]
            )
            for names in LAUNCHES.values()
        ]
        rows.append(
            [
                law,
                B,
                "plain" if name == "plain" else "truncated",
                filters.get("top_k", 0),
                filters.get("top_p", 1.0),
                filters.get("min_p", 0.0),
                f"{statistics.median(spans[name]):.1f}",
                *(f"{us:.1f}" for us in of_launch),
            ]
        )
    return rows


def main(path: Path) -> None:
    """Measure every law and batch size, and write the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = ["logits", "b", "sampler", "top_k", "top_p", "min_p", "span_us"]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header + [f"{launch}_us" for launch in LAUNCHES])
        for law in LAWS:
            weight = inputs.make_weight(Problem(1, D, V, logits=law), 0)
            for B in BATCHES:
                writer.writerows(rows := measure(law, B, weight))
                file.flush()
                for row in rows:
                    print(*row, flush=True)
    record = json.dumps(environment("cuda", sys.argv), indent=2)
    path.with_suffix(".env.json").write_text(record + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
