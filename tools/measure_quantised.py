"""Times flash_sample from int8 and fp8 heads beside what else draws from them; writes CSV.

    python tools/measure_quantised.py results/h200/quantised/heads.csv

Graph replay, CUPTI span, cold L2, interleaved in rounds. Columns:

    d, v, b             the shape; logits have a standard deviation of 3
    sampler             matmul: in bf16, no token. bf16: flash_sample from the same numbers in bf16.
                        int8, fp8: flash_sample from the head. scaled_fp8, scaled_int8: hidden is
                        rounded to one byte row by row, torch's scaled or integer matmul stores bf16
                        logits, and one pass over these draws (gumbel_argmax); compiled by torch
    time_us             median over rounds
    ratio_to_matmul     median over rounds
    draws, unequal      tokens of int8 and fp8 in STEPS steps; those that differ from bf16's

Scales are powers of two, so that bf16 has the head's numbers exactly and tokens must be the same.
The two rivals draw from other logits: those of a rounded hidden state, in 8 bits of mantissa.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measuring
import torch
from torch import Tensor

from fsbench import inputs
from fsbench.kernels import QuantisedHead, flash_sample, quantise_head
from fsbench.kernels.gumbel_argmax import gumbel_argmax
from fsbench.problem import Problem

BATCHES = (1, 16, 32, 64, 128, 256)
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ROUNDS = 5
ITERATIONS = 9
STEPS = 64


def matmul(hidden: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return hidden @ weight.T


@torch.compile(dynamic=False)
def scaled_fp8(hidden: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """bf16 logits of hidden rounded to e4m3."""
    steps = hidden.abs().amax(1, keepdim=True).float() / 448
    rounded = (hidden / steps).clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch._scaled_mm(
        rounded, weight.T, scale_a=steps, scale_b=scale[None], out_dtype=torch.bfloat16
    )


@torch.compile(dynamic=False)
def scaled_int8(hidden: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """bf16 logits of hidden rounded to int8."""
    B = len(hidden)
    steps = hidden.abs().amax(1, keepdim=True).float() / 127
    rounded = (hidden / steps).round().to(torch.int8)
    padded = torch.nn.functional.pad(rounded, (0, 0, 0, max(0, 32 - B)))  # it takes no fewer rows
    return (torch._int_mm(padded, weight.T)[:B] * steps * scale).bfloat16()


def stored(logits_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A sampler that stores logits."""

    def sample(hidden: Tensor, head: QuantisedHead, *, seed: Tensor, offset: Tensor) -> Tensor:
        return gumbel_argmax(logits_of(hidden, head.weight, head.scale), seed, offset, 1.0)

    return sample


def exact_head(weight: Tensor, dtype: torch.dtype) -> tuple[QuantisedHead, Tensor]:
    """A head whose scales are powers of two, and a bf16 weight of the same numbers."""
    head = quantise_head(weight, dtype)
    head.scale.copy_(head.scale.log2().round().exp2())
    return head, head.weight.bfloat16() * head.scale.bfloat16()[:, None]


def unequal(hidden: Tensor, head: QuantisedHead, exact: Tensor) -> int:
    """Tokens that differ between a head and a weight of the same numbers, in STEPS steps."""
    seed, offset = torch.ones(2, 1, dtype=torch.int64, device="cuda")
    found = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(STEPS):
        pair = [flash_sample(hidden, w, seed=seed, offset=offset).tokens for w in (head, exact)]
        found += (pair[0] != pair[1]).sum()
        offset += 1
    return int(found)


def table() -> Iterator[list[object]]:
    """Every shape and batch size."""
    for D, V in measuring.PAPER_SHAPES:
        weight = inputs.make_weight(Problem(1, D, V, logits="normal:3"), 0)
        heads = {name: exact_head(weight, dtype) for name, dtype in DTYPES.items()}
        for B in BATCHES:
            hidden = inputs.make_hidden(Problem(B, D, V, logits="normal:3"), 0)
            samplers: dict[str, tuple[Callable[..., Any], object]] = {
                "matmul": (matmul, weight),
                "bf16": (flash_sample, weight),
                "int8": (flash_sample, heads["int8"][0]),
                "fp8": (flash_sample, heads["fp8"][0]),
                "scaled_int8": (stored(scaled_int8), heads["int8"][0]),
                "scaled_fp8": (stored(scaled_fp8), heads["fp8"][0]),
            }
            steps = {
                name: measuring.replay(sample, hidden, head)
                for name, (sample, head) in samplers.items()
            }
            found = measuring.in_rounds(steps, ROUNDS, ITERATIONS)
            times = {
                name: [statistics.median(one.span_us) for one in found[name]] for name in steps
            }
            for name, each in times.items():
                ratio = statistics.median(a / b for a, b in zip(each, times["matmul"], strict=True))
                drawn = [STEPS * B, unequal(hidden, *heads[name])] if name in heads else ["", ""]
                yield [D, V, B, name, f"{statistics.median(each):.1f}", f"{ratio:.4f}", *drawn]


if __name__ == "__main__":
    header = ["d", "v", "b", "sampler", "time_us", "ratio_to_matmul", "draws", "unequal"]
    measuring.write(Path(sys.argv[1]), header, table())
