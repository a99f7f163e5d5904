"""SIMPLE's ablation, step 3: the decision plane in C++ (section 5.2), every row scanned whole.

    token = first v whose running sum of exp((logits_v - max) / T) exceeds u times the total

One vectorized pass over the row by blocks, from the cache; then one block is read again to find the
token. Filters act before any softmax. Penalties as sparse edits are the same code (fsbench.simple),
which keeps them from step to step; a Problem's are of one step.

Undefined rows (a NaN or +inf logit, or no finite one): token -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.baselines.providing.simple import able, launch_with, not_built, pinned, ring_dtype
from fsbench.problem import FILTERS, Problem
from fsbench.provider import Kind, Launch, Provider

if TYPE_CHECKING:
    from torch import Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    from fsbench.simple.ring import RingShape
    from fsbench.simple.steps import Controls, Offload

    B, V, dtype = problem.B, problem.V, ring_dtype(problem)
    step = Offload(
        B,
        V,
        Controls(problem.temperature, problem.top_k, problem.top_p, problem.min_p),
        dtype=dtype,
        buffer=pinned(RingShape(1, B, V, dtype=dtype).bytes(), problem),
    )
    return launch_with(problem, weight, lambda: step.logits, step.tokens)


PROVIDER = Provider(
    name="simple_offload",
    label="SIMPLE 3: offloaded",
    kind=Kind.EXACT,
    build=build,
    not_built=not_built,
    capabilities=able(batch_invariant=True, filters=FILTERS),
    presets=("cpu",),
)
