"""SIMPLE's ablation, step 4: speculative hot-vocab sampling (section 5.3, equations 6 to 9).

    S_H, S_T = mass of the hot tokens, of all others;  hot if u (S_H + S_T) < S_H, else the tail

The draw is an inverse CDF that begins with the hot tokens, so it is exact for any hot set: the hot
ones settle most rows, and a row whose uniform falls beyond them scans the tail. S_T and the tail's
maximum come from the producer of the logits. On a GPU only the hot logits and these two numbers
per row cross the bus, and then the rows that need their tails.

The choice of hot tokens changes the time only. A Problem has no text to count, so the lowest eighth
of the ids is hot: byte-pair encodings number their merges by frequency. On a CPU the producer is
torch, a further pass over the logits that a fused epilogue would not need.

Undefined rows (a NaN or +inf logit, or no finite one): token -1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fsbench.baselines.providing.logits import matmul_logits
from fsbench.baselines.providing.simple import CAPABILITIES, core_step, launch_with, not_built
from fsbench.problem import FILTERS, Problem
from fsbench.provider import Kind, Launch, Provider, padded

if TYPE_CHECKING:
    from torch import Tensor

    from fsbench.simple.steps import Shvs


def build(problem: Problem, weight: Tensor) -> Launch:
    from fsbench.simple.steps import Shvs

    step = core_step(Shvs, problem, hot=max(1, problem.V // 8))
    if problem.device == "cuda":
        return _from_gpu(weight, step)

    def draw(seed: Tensor, offset: Tensor) -> Tensor:
        step.supply()
        return step.tokens(seed, offset)

    return launch_with(problem, weight, lambda: step.logits, draw)


def _from_gpu(weight: Tensor, step: Shvs) -> Launch:
    """Return a launch that copies the hot logits, then the rows that need their tails, whole."""
    import torch

    from fsbench.simple import reference

    ring, shape, hot, B = step.plane.ring, step.plane.shape, step.hot, step.rows
    V, T = shape.vocab, step.controls.temperature
    counters = torch.empty(2, dtype=torch.int64, pin_memory=True)
    weight = padded(weight)
    flat = ring.logits.view(-1)
    first = flat[: B * hot].view(B, hot)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        logits = matmul_logits(hidden, weight, V).to(ring.logits.dtype)
        if hot < V:
            largest, mass = reference.tail(logits, hot, T)
            ring.tail_max[0].copy_(largest, non_blocking=True)
            ring.tail_sum[0].copy_(mass, non_blocking=True)
        first.copy_(logits[:, :hot], non_blocking=True)
        counters[:1].copy_(seed, non_blocking=True)
        counters[1:].copy_(offset, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        ring.parts["shape"][0] = torch.tensor(shape.hot(hot, hot))

        def fetch(rows: Tensor, out: Tensor) -> None:
            out.copy_(logits[rows.to(logits.device)], non_blocking=True)
            torch.cuda.current_stream().synchronize()

        tokens = step.settled(step.tokens(counters[:1], counters[1:]).clone(), fetch)
        return tokens.to(hidden.device)

    return launch


PROVIDER = Provider(
    name="simple_shvs",
    label="SIMPLE 4: SHVS",
    kind=Kind.EXACT,
    build=build,
    not_built=not_built,
    capabilities=replace(CAPABILITIES, batch_invariant=True, filters=FILTERS),
    presets=("cpu",),
)
