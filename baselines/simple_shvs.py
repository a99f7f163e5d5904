"""SIMPLE's ablation, step 4: speculative hot-vocab sampling (section 5.3, equations 6 to 9).

    S_H, S_T = mass of the hot tokens, of all others;  hot if u (S_H + S_T) < S_H, else the tail

The draw is an inverse CDF that begins with the hot tokens, so it is exact for any hot set: the hot
ones settle most rows, and a row whose uniform falls beyond them scans the tail. S_T and the tail's
maximum come from the producer of the logits. On a GPU only the hot logits and these two numbers
per row cross the bus, and then the rows that asked for their tail.

Which tokens are hot is a matter of time only. A Problem has no text to count, so the lowest eighth
of the ids is hot: byte-pair encodings number their merges by frequency. On a CPU the producer is
torch, a further pass over the logits that a fused epilogue would not need.

Undefined rows (a NaN or +inf logit, or no finite one): token -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.baselines.providing.logits import matmul_logits
from fsbench.baselines.providing.simple import able, launch_with, not_built, pinned, ring_dtype
from fsbench.problem import FILTERS, Problem
from fsbench.provider import Kind, Launch, Provider, padded

if TYPE_CHECKING:
    from torch import Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    from fsbench.simple.ring import RingShape
    from fsbench.simple.steps import Controls, Shvs

    B, V, dtype = problem.B, problem.V, ring_dtype(problem)
    step = Shvs(
        B,
        V,
        Controls(problem.temperature, problem.top_k, problem.top_p, problem.min_p),
        hot=max(1, V // 8),
        dtype=dtype,
        buffer=pinned(RingShape(1, B, V, dtype=dtype).bytes(), problem),
    )
    if problem.device == "cuda":
        return _from_gpu(weight, step)

    def draw(seed: Tensor, offset: Tensor) -> Tensor:
        step.supply()
        return step.tokens(seed, offset)

    return launch_with(problem, weight, lambda: step.logits, draw)


def _from_gpu(weight: Tensor, step) -> Launch:  # step: fsbench.simple.steps.Shvs
    """The hot logits first; the rows that need it come again, whole."""
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

        def fetch(rows: Tensor, where: Tensor) -> None:
            where.copy_(logits[rows.to(logits.device)], non_blocking=True)
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
    capabilities=able(batch_invariant=True, filters=FILTERS),
    presets=("cpu",),
)
