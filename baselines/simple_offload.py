"""SIMPLE's ablation, step 3: the decision plane in C++ (section 5.2), every row scanned whole.

    token = first v whose running sum of exp((logits_v - max) / T) exceeds u times the total

One vectorized pass over the row by blocks, from the cache; then one block is read again to find the
token. Filters act before any softmax. Penalties are sparse edits (fsbench.simple), which it keeps
from step to step; those of a Problem have one step.

Undefined rows (a NaN or +inf logit, or no finite one): token -1.
"""

from __future__ import annotations

from dataclasses import replace

from fsbench.baselines.providing.simple import CAPABILITIES, core_step, launch_with, not_built
from fsbench.problem import FILTERS, Problem
from fsbench.provider import Kind, Launch, Provider, Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    from fsbench.simple.steps import Offload

    step = core_step(Offload, problem)
    return launch_with(problem, weight, lambda: step.logits, step.tokens)


PROVIDER = Provider(
    name="simple_offload",
    label="SIMPLE 3: offloaded",
    kind=Kind.EXACT,
    build=build,
    not_built=not_built,
    capabilities=replace(CAPABILITIES, batch_invariant=True, filters=FILTERS),
    presets=("cpu",),
)
