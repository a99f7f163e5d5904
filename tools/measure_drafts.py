"""Times the draft step's head and draw, and a verify step, beside what an engine does; writes CSV.

    python tools/measure_drafts.py results/h200/drafts/drafts.csv

On a GPU; graph replay, CUPTI span, cold L2, interleaved in rounds; all kernels are compiled first,
in parallel. On a CPU it is a test of everything but the times. Columns:

    d, v, b     the shape; logits have a standard deviation of 3
    what        matmul, argmax: cuBLAS to bf16 logits and torch's argmax; one pass: and our one pass
                over them. Then drafts, greedy and sampled (T = 1, token noise): bf16, int8 and fp8
                of flash_sample, screened of screened_sample; reduced: draft_sample from the first
                REDUCED rows, as a weight or screened. With DRAFTS + 1 rows of each request of the
                largest batch: step, a plain step with as many rows, and verify, step_noise, the
                same draw and verify_drafts, with token noise (and group noise)
    time_us     median over rounds
    ratio       to matmul, argmax of as many rows; median over rounds
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import measuring
import torch
from torch import Tensor

from fsbench import inputs
from fsbench.kernels import (
    draft_sample,
    flash_sample,
    prepare_draft_vocabulary,
    prepare_head,
    quantise_head,
    screened_sample,
    step_noise,
    verify_drafts,
)
from fsbench.kernels.gumbel_argmax import gumbel_argmax
from fsbench.problem import Problem

COLUMNS = ("d", "v", "b", "what", "time_us", "ratio")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((4096, 151_936), (4096, 128_256))
BATCHES = (1, 4, 16)
REDUCED = 32_768
DRAFTS = 3
ROUNDS, ITERATIONS = 5, 15
BASE = "matmul, argmax"

Step = tuple[Callable[..., Any], object]
"""What measuring.replay takes: a sampler and its head."""


def argmax(hidden: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return (hidden @ weight.T).argmax(1)


def one_pass(hidden: Tensor, weight: Tensor, *, seed: Tensor, offset: Tensor) -> Tensor:
    return gumbel_argmax(hidden @ weight.T, seed, offset, 0.0)


def draft_steps(weight: Tensor) -> dict[str, Step]:
    """What proposes tokens, by name."""
    V = len(weight)
    ids = torch.randperm(V, device=weight.device)[: min(REDUCED, V)].contiguous()
    reduced = partial(draft_sample, vocabulary=prepare_draft_vocabulary(ids, V))
    rows = weight[: len(ids)]
    of_weight = partial(flash_sample, noise="token")
    samplers: dict[str, tuple[Callable[..., Any], object]] = {
        "bf16": (of_weight, weight),
        "screened": (screened_sample, prepare_head(weight)),
        "int8": (of_weight, quantise_head(weight, torch.int8)),
        "fp8": (of_weight, quantise_head(weight, torch.float8_e4m3fn)),
        "reduced": (reduced, rows),
        "reduced, screened": (reduced, prepare_head(rows)),
    }
    found: dict[str, Step] = {BASE: (argmax, weight), "matmul, one pass": (one_pass, weight)}
    for name, (sample, head) in samplers.items():
        found[f"{name}, greedy"] = (partial(sample, temperature=0.0), head)
        found[f"{name}, sampled"] = (sample, head)
    return found


def verify_steps(weight: Tensor, B: int) -> dict[str, Step]:
    """What looks at the drafts of B requests, and a plain step with as many rows."""
    rows, device = B * (DRAFTS + 1), weight.device
    seeds, drafts = torch.arange(B, device=device), torch.zeros(B, DRAFTS, device=device).long()
    of_rows = torch.arange(rows, device=device)

    def plain(hidden: Tensor, weight: Tensor, *, noise: str, **_: Any) -> Tensor:
        return flash_sample(hidden, weight, seed=of_rows, offset=of_rows, noise=noise).tokens

    def verified(hidden: Tensor, weight: Tensor, *, noise: str, **_: Any) -> Tensor:
        seed, offset = step_noise(seeds, seeds, DRAFTS)
        drawn = flash_sample(hidden, weight, seed=seed, offset=offset, noise=noise)
        return verify_drafts(drawn.tokens, drafts).tokens

    found: dict[str, Step] = {BASE: (argmax, weight)}
    for told, noise in {"": "token", ", group noise": "group"}.items():
        found[f"step{told}"] = (partial(plain, noise=noise), weight)
        found[f"verify{told}"] = (partial(verified, noise=noise), weight)
    return found


def all_steps(weight: Tensor) -> dict[int, dict[str, Step]]:
    """Everything that is timed, by rows."""
    drafts, most = draft_steps(weight), max(BATCHES)
    return dict.fromkeys(BATCHES, drafts) | {most * (DRAFTS + 1): verify_steps(weight, most)}


def compile_step(B: int, what: str) -> None:
    """Compile one step into Triton's cache, by a small launch."""
    problem = Problem(B, 256, 1024)
    sample, head = all_steps(inputs.make_weight(problem, 0))[B][what]
    zero = torch.zeros(1, dtype=torch.int64, device="cuda")
    sample(inputs.make_hidden(problem, 0), head, seed=zero, offset=zero)
    torch.cuda.synchronize()


def compile_all() -> None:
    """Compile every step, on all cores."""
    small = inputs.make_weight(Problem(1, 256, 1024), 0)
    todo = [(B, what) for B, steps in all_steps(small).items() for what in steps]
    workers = max(1, (os.cpu_count() or 2) - 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_step, *zip(*todo, strict=True)))


def measure(D: int, V: int) -> Iterator[list[object]]:
    """The rows of one shape."""
    weight = inputs.make_weight(Problem(1, D, V, device=DEVICE, logits="normal:3"), 0)
    for B, steps in all_steps(weight).items():
        hidden = inputs.make_hidden(Problem(B, D, V, device=DEVICE, logits="normal:3"), 0)
        graphs = {
            what: measuring.replay(sample, hidden, head) for what, (sample, head) in steps.items()
        }
        found = measuring.in_rounds(graphs, ROUNDS, ITERATIONS)
        times = {what: [statistics.median(x.span_us) for x in found[what]] for what in steps}
        for what, own in times.items():
            ratio = statistics.median(a / b for a, b in zip(own, times[BASE], strict=True))
            yield [D, V, B, what, f"{statistics.median(own):.1f}", f"{ratio:.4f}"]


def table() -> Iterator[list[object]]:
    """Every shape, with all kernels compiled."""
    if DEVICE == "cuda":
        compile_all()
    for D, V in SHAPES:
        yield from measure(D, V)


if __name__ == "__main__":
    measuring.write(Path(sys.argv[1]), COLUMNS, table(), DEVICE)
