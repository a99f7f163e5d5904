"""Times every form of the noise in flash_sample and in screened_sample, and writes them as CSV.

    python tools/measure_noise.py results/h200/noise-forms/noise.csv

Normal logits with sigma 3 at D = 4096, V = 151,936: graph replay, CUDA events, cold L2; cuBLAS's
matmul and both samplers with every form are interleaved in rounds. Both samplers also draw STEPS
steps with the same noise, and the tokens that differ are counted. Beside the CSV lies the
environment as JSON. All kernels are compiled first, in parallel. Columns:

    d, v, b             the shape
    sampler, noise      what drew; the matmul has no noise
    time_us             median over rounds
    ratio_to_matmul     median over rounds of time_us over that of the matmul
    candidates          of screened_sample: tokens of a row whose exact logits were computed, mean
    draws, unequal      of screened_sample: tokens drawn, and those that differ from flash_sample's
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
from fsbench.kernels import ScreenedHead, flash_sample, prepare_head, screened_sample
from fsbench.problem import Problem
from fsbench.reference import GROUP_SIZES

D, V = measuring.PAPER_SHAPES[0]
LOGITS = "normal:3"
FUSED, SCREENED = (1, 16, 64, 128, 256), (1, 16, 32, 64)
"""Batch sizes of flash_sample, and of screened_sample."""
ROUNDS = 5
ITERATIONS = 11
STEPS = 8
COLUMNS = (
    *("d", "v", "b", "sampler", "noise", "time_us", "ratio_to_matmul"),
    *("candidates", "draws", "unequal"),
)


def matmul(hidden: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return hidden @ weight.T


def compile_for(B: int, noise: str) -> None:
    """Compile one form of the noise for a batch size into Triton's cache, by small launches."""
    problem = Problem(B, D, 1024)
    hidden, weight = inputs.make_hidden(problem, 0), inputs.make_weight(problem, 0)
    zeros = torch.zeros(2, 1, dtype=torch.int64, device="cuda")
    given: dict[str, Any] = {"seed": zeros[0], "offset": zeros[1], "noise": noise}
    flash_sample(hidden, weight, **given)
    if B in SCREENED:
        screened_sample(hidden, prepare_head(weight), **given)
    torch.cuda.synchronize()


def equal_tokens(hidden: Tensor, head: ScreenedHead, noise: str) -> tuple[float | None, int, int]:
    """(candidates of a row, draws, draws that differ) of STEPS steps by both samplers."""
    seed, offset = torch.ones(2, 1, dtype=torch.int64, device="cuda")
    found, unequal = [], 0
    for _ in range(STEPS):
        given: dict[str, Any] = {"seed": seed, "offset": offset, "noise": noise}
        sample = screened_sample(hidden, head, **given)
        unequal += int((sample.tokens != flash_sample(hidden, head.weight, **given).tokens).sum())
        assert sample.found is not None
        found += sample.found.tolist()
        offset += 1
    few = [count for count in found if count >= 0]
    return (statistics.mean(few) if few else None), len(found), unequal


def measure(B: int, head: ScreenedHead) -> Iterator[list[object]]:
    """The rows of one batch size."""
    hidden = inputs.make_hidden(Problem(B, D, V, logits=LOGITS), 0)
    steps = {("matmul", ""): measuring.replay(matmul, hidden, head.weight)}
    for noise in GROUP_SIZES:
        steps["flash_sample", noise] = measuring.replay(
            flash_sample, hidden, head.weight, noise=noise
        )
        if B in SCREENED:
            steps["screened_sample", noise] = measuring.replay(
                screened_sample, hidden, head, noise=noise
            )
    found = measuring.in_rounds(steps, ROUNDS, ITERATIONS, timed_by="events")
    times = {name: [statistics.median(one.span_us) for one in found[name]] for name in steps}
    for (sampler, noise), own in times.items():
        ratios = [a / b for a, b in zip(own, times["matmul", ""], strict=True)]
        counted: tuple[object, ...] = ("", "", "")
        if sampler == "screened_sample":
            mean, draws, unequal = equal_tokens(hidden, head, noise)
            counted = ("" if mean is None else f"{mean:.1f}", draws, unequal)
        time_us, ratio = f"{statistics.median(own):.1f}", f"{statistics.median(ratios):.4f}"
        yield [D, V, B, sampler, noise, time_us, ratio, *counted]


def table() -> Iterator[list[object]]:
    """Every batch size."""
    workers = max(1, (os.cpu_count() or 2) - 1)
    batches = sorted({*FUSED, *SCREENED})
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        todo = [(B, noise) for B in reversed(batches) for noise in GROUP_SIZES]
        list(pool.map(compile_for, *zip(*todo, strict=True)))
    head = prepare_head(inputs.make_weight(Problem(1, D, V, logits=LOGITS), 0))
    for B in batches:
        yield from measure(B, head)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("path", type=Path, help="CSV file to write")
    measuring.write(parser.parse_args().path, COLUMNS, table())
