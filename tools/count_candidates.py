"""Count the candidates of the screen, and compare the tokens of screened_sample and flash_sample.

    python tools/count_candidates.py results/mine/draws.csv

Every case draws STEPS steps with both samplers, for logits from flat to one-hot, greedy decoding
and masks that forbid most tokens. At the end both draw --draws tokens from logits of many spreads:
`equality` in the JSON file next to the CSV. The jobs screened-cases and screened-masks of
tools/record.toml measure times. Columns:

    d, v, b             the shape
    case                distribution of the logits, and options
    candidates, most    tokens per row whose exact logits were computed: mean and maximum
    in_full             draws for which all logits of the row were computed
    draws, unequal      number drawn by both samplers, and of those that differ
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsbench import inputs
from fsbench.kernels import ScreenedHead, flash_sample, prepare_head, screened_sample
from fsbench.kernels.launch.operands import pack_mask
from fsbench.machine.environment import environment
from fsbench.problem import Problem

SHAPES = ((4096, 151936), (8192, 128256))
"""(D, V)."""
BATCHES = (1, 16, 64)
SPREADS = (0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 8.0, 16.0)
STEPS = 8
COLUMNS = ("d", "v", "b", "case", "candidates", "most", "in_full", "draws", "unequal")
AT_ONCE = 256  # rows of a step of the comparison of many draws
TEMPERATURES = (1.0, 0.7, 0.3, 1.5)

Case = tuple[str, Tensor, dict[str, Any]]
"""Name, hidden states, options."""


def cases(B: int, weight: Tensor) -> Iterator[Case]:
    """Hidden states and options, for a weight [V, D] of standard normal numbers."""
    V, D = weight.shape
    torch.manual_seed(B + D)
    unit = torch.randn(B, D, device=weight.device) / D**0.5
    for sigma in SPREADS:
        yield f"normal:{sigma:g}", (sigma * unit).to(weight.dtype), {}
    wide = (3 * unit).to(weight.dtype)
    yield "normal:3, T = 0", wide, {"temperature": 0.0}
    yield "normal:3, T = 0.5", wide, {"temperature": 0.5}
    yield "normal:0.1, T = 0", (0.1 * unit).to(weight.dtype), {"temperature": 0.0}
    for share in (0.1, 0.001):
        allowed = torch.rand(B, V, device=weight.device) < share
        yield f"normal:3, {share:.1%} allowed", wide, {"mask": pack_mask(allowed)}
    # Parallel to rows of the weight: the logits of these tokens are far above all others.
    rows = weight[torch.arange(B, device=weight.device) * 997 % V].float()
    yield "one-hot", (30 * rows / rows.norm(dim=1)[:, None]).to(weight.dtype), {}


def both(hidden: Tensor, head: ScreenedHead, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the candidates of each row (-1: computed in full), and the number of differences."""
    sample = screened_sample(hidden, head, noise="token", **options)
    same = flash_sample(hidden, head.weight, noise="token", **options)
    assert sample.found is not None
    return sample.found, (sample.tokens != same.tokens).sum()


def count(hidden: Tensor, head: ScreenedHead, options: dict[str, Any]) -> list[object]:
    """Return the columns of one case from `candidates` on."""
    seed, offset = torch.ones(2, 1, dtype=torch.int64, device=hidden.device)
    drawn = [both(hidden, head, seed=seed, offset=offset + n, **options) for n in range(STEPS)]
    counts, unequal = torch.cat([n for n, _ in drawn]), sum(int(n) for _, n in drawn)
    few = counts[counts >= 0].float()
    mean, most = (f"{few.mean().item():.1f}", int(few.max())) if len(few) else ("", "")
    return [mean, most, int((counts < 0).sum()), len(counts), unequal]


def equality(head: ScreenedHead, draws: int) -> dict[str, object]:
    """Draw `draws` tokens with both samplers, at several temperatures."""
    (V, D), device = head.weight.shape, head.weight.device
    unequal, in_full = torch.zeros(2, dtype=torch.int64, device=device)
    T = torch.tensor(TEMPERATURES, device=device).repeat(AT_ONCE // len(TEMPERATURES))
    offset = torch.zeros(1, dtype=torch.int64, device=device)
    seed = torch.tensor([20_261_121], device=device)
    begin, done = time.perf_counter(), 0
    while done < draws:
        if done // AT_ONCE % 64 == 0:  # other logits
            sigma = 0.1 * 160 ** torch.rand(AT_ONCE, 1, device=device)
            unit = torch.randn(AT_ONCE, D, device=device) / D**0.5
            hidden = (sigma * unit).to(head.weight.dtype)
        candidates, differ = both(hidden, head, temperature=T, seed=seed, offset=offset)
        unequal += differ
        in_full += (candidates < 0).sum()
        offset += 1
        done += AT_ONCE
    return {
        "D": D,
        "V": V,
        "draws": done,
        "unequal": int(unequal),
        "in_full": int(in_full),
        "logits": "normal, standard deviations from 0.1 to 16, evenly in the logarithm",
        "temperatures": list(TEMPERATURES),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main(arguments: list[str] | None = None) -> None:
    """Write the CSV file, and the JSON file next to it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("path", type=Path, help="CSV file to write")
    parser.add_argument("--draws", type=int, default=10_000_000, help="drawn by both samplers")
    args = parser.parse_args(arguments)
    args.path.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"equality": [], "prepare_s": {}}
    with args.path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for D, V in SHAPES:
            weight = inputs.make_weight(Problem(1, D, V, logits=f"normal:{D**0.5}"), 0)
            prepare_head(weight[:1024])
            torch.cuda.synchronize()
            begin = time.perf_counter()
            head = prepare_head(weight)
            torch.cuda.synchronize()
            record["prepare_s"][f"{D} x {V}"] = round(time.perf_counter() - begin, 3)
            for B in BATCHES:
                for name, hidden, options in cases(B, weight):
                    writer.writerow([D, V, B, name, *count(hidden, head, options)])
                    file.flush()
            if args.draws and SHAPES[0][0] == D:
                record["equality"].append(equality(head, args.draws))
    record["environment"] = environment("cuda", sys.argv)
    args.path.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
