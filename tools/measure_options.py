"""Times flash_sample with each of its options against plain sampling, and writes it as CSV.

    python tools/measure_options.py results/h200/options/options.csv

Graph replay, CUPTI span, cold L2; the options of one shape are interleaved in rounds and compared
with plain sampling round by round. `floor_us` is the time that the option's own bytes take at the
rate at which plain sampling reads the weight. Beside the CSV lies the environment as JSON. All
kernels are compiled first, in parallel.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import measuring
import torch
from torch import Tensor

from fsbench import inputs
from fsbench.kernels import flash_sample
from fsbench.kernels.launch.operands import pack_mask
from fsbench.problem import Problem

BATCHES = (1, 16, 64, 256)
ROUNDS = 5
ITERATIONS = 15


def options(B: int, V: int) -> dict[str, dict[str, Any]]:
    """The arguments of each option for a batch of B rows and V tokens, on the GPU."""
    cuda = torch.device("cuda")
    row = torch.arange(B, device=cuda)
    allowed = torch.rand(B, V, device=cuda) < 0.9
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
        "mask packed": {"mask": pack_mask(allowed)},
        "soft_cap": {"soft_cap": 30.0},
        "vocab_size": {"vocab_size": V - 77},
        "return_logz": {"return_logz": True},
        "return_logprob": {"return_logprob": True},
        "return_entropy": {"return_entropy": True},
        "return_rank": {"return_rank": True},
        "return_top 20": {"return_top": 20},
        "return_logprob, return_rank, return_top 20": {
            "return_logprob": True,
            "return_rank": True,
            "return_top": 20,
        },
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


def measure(D: int, V: int, B: int, weight: Tensor) -> Iterator[list[object]]:
    """The rows of one shape and batch size."""
    hidden = inputs.make_hidden(Problem(B, D, V), 0)
    given = options(B, V)
    steps = {
        name: measuring.replay(flash_sample, hidden, weight, **option)
        for name, option in given.items()
    }
    found = measuring.in_rounds(steps, ROUNDS, ITERATIONS)
    times = {name: [statistics.median(one.span_us) for one in found[name]] for name in steps}
    plain = times["plain"]
    us_per_byte = statistics.median(plain) / (2 * D * V)
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, plain, strict=True))
        extra = [given[name].get(key) for key in ("bias", "mask")]
        floor_us = sum(t.nbytes for t in extra if t is not None) * us_per_byte
        time_us = f"{statistics.median(own):.1f}"
        yield [D, V, B, name, time_us, f"{ratio:.4f}", f"{floor_us:.1f}"]


def table() -> Iterator[list[object]]:
    """Every shape and batch size."""
    workers = max(1, (os.cpu_count() or 2) - 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        todo = [(B, name) for B in BATCHES for name in options(B, 32)]
        list(pool.map(compile_option, *zip(*todo, strict=True)))
    for D, V in measuring.PAPER_SHAPES:
        weight = inputs.make_weight(Problem(1, D, V), 0)
        for B in BATCHES:
            yield from measure(D, V, B, weight)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("path", type=Path, help="CSV file to write")
    arguments = parser.parse_args()
    header = ["d", "v", "b", "option", "time_us", "ratio_to_plain", "floor_us"]
    measuring.write(arguments.path, header, table())
