"""Times the tuning space of the FlashSampling kernel on this GPU and writes it as CSV.

    python tools/tune_flash_sampling.py results/h200/tuning/flash_sampling.csv

One row per bucket of B, shape and config, fastest first; beside it the environment as JSON. It is
the record behind the shipped table in kernels/_flash_sampling_config.py. All configs are compiled
first, in parallel; each is checked against the oracle before it is timed (CUPTI span, eager, cold
L2, at the upper end of its bucket), next to the matmul.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from fsbench import inputs, reference
from fsbench.environment import environment
from fsbench.kernels import flash_sample
from fsbench.kernels._flash_sampling_config import BUCKETS, TileConfig, space
from fsbench.problem import Problem
from fsbench.timers import make_timer

SHAPES = ((4096, 151936), (8192, 128256))  # the paper's, (D, V)
ITERATIONS = 15


def compile_config(B: int, config: TileConfig) -> str:
    """Compile one config into Triton's cache by a small launch; returns "" or why it cannot run."""
    problem = Problem(B, 256, 1024)
    zero = torch.zeros(1, dtype=torch.int64, device="cuda")
    try:
        hidden, weight = inputs.make_hidden(problem, 0), inputs.make_weight(problem, 0)
        flash_sample(hidden, weight, seed=zero, offset=zero, config=config)
        torch.cuda.synchronize()
    except Exception as error:  # out of shared memory or registers: a fact about the config
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


class _Bench:
    """Times configs on one hidden and weight, each checked against the oracle first."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self._hidden, self._weight = hidden, weight
        self._timer = make_timer("cupti", "cuda")
        self._seed, self._offset = (
            torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2)
        )
        self._expected = reference.expect(
            hidden.float() @ weight.float().T,
            self._seed,
            self._offset,
            noise="group",
            logits_error=reference.matmul_error(hidden, weight),
        )

    def matmul_us(self) -> float:
        return self._median_us(lambda: self._hidden @ self._weight.T)

    def config_us(self, config: TileConfig) -> float | None:
        """Median time of a config, None if its tokens are wrong."""

        def step() -> Tensor:
            return flash_sample(
                self._hidden, self._weight, seed=self._seed, offset=self._offset, config=config
            ).tokens

        return self._median_us(step) if self._expected.accepts(step()).all() else None

    def _median_us(self, step: Callable[[], object]) -> float:
        for _ in range(3):
            step()
        return statistics.median(self._timer.measure(step, ITERATIONS, lambda: None).span_us)


def main(path: Path) -> None:
    """Measure the whole space and write the table."""
    todo = [(B, config) for B in BUCKETS for config in space(B)]
    workers = max(1, (os.cpu_count() or 2) - 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        failures = list(pool.map(compile_config, *zip(*todo, strict=True), chunksize=4))
    rows = []
    for D, V in SHAPES:
        weight = inputs.make_weight(Problem(1, D, V), 0)
        for B in BUCKETS:
            bench = _Bench(inputs.make_hidden(Problem(B, D, V), 0), weight)
            matmul_us = f"{bench.matmul_us():.1f}"
            timed = []
            for (bucket, config), failure in zip(todo, failures, strict=True):
                if bucket == B:
                    time_us = None if failure else bench.config_us(config)
                    note = "" if time_us else failure or "wrong tokens"
                    timed.append((time_us or float("inf"), str(config), note))
            for time_us, config_name, note in sorted(timed):
                shown = f"{time_us:.1f}" if not note else ""
                rows.append([B, D, V, config_name, shown, matmul_us, note])
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["b", "d", "v", "config", "median_us", "matmul_us", "note"])
        writer.writerows(rows)
    record = json.dumps(environment("cuda", sys.argv), indent=2)
    path.with_suffix(".env.json").write_text(record + "\n")
    print(f"{len(rows)} rows in {path}, measured on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
