"""SIMPLE's ablation, step 1: the engine's sampler moved to the CPU unchanged ("vLLM CPU").

    p = softmax(hidden @ weight.T / T),  E_v ~ Exp(1) independent,  token = argmax_v p_v / E_v

Each operation is a pass over [B, V] in torch, with torch's threads; the noise is torch's generator,
so seed and offset are not read, and it ends where that of `exponential_race` ends.

On CPUs only: with logits from a GPU a verification would take hours and show nothing else.

Undefined rows (a NaN or +inf logit, or no finite one): token -1.
"""

from __future__ import annotations

from dataclasses import replace

from fsbench.baselines.providing.simple import CAPABILITIES, launch_with
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    from fsbench.simple.steps import FullV

    step = FullV(problem.B, problem.V, problem.temperature)
    return launch_with(problem, weight, lambda: step.logits, step.tokens)


PROVIDER = Provider(
    name="simple_full_v",
    label="SIMPLE 1: full-V port",
    kind=Kind.EXACT,
    build=build,
    capabilities=replace(CAPABILITIES, devices=("cpu",), exact_to_gap=11.0),
    presets=("cpu",),
)
