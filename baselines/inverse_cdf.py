"""Inverse-CDF sampling over stored probabilities: the paper's Algorithm A.1, in eager PyTorch.

    p = softmax(hidden @ weight.T / T),  c_i = p_1 + .. + p_i,  token = min {i : c_i > u c_V}

One uniform u per row replaces a random number per token; in return the probabilities are written,
summed and searched in separate passes. The paper's line 8 is min {i : c_i >= u}. It finds no token
if c_V < u, and the first token, whatever its probability, if u = 0. So here u is multiplied by c_V,
which no rounding lifts to c_V, and the comparison is strict. The noise is torch's generator: seed
and offset are not read.

Limits of fp32, for V = 151,936. The numbers are over all 2^24 values of u against float64;
tests/baselines/test_inverse_cdf.py computes them:

- c_i and u are multiples of 2^-24 near 1, and so is every probability. Equal logits are drawn with
  a total variation distance of 0.0022. If probabilities fall as 1 / rank, a token likelier than
  e^-11 is off by up to 0.3 %. Of tokens 18 T below a leading one 75 % are never drawn; the others
  make up for them.
- torch sums in float64 on a CPU and rounds each c_i; a GPU sums blocks of terms in fp32. In the
  worst order, one term after the other from the leading token on, those 16 T below it are drawn
  7.6 % too often, and those 18 T below never.
- Sums of blocks need not grow with i, so on a GPU a token of probability 0 can be drawn.

Undefined rows: a NaN logit, or no finite one, makes every c_i NaN; the result is V, which is not a
token.
"""

from __future__ import annotations

from dataclasses import replace

from fsbench.baselines.providing.logits import STORED, scaled_logits
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Tensor, padded


def build(problem: Problem, weight: Tensor) -> Launch:
    import torch

    weight = padded(weight)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        probs = scaled_logits(hidden, weight, problem.V, problem.temperature).softmax(dim=-1)
        sums = probs.cumsum(dim=-1)
        u = torch.rand(len(hidden), 1, dtype=torch.float32, device=hidden.device)
        return torch.searchsorted(sums, u * sums[:, -1:], right=True).squeeze(1)

    return launch


PROVIDER = Provider(
    name="inverse_cdf",
    label="Inverse CDF",
    kind=Kind.EXACT,
    build=build,
    capabilities=replace(STORED, exact_to_gap=11.0, excess_beyond_gap=0.1),
    presets=("cpu",),
)
