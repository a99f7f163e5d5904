"""Count the candidates that two screens of an LM head leave, on a CPU; writes CSV.

    python tools/compare_screens.py results/screen/bounds.csv

`int8` is the copy of fsbench's screened head, with its bound (kernels/screened/bounds.py). `fp8` is
the copy of vLLM's screened greedy head (vllm/v1/worker/gpu/sample/screened_head.py), e4m3 with a
scale per row, and its bound: with W8 the copy and gamma the error of a sum of D products in fp32,

    |logit - copy's logit| <= |h| (|W - W8| + gamma |W| + (gamma + 2^-23) |W8|) (1 + 4 gamma)

vLLM's is greedy only: at T = 1 its bound is used as fsbench would. Weight and hidden are normal;
hidden is scaled to the standard deviation of the logits. The file next to the CSV has the
environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from write_csv import write_csv

from fsbench.kernels import prepare_head
from fsbench.kernels.screened.bounds import candidates, screen_hidden, screen_logits
from fsbench.reference.noise import token_noise

COLUMNS = ("D", "V", "rows", "sigma", "temperature", "copy", "bound", "candidates", "most")
SIGMAS = (1.0, 2.0, 3.0, 4.0)
SEED, ROWS, CHUNK = 0, 16, 4096
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def fp8_screen(weight: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return (logits of the fp8 copy, their bound), fp64 [B, V]."""
    D = weight.shape[1]
    gamma = D * 2.0**-24 / (1 - D * 2.0**-24)
    x = hidden.double()
    logits, errors = [], []
    for part in weight.split(CHUNK):
        w = part.double()
        scale = part.float().abs().amax(1, keepdim=True) / LARGEST
        copy = (part.float() / scale).to(torch.float8_e4m3fn).double() * scale.double()
        logits.append(x @ copy.T)
        error = (w - copy).norm(dim=1) + gamma * w.norm(dim=1)
        errors.append((error + (gamma + 2.0**-23) * copy.norm(dim=1)) * (1 + 4 * gamma))
    return torch.cat(logits, 1), x.norm(dim=1, keepdim=True) * torch.cat(errors)


def rows_of(D: int, V: int) -> Iterator[tuple[object, ...]]:
    """Yield the rows of the CSV for a head of normal numbers."""
    generator = torch.Generator().manual_seed(SEED)
    weight = torch.empty(V, D, dtype=torch.bfloat16)
    for part in weight.split(CHUNK):
        part.copy_(torch.randn(part.shape, generator=generator) / D**0.5)
    directions = torch.randn(ROWS, D, generator=generator)
    zero = torch.zeros(1, dtype=torch.int64)
    noise = token_noise(V, zero, zero, torch.arange(ROWS))
    head = prepare_head(weight)
    screens: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
        "int8": lambda hidden: screen_logits(head, screen_hidden(hidden)),
        "fp8": lambda hidden: fp8_screen(weight, hidden),
    }
    for sigma in SIGMAS:
        hidden = (sigma * directions).bfloat16()
        for copy, screen in screens.items():
            logits, bound = screen(hidden)
            for T in (0.0, 1.0):
                scores = logits + T * noise
                each = candidates(scores - bound, scores + bound).sum(1)
                mean, most = each.double().mean().item(), each.max().item()
                sizes = (f"{bound.mean().item():.3g}", f"{mean:.1f}", most)
                yield (D, V, ROWS, sigma, T, copy, *sizes)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Count the candidates that two screens leave.")
    parser.add_argument("csv", type=Path)
    parser.add_argument("--d", type=int, default=4096)
    parser.add_argument("--v", type=int, default=151_936)
    options = parser.parse_args(arguments)
    write_csv(options.csv, COLUMNS, rows_of(options.d, options.v), "cpu")


if __name__ == "__main__":
    main()
