"""Exponential race over stored probabilities: vLLM's default sampler, compiled.

    p = softmax(hidden @ weight.T / T),  E_v ~ Exp(1) independent,  token = argmax_v p_v / E_v

E_v / p_v is exponential with rate p_v, and the smallest of independent exponentials is that of v
with probability p_v. It omits torch.multinomial's checks, so it is the faster way to draw
from stored probabilities in plain torch. The noise is torch's generator: seed and offset are not
read.

Not corrected here, because engines run it so: torch's fp32 Exp(1) is never below 2^-24, so no
logit gains more than log 2^24 = 16.6, and unlikely tokens are drawn too rarely
(docs/design/exactness.md has how rarely, as measured).

Undefined rows: a NaN logit, or no finite one, makes every probability of the row NaN; argmax then
returns token 0.
"""

from __future__ import annotations

from dataclasses import replace

from fsbench.baselines.providing.compiled import build_race
from fsbench.baselines.providing.logits import STORED
from fsbench.provider import Kind, Provider

PROVIDER = Provider(
    name="exponential_race",
    label="Exponential race (vLLM)",
    kind=Kind.EXACT,
    build=build_race,
    capabilities=replace(STORED, exact_to_gap=11.0),
    presets=("quick", "cpu", "lean"),
)
