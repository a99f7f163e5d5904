"""Times truncated_sample and each of its launches by filters and laws of logits; writes CSV.

    python tools/measure_truncated.py results/h200/truncated-launches/launches.csv
    python tools/measure_truncated.py results/h200/truncated-tensors.csv --tensors

Graph replay, cold L2, D = 4096, V = 151936. A row of the table has the median CUPTI span of the
step, and the mean time of every launch in it, in microseconds; the difference is what lies between
launches, or below 0 where a launch began before the one before it had ended. `plain` is
flash_sample, with the kernel that it chooses itself. All cases of one law and batch size are
interleaved in rounds. With --tensors: a few filters as numbers and as tensors of a number for each
row, one law, and cuBLAS beside them. Beside the CSV lies the environment as JSON.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measuring
import torch
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
AS_TENSORS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9},
    {"top_p": 0.5},
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 50, "top_p": 0.9},
    {"min_p": 0.05},
    {"min_p": 0.05, "top_p": 0.9},
)
"""With --tensors. vLLM's plug-in gives all three as tensors; the third is Qwen3's default."""
MIXED = "0 and 20"
"""As top_k: every other row has one of 20, as tensors."""
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


def tensors(B: int, filters: dict[str, Any]) -> dict[str, Tensor]:
    """All three filters, a number for each row."""
    top_k = torch.full((B,), filters.get("top_k", 0), dtype=torch.int32, device="cuda")
    rest = {name: filters.get(name, off) for name, off in (("top_p", 1.0), ("min_p", 0.0))}
    return {"top_k": top_k} | {n: torch.full((B,), x, device="cuda") for n, x in rest.items()}


def matmul(hidden: Tensor, weight: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    return (hidden @ weight.T)[:, 0]


Case = tuple[str, str, dict[str, Any], dict[str, Any]]
"""Its sampler, how filters are given, the filters as they are named in the table, and as given."""


def cases(B: int, as_tensors: bool) -> list[Case]:
    found: list[Case] = [("plain", "", {}, {})]
    if not as_tensors:
        return found + [("truncated", "numbers", filters, filters) for filters in FILTERS]
    found.append(("matmul", "", {}, {}))
    for filters in AS_TENSORS:
        found.append(("truncated", "numbers", filters, filters))
        found.append(("truncated", "tensors", filters, tensors(B, filters)))
    mixed = tensors(B, {"top_p": 0.9})
    mixed["top_k"][::2] = 20
    return [*found, ("truncated", "tensors", {"top_k": MIXED, "top_p": 0.9}, mixed)]


def measure(law: str, B: int, weight: Tensor, as_tensors: bool) -> Iterator[list[object]]:
    """The rows of one law and batch size."""
    hidden = inputs.make_hidden(Problem(B, D, V, logits=law), 0)
    samplers: dict[str, Any] = {
        "plain": flash_sample,
        "truncated": truncated_sample,
        "matmul": matmul,
    }
    of = cases(B, as_tensors)
    steps = {
        number: measuring.replay(samplers[sampler], hidden, weight, **given)
        for number, (sampler, _, _, given) in enumerate(of)
    }
    timed = measuring.in_rounds(steps, ROUNDS, ITERATIONS)
    for number, (sampler, way, filters, _) in enumerate(of):
        each = timed[number]
        times = [statistics.median([us for one in each for us in one.span_us])]
        times += [
            statistics.mean(
                sum(us for kernel, us in one.kernels.items() if kernel.startswith(names))
                for one in each
            )
            for names in LAUNCHES.values()
        ]
        named = [filters.get("top_k", 0), filters.get("top_p", 1.0), filters.get("min_p", 0.0)]
        yield [law, B, sampler, way, *named, *(f"{us:.1f}" for us in times)]


def table(as_tensors: bool) -> Iterator[list[object]]:
    """Every law and batch size."""
    for law in LAWS[:1] if as_tensors else LAWS:
        weight = inputs.make_weight(Problem(1, D, V, logits=law), 0)
        for B in BATCHES:
            yield from measure(law, B, weight, as_tensors)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Times truncated_sample; see the file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--tensors", action="store_true")
    asked = parser.parse_args()
    header = ["logits", "b", "sampler", "given", "top_k", "top_p", "min_p", "span_us"]
    header += [f"{launch}_us" for launch in LAUNCHES]
    measuring.write(asked.file, header, table(asked.tensors))
