"""Exponential race over stored probabilities: vLLM's default sampler, compiled.

    p = softmax(hidden @ weight.T / T),  E_v ~ Exp(1) independent,  token = argmax_v p_v / E_v

E_v / p_v is exponential with rate p_v, and the smallest of independent exponentials is that of v
with probability p_v. It spares torch.multinomial's checks, which makes it the faster way to draw
from stored probabilities in plain torch. The noise is torch's generator: seed and offset are not
read.

Not corrected here, because it is what is deployed: torch's fp32 Exp(1) is never below 2^-24, so no
token gains more than log 2^24 = 16.6 on its logit, and unlikely tokens are drawn too rarely
(docs/exactness.md has how rarely, as measured).

Undefined rows: a NaN logit, or no finite one, makes every probability of the row NaN; argmax then
returns token 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.baselines.providing.compiled import compile_step
from fsbench.baselines.providing.logits import scaled_logits
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider

if TYPE_CHECKING:
    from torch import Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    import torch

    temperature = problem.temperature

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        probs = scaled_logits(hidden, weight, temperature).softmax(dim=-1)
        noise = torch.empty_like(probs).exponential_()
        return probs.div_(noise).argmax(dim=-1)

    compiled = compile_step(step, weight.new_zeros(problem.B, problem.D), weight)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return compiled(hidden, weight)

    return launch


PROVIDER = Provider(
    name="exponential_race",
    label="Exponential race (vLLM)",
    kind=Kind.EXACT,
    build=build,
    capabilities=Capabilities(
        devices=("cuda", "cpu"),
        dtypes=("bf16", "fp16", "fp32"),
        host_sync_free=True,
        exact_to_gap=11.0,
    ),
    presets=("quick", "cpu", "lean"),
)
