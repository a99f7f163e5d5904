"""Host time of an eager call of the public functions: what a step waits for before the GPU works.

    python tools/measure_host.py --out results/h200/host/host.csv --label "0.2.0"

The head is small, so that the GPU is done before the next call comes and nothing queues up. Calls
are timed one by one; a row has the median and the 10th and 90th percentile in microseconds.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fsbench.kernels import flash_sample, prepare_head, screened_sample, truncated_sample
from fsbench.machine.environment import environment

B, D, V = 16, 512, 8192
WARM_UP, CALLS = 200, 3000


def calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """Calls by the name of their row."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(B, D, device=device, generator=generator).bfloat16()
    weight = (torch.randn(V, D, device=device, generator=generator) / D**0.5).bfloat16()
    seed, offset = torch.zeros(2, 1, dtype=torch.int64, device=device)
    head = prepare_head(weight)
    own = torch.full((B,), 0.7, device=device)
    return {
        "flash_sample": lambda: flash_sample(hidden, weight, seed=seed, offset=offset),
        "flash_sample, portable": lambda: flash_sample(
            hidden, weight, seed=seed, offset=offset, kernel="portable"
        ),
        "flash_sample, hopper": lambda: flash_sample(
            hidden, weight, seed=seed, offset=offset, kernel="hopper"
        ),
        "flash_sample, T of each row": lambda: flash_sample(
            hidden, weight, seed=seed, offset=offset, temperature=own
        ),
        "flash_sample, log-probabilities": lambda: flash_sample(
            hidden, weight, seed=seed, offset=offset, return_logprob=True, return_logz=True
        ),
        "truncated_sample, k = 50, p = 0.9": lambda: truncated_sample(
            hidden, weight, seed=seed, offset=offset, top_k=50, top_p=0.9
        ),
        "truncated_sample, p = 0.9": lambda: truncated_sample(
            hidden, weight, seed=seed, offset=offset, top_p=0.9
        ),
        "screened_sample": lambda: screened_sample(hidden, head, seed=seed, offset=offset),
        "torch.matmul": lambda: hidden @ weight.T,
    }


def measured(call: Callable[[], object]) -> np.ndarray:
    """Microseconds of each of CALLS calls."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    times = np.empty(CALLS)
    for i in range(CALLS):
        if i % 100 == 0:
            torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        call()
        times[i] = (time.perf_counter_ns() - begin) / 1e3
    torch.cuda.synchronize()
    return times


def main() -> None:
    """Measure all calls on the current GPU, print a table and add its rows to a CSV file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--label", required=True, help="what is measured: a version or a commit")
    arguments = parser.parse_args()
    rows = []
    for name, call in calls(torch.device("cuda", torch.cuda.current_device())).items():
        low, median, high = np.percentile(measured(call), (10, 50, 90))
        print(f"{name:36} {median:8.1f} us   ({low:.1f} to {high:.1f})", flush=True)
        rows.append([arguments.label, torch.cuda.get_device_name(), name, median, low, high])
    new = not arguments.out.exists()
    with arguments.out.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(["label", "gpu", "call", "median_us", "p10_us", "p90_us"])
        writer.writerows([*row[:3], *(round(value, 2) for value in row[3:])] for row in rows)
    record = json.dumps(environment("cuda", sys.argv), indent=1)
    arguments.out.with_suffix(".env.json").write_text(record, encoding="utf-8")


if __name__ == "__main__":
    main()
