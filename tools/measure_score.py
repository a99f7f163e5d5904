"""Times `score`, what it can return besides, and its gradient; writes CSV.

    python tools/measure_score.py results/h200/score-parts/parts.csv

On a GPU; eager, CUPTI span, cold L2, in rounds. On a CPU it is a test of everything but the times.
hidden and weight are bf16 and have gradients where something is trained. Columns:

    d, v, b     the shape
    what        product: of hidden and weight, stored in bf16. products: that and the two that the
                gradients need. score, and with what it returns or has besides. trained: score,
                summed up, and backward. chunked: cross_entropy of 1024 rows at a time, fp32
                logits, each chunk backward at once, as trainers save memory
    time_us     from the first kernel to the last, median over rounds: with the gaps in which the
                GPU waits for the host, as a trainer has them
    busy_us     the same without the gaps; compare score's options by it. Empty on a CPU
    extra_mb    the most memory beside inputs and the gradients that stay; those of products do not
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import measuring
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fsbench import inputs
from fsbench.kernels import score
from fsbench.problem import Problem
from fsbench.timers import make_timer
from fsbench.timers.measurement import Measurement

COLUMNS = ("d", "v", "b", "what", "time_us", "busy_us", "extra_mb")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {
    (4096, 151_936): (1, 64, 256, 1024, 4096, 16_384),
    (4096, 248_320): (40,),
}
"""(D, V) -> B."""
TARGETS = 4
CHUNK = 1024
ROUNDS, ITERATIONS = 3, 3


def ways(hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Callable[[], Any]]:
    """What is timed. targets: int64 [B, TARGETS]."""
    first = targets[:, 0].contiguous()
    scored = partial(score, hidden.detach(), weight.detach())

    def product() -> Tensor:
        return hidden.detach() @ weight.detach().T

    def products() -> None:
        d = product()
        d @ weight.detach()
        d.T @ hidden.detach()

    def trained() -> None:
        score(hidden, weight, first).logprob.sum().backward()

    def chunked() -> None:
        for rows, of_rows in zip(hidden.split(CHUNK), first.split(CHUNK), strict=True):
            cross_entropy((rows @ weight.T).float(), of_rows, reduction="sum").backward()

    return {
        "product": product,
        "score": partial(scored, first),
        "score, entropy": partial(scored, first, return_entropy=True),
        "score, rank": partial(scored, first, return_rank=True),
        f"score, {TARGETS} targets": partial(scored, targets),
        "products": products,
        "trained": trained,
        "chunked": chunked,
    }


def extra_bytes(step: Callable[[], Any], leaves: tuple[Tensor, ...]) -> int:
    """Memory of a step beside what was there and the gradients that it leaves; 0 on a CPU."""
    if DEVICE == "cpu":
        return 0
    forget(leaves)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before
    return most - sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)


def forget(leaves: tuple[Tensor, ...]) -> None:
    """Drop the gradients."""
    for leaf in leaves:
        leaf.grad = None


def middle(rounds: list[list[float]]) -> str:
    """The median over rounds of each round's median, to 0.1; empty if nothing was measured."""
    return f"{statistics.median(map(statistics.median, rounds)):.1f}" if all(rounds) else ""


def table() -> Iterator[list[object]]:
    """The rows of every shape and batch size."""
    timer = make_timer("auto", DEVICE)
    for (D, V), batches in SHAPES.items():
        weight = inputs.make_weight(Problem(1, D, V, device=DEVICE), 0).requires_grad_()
        for B in batches:
            hidden = inputs.make_hidden(Problem(B, D, V, device=DEVICE), 0).requires_grad_()
            leaves = (hidden, weight)
            targets = torch.randint(0, V, (B, TARGETS), device=DEVICE)
            steps = ways(hidden, weight, targets)
            for step in steps.values():  # compiles
                step()
            found: dict[str, list[Measurement]] = {what: [] for what in steps}
            for _ in range(ROUNDS):
                for what, step in steps.items():
                    one = timer.measure(step, ITERATIONS, partial(forget, leaves))
                    found[what].append(one)
            for what, step in steps.items():
                time = middle([one.span_us for one in found[what]])
                busy = middle([one.busy_us for one in found[what]])
                yield [D, V, B, what, time, busy, f"{extra_bytes(step, leaves) / 1e6:.1f}"]


if __name__ == "__main__":
    measuring.write(Path(sys.argv[1]), COLUMNS, table(), DEVICE)
