"""Compare the tokens of a screened head with those of its weight, over many draws; writes CSV.

    python tools/measure_equal_tokens.py results/h200/equal-tokens/equal_tokens.csv

A row of hidden has logits of one standard deviation, from 0.1 to 16, evenly in the logarithm.
Hidden is drawn again every 64 steps, the noise in each step. `unequal` counts draws in which
`screened_sample` returned another token than `flash_sample` with token noise; `in_full` those in
which it computed all exact logits of the row. prepare_s is the time of `prepare_head`, whose
kernels are compiled before. The file next to the CSV has the environment.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from write_csv import write_csv

from fsbench.kernels import flash_sample, prepare_head, screened_sample
from fsbench.machine.device_state import synchronize

COLUMNS = ("D", "V", "B", "temperature", "draws", "unequal", "in_full", "prepare_s", "seconds")
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
SEED, ROWS, STEPS = 0, 64, 64  # STEPS: with the same hidden


def rows_of(D: int, V: int, draws: int, device: str) -> Iterator[tuple[object, ...]]:
    """Yield a row of the CSV for each temperature; each has at least `draws` draws."""
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(rows: int) -> torch.Tensor:
        return torch.randn(rows, D, generator=generator, device=device)

    weight = torch.cat([normal(part).bfloat16() for part in (V // 2, V - V // 2)]) / math.sqrt(D)
    prepare_head(weight)
    synchronize(device)
    begin = time.perf_counter()
    head = prepare_head(weight)
    synchronize(device)
    prepare_s = time.perf_counter() - begin
    sigmas = torch.logspace(math.log10(0.1), math.log10(16), ROWS, device=device)[:, None]
    seed = torch.arange(ROWS, device=device)
    for temperature in TEMPERATURES:
        begin = time.perf_counter()
        unequal, in_full = torch.zeros(2, dtype=torch.int64, device=device)
        steps = math.ceil(draws / ROWS)
        for step in range(steps):
            if step % STEPS == 0:
                hidden = (sigmas * normal(ROWS)).bfloat16()
            sample = screened_sample(hidden, head, temperature=temperature, seed=seed, offset=step)
            expected = flash_sample(
                hidden, weight, temperature=temperature, seed=seed, offset=step, noise="token"
            )
            assert sample.found is not None
            unequal += (sample.tokens != expected.tokens).sum()
            in_full += ((sample.found < 0) | (sample.found >= V)).sum()
        counts = (steps * ROWS, int(unequal), int(in_full))
        seconds = time.perf_counter() - begin
        yield (D, V, ROWS, temperature, *counts, f"{prepare_s:.3f}", f"{seconds:.1f}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare the tokens of a screened head.")
    parser.add_argument("csv", type=Path)
    parser.add_argument("--d", type=int, default=4096)
    parser.add_argument("--v", type=int, default=151_936)
    parser.add_argument("--draws", type=int, default=2_500_000, help="for each temperature")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    rows = rows_of(options.d, options.v, options.draws, options.device)
    write_csv(options.csv, COLUMNS, rows, options.device)


if __name__ == "__main__":
    main()
