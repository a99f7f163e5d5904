"""Times flash_sample with each of its options against plain sampling, and writes it as CSV.

    python tools/measure_options.py results/h200/options/options.csv

Graph replay, CUPTI span, cold L2; the options of one shape are interleaved in rounds and compared
with plain sampling round by round. `floor_us` is the time that the option's own bytes take at the
rate at which plain sampling reads the weight. Beside the CSV lies the environment as JSON. All
kernels are compiled first, in parallel.
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
from typing import Any

import torch
from torch import Tensor

from fsbench import inputs
from fsbench.graphs import capture
from fsbench.kernels import flash_sample
from fsbench.machine.environment import environment
from fsbench.problem import Problem
from fsbench.timers import make_timer

SHAPES = ((4096, 151936), (8192, 128256))  # the paper's, (D, V)
BATCHES = (1, 16, 64, 256)
ROUNDS = 5
ITERATIONS = 15


def options(B: int, V: int) -> dict[str, dict[str, Any]]:
    """The arguments of each option for a batch of B rows and V tokens, on the GPU."""
    cuda = torch.device("cuda")
    row = torch.arange(B, device=cuda)
    allowed = torch.rand(B, V, device=cuda) < 0.9
    bits = torch.nn.functional.pad(allowed, (0, -V % 32)).view(B, -1, 32).long()
    packed = (bits << torch.arange(32, device=cuda)).sum(2)
    return {
        "plain": {},
        "greedy": {"temperature": 0.0},
        "token noise": {"noise": "token"},
        "temperature [B]": {"temperature": 0.5 + (row % 3) / 4},
        "temperature [B], half of it 0": {"temperature": (row % 2).float()},
        "seed [B], offset [B]": {"seed": row + 1, "offset": row + 7},
        "bias [V]": {"bias": torch.randn(V, device=cuda)},
        "bias [B, V] fp32": {"bias": torch.randn(B, V, device=cuda)},
        "bias [B, V] bf16": {"bias": torch.randn(B, V, device=cuda).bfloat16()},
        "mask bool": {"mask": allowed},
        "mask packed": {"mask": torch.where(packed >= 2**31, packed - 2**32, packed).int()},
        "soft_cap": {"soft_cap": 30.0},
        "vocab_size": {"vocab_size": V - 77},
        "return_logz": {"return_logz": True},
        "return_logprob": {"return_logprob": True},
        "temperature, seed and offset [B], return_logprob": {
            "temperature": (row % 5) / 4,
            "seed": row + 1,
            "offset": row + 7,
            "return_logprob": True,
        },
        "return_logprob, token noise": {"return_logprob": True, "noise": "token"},
        "num_samples 2": {"num_samples": 2},
        "num_samples 8": {"num_samples": 8},
    }


def compile_option(B: int, name: str) -> None:
    """Compile one option for a batch size into Triton's cache, by a small launch."""
    problem = Problem(B, 256, 1024)
    zero = torch.zeros(1, dtype=torch.int64, device="cuda")
    given = {"seed": zero, "offset": zero, **options(B, problem.V)[name]}
    flash_sample(inputs.make_hidden(problem, 0), inputs.make_weight(problem, 0), **given)
    torch.cuda.synchronize()


def replay(hidden: Tensor, weight: Tensor, option: dict[str, Any]) -> Callable[[], Tensor]:
    """A graph of one decode step with an option."""

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return flash_sample(hidden, weight, **{"seed": seed, "offset": offset, **option}).tokens

    seed, offset = torch.ones(2, 1, dtype=torch.int64, device="cuda")
    return capture(launch, hidden, seed, offset)


def measure(D: int, V: int, B: int, weight: Tensor) -> list[list[object]]:
    """The rows of one shape and batch size."""
    hidden = inputs.make_hidden(Problem(B, D, V), 0)
    timer = make_timer("cupti", "cuda")
    given = options(B, V)
    steps = {name: replay(hidden, weight, option) for name, option in given.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            span = timer.measure(step, ITERATIONS, lambda: None).span_us
            times[name].append(statistics.median(span))
    plain = times["plain"]
    us_per_byte = statistics.median(plain) / (2 * D * V)
    rows: list[list[object]] = []
    for name, mine in times.items():
        ratio = statistics.median(a / b for a, b in zip(mine, plain, strict=True))
        extra = [given[name].get(key) for key in ("bias", "mask")]
        floor_us = sum(t.nbytes for t in extra if t is not None) * us_per_byte
        time_us = f"{statistics.median(mine):.1f}"
        rows.append([D, V, B, name, time_us, f"{ratio:.4f}", f"{floor_us:.1f}"])
    return rows


def main(path: Path) -> None:
    """Measure every shape and write the table."""
    names = list(options(1, 32))
    workers = max(1, (os.cpu_count() or 2) - 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        todo = [(B, name) for B in BATCHES for name in names]
        list(pool.map(compile_option, *zip(*todo, strict=True)))
    rows = []
    for D, V in SHAPES:
        weight = inputs.make_weight(Problem(1, D, V), 0)
        for B in BATCHES:
            rows += measure(D, V, B, weight)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["d", "v", "b", "option", "time_us", "ratio_to_plain", "floor_us"])
        writer.writerows(rows)
    record = json.dumps(environment("cuda", sys.argv), indent=2)
    path.with_suffix(".env.json").write_text(record + "\n")
    print(f"{len(rows)} rows in {path}, measured on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
