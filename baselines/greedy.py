"""Greedy decoding: matmul, then argmax. The cost of exact sampling if it needed no noise.

Temperature, seed and offset are not read. Equal logits, common once rounded to bf16, go to
whichever torch.argmax meets first (the lowest token on a CPU).

Undefined rows: torch.argmax takes NaN for the largest, so a row with NaN logits returns the
first of them; a row of -inf only returns token 0.
"""

from __future__ import annotations

from dataclasses import replace

from fsbench.baselines.providing.logits import STORED, matmul_logits
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Tensor, padded


def build(problem: Problem, weight: Tensor) -> Launch:
    weight = padded(weight)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return matmul_logits(hidden, weight, problem.V).argmax(dim=-1)

    return launch


PROVIDER = Provider(
    name="greedy",
    label="Greedy (matmul + argmax)",
    kind=Kind.GREEDY,
    build=build,
    capabilities=replace(STORED, zero_temperature=True, batch_invariant=True),
    presets=("cpu", "lean"),
)
