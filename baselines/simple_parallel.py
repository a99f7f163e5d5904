"""SIMPLE's ablation, step 2: rows split over persistent samplers (section 5.1), still in torch.

    p = softmax(hidden @ weight.T / T),  token = first v whose running sum of p exceeds u

Each sampler does for its block of rows what `simple_full_v` does, on one thread. The uniforms are
drawn before, by row and step, so a fixed seed gives the same tokens for any number of samplers.

Undefined rows (a NaN or +inf logit, or no finite one): token -1.
"""

from __future__ import annotations

from dataclasses import replace

from fsbench.baselines.providing.simple import CAPABILITIES, launch_with, not_built
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    from fsbench.simple.steps import Parallel

    step = Parallel(problem.B, problem.V, problem.temperature)
    return launch_with(problem, weight, lambda: step.logits, step.tokens)


PROVIDER = Provider(
    name="simple_parallel",
    label="SIMPLE 2: sequence-parallel",
    kind=Kind.EXACT,
    build=build,
    not_built=not_built,  # the core draws the uniforms
    capabilities=replace(CAPABILITIES, devices=("cpu",), batch_invariant=True),
    presets=("cpu",),
)
