"""The screened sampler where it is easy and where it is hard: candidates, time, and equal tokens.

    python tools/measure_screened.py results/mine/cases.csv

For laws of the logits from flat to one-hot, greedy decoding and heavy masks: graph replay, CUPTI
span, cold L2, interleaved in rounds with cuBLAS's matmul and with the fused kernel's token noise.
Every case also draws STEPS steps by the screened sampler and by flash_sample with token noise, and
counts the tokens that differ. In the end --draws tokens are drawn by both, in many rows of logits
of many spreads; `equality` in the JSON beside the CSV has what was found. The environment is there
too. Columns:

    d, v, b             the shape
    case                law of the logits, and what else is asked for
    time_us             of the screened sampler
    ratio_to_matmul     median over rounds of time_us over that of the matmul; and
    ratio_to_token      over that of flash_sample with the same noise and options
    candidates, most    tokens of a row whose exact logits were computed: mean, and largest
    in_full             draws for which all of the row's logits were
    draws, unequal      drawn by both samplers; tokens that differ
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import measuring
import torch
from torch import Tensor

from fsbench import inputs
from fsbench.kernels import ScreenedHead, flash_sample, prepare_head, screened_sample
from fsbench.kernels.launch.operands import pack_mask
from fsbench.machine.environment import environment
from fsbench.problem import Problem

BATCHES = (1, 16, 64)
SPREADS = (0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 8.0, 16.0)
ROUNDS = 3
ITERATIONS = 9
STEPS = 8
COLUMNS = (
    *("d", "v", "b", "case", "time_us", "ratio_to_matmul", "ratio_to_token"),
    *("candidates", "most", "in_full", "draws", "unequal"),
)
AT_ONCE = 256  # rows of a step of the comparison of many draws


def cases(B: int, D: int, V: int) -> dict[str, tuple[Tensor, dict[str, Any]]]:
    """Hidden states and options by name, for a weight of standard normal numbers."""
    torch.manual_seed(B + D)
    unit = torch.randn(B, D, device="cuda") / D**0.5

    def spread(sigma: float) -> Tensor:
        return (sigma * unit).bfloat16()

    def allowing(share: float) -> Tensor:
        """A mask that allows about this share of the tokens."""
        return pack_mask(torch.rand(B, V, device="cuda") < share)

    found: dict[str, tuple[Tensor, dict[str, Any]]] = {
        f"normal:{sigma:g}": (spread(sigma), {}) for sigma in SPREADS
    }
    return found | {
        "normal:3, T = 0": (spread(3), {"temperature": 0.0}),
        "normal:3, T = 0.5": (spread(3), {"temperature": 0.5}),
        "normal:0.1, T = 0": (spread(0.1), {"temperature": 0.0}),
        "normal:3, 10 % allowed": (spread(3), {"mask": allowing(0.1)}),
        "normal:3, 0.1 % allowed": (spread(3), {"mask": allowing(0.001)}),
    }


def one_hot(B: int, weight: Tensor) -> Tensor:
    """Hidden states along rows of the weight, whose tokens then lie far above all others."""
    rows = torch.arange(B, device="cuda") * 997 % len(weight)
    return (30 * weight[rows].float() / weight[rows].float().norm(dim=1)[:, None]).bfloat16()


def matmul(hidden: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return hidden @ weight.T


def measure(
    name: str, hidden: Tensor, options: dict[str, Any], weight: Tensor, head: ScreenedHead
) -> list[object]:
    """The row of one case."""
    options = {"noise": "token", **options}
    steps = {
        "screened": measuring.replay(screened_sample, hidden, head, **options),
        "matmul": measuring.replay(matmul, hidden, weight),
        "token": measuring.replay(flash_sample, hidden, weight, **options),
    }
    found_times = measuring.in_rounds(steps, ROUNDS, ITERATIONS)
    times = {step: [statistics.median(one.span_us) for one in found_times[step]] for step in steps}
    ratios = [
        statistics.median(a / b for a, b in zip(times["screened"], times[other], strict=True))
        for other in ("matmul", "token")
    ]
    B, (V, D) = len(hidden), weight.shape
    seed, offset = torch.ones(2, 1, dtype=torch.int64, device="cuda")
    found, unequal = [], torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(STEPS):
        sample = screened_sample(hidden, head, seed=seed, offset=offset, **options)
        same = flash_sample(hidden, weight, seed=seed, offset=offset, **options)
        unequal += (sample.tokens != same.tokens).sum()
        assert sample.found is not None
        found.append(sample.found)
        offset += 1
    counts = torch.cat(found)
    few = counts[counts >= 0].float()
    mean, most = (f"{few.mean().item():.1f}", int(few.max())) if len(few) else ("", "")
    return [
        *(D, V, B, name, f"{statistics.median(times['screened']):.1f}"),
        *(f"{ratio:.4f}" for ratio in ratios),
        *(mean, most, int((counts < 0).sum()), B * STEPS, int(unequal)),
    ]


def equality(weight: Tensor, head: ScreenedHead, draws: int) -> dict[str, object]:
    """Draw as many tokens by both samplers, from logits of many spreads at several temperatures."""
    V, D = weight.shape
    cuda = torch.device("cuda")
    unequal = torch.zeros((), dtype=torch.int64, device=cuda)
    in_full = torch.zeros((), dtype=torch.int64, device=cuda)
    T = torch.tensor([1.0, 0.7, 0.3, 1.5], device=cuda).repeat(AT_ONCE // 4)
    offset = torch.zeros(1, dtype=torch.int64, device=cuda)
    seed = torch.tensor([20_261_121], device=cuda)
    begin, done = time.perf_counter(), 0
    while done < draws:
        if done // AT_ONCE % 64 == 0:  # other logits
            sigma = 0.1 * 160 ** torch.rand(AT_ONCE, 1, device=cuda)
            hidden = (torch.randn(AT_ONCE, D, device=cuda) * sigma / D**0.5).bfloat16()
        options: dict[str, Any] = {"seed": seed, "offset": offset, "noise": "token"}
        sample = screened_sample(hidden, head, temperature=T, **options)
        same = flash_sample(hidden, weight, temperature=T, **options)
        unequal += (sample.tokens != same.tokens).sum()
        assert sample.found is not None
        in_full += (sample.found < 0).sum()
        offset += 1
        done += AT_ONCE
    return {
        "D": D,
        "V": V,
        "draws": done,
        "unequal": int(unequal),
        "in_full": int(in_full),
        "logits": "normal, standard deviations from 0.1 to 16, evenly in the logarithm",
        "temperatures": [1.0, 0.7, 0.3, 1.5],
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("path", type=Path, help="CSV file to write")
    parser.add_argument("--draws", type=int, default=10_000_000, help="drawn by both samplers")
    parser.add_argument("--no-cases", action="store_true", help="only the draws of --draws")
    arguments = parser.parse_args()
    path: Path = arguments.path
    path.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"equality": [], "prepare_s": {}}
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for D, V in measuring.PAPER_SHAPES:
            weight = inputs.make_weight(Problem(1, D, V, logits=f"normal:{D**0.5}"), 0)
            prepare_head(weight[:1024])
            torch.cuda.synchronize()
            begin = time.perf_counter()
            head = prepare_head(weight)
            torch.cuda.synchronize()
            record["prepare_s"][f"{D} x {V}"] = round(time.perf_counter() - begin, 3)
            for B in () if arguments.no_cases else BATCHES:
                todo = cases(B, D, V)
                todo["one-hot"] = (one_hot(B, weight), {})
                for name, (hidden, options) in todo.items():
                    row = measure(name, hidden, options, weight, head)
                    writer.writerow(row)
                    file.flush()
                    print(*row, flush=True)
            if arguments.draws and D == 4096:
                record["equality"].append(equality(weight, head, arguments.draws))
                print(record["equality"][-1], flush=True)
            del weight, head
    record["environment"] = environment("cuda", sys.argv)
    path.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"{path}, measured on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
