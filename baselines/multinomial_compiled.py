"""Multinomial sampling under torch.compile: the paper's "Multinomial Sampling" (section 4.1).

    tokens = multinomial(softmax(hidden @ weight.T / T))

One compiled graph, matmul included. The compiler fuses cast, division and softmax, while
torch.multinomial stays a library call with its checks (see `multinomial`). Its noise is torch's
generator, so seed and offset are not read.

Undefined rows (a NaN logit, or no finite one): as `multinomial`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.baselines.providing.compiled import compile_step
from fsbench.baselines.providing.logits import Gather, gathering, scaled_logits
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, Shard, padded

if TYPE_CHECKING:
    from torch import Tensor


def build(problem: Problem, weight: Tensor, gather: Gather | None = None) -> Launch:
    import torch

    temperature = problem.temperature
    V, weight = len(weight), padded(weight)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        probs = scaled_logits(hidden, weight, V, temperature, gather).softmax(dim=-1)
        return torch.multinomial(probs, 1).squeeze(1)

    compiled = compile_step(step, weight.new_zeros(problem.B, problem.D), weight)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return compiled(hidden, weight)

    return launch


def build_sharded(problem: Problem, shard: Shard) -> Launch:
    """Gather the logits; the generators of all ranks must be in the same state."""
    return build(problem, shard.weight, gathering(shard))


PROVIDER = Provider(
    name="multinomial_compiled",
    label="Multinomial Sampling",
    kind=Kind.EXACT,
    build=build,
    build_sharded=build_sharded,
    capabilities=Capabilities(
        devices=("cuda", "cpu"),
        dtypes=("bf16", "fp16", "fp32"),
        host_sync_free=True,
        exact_to_gap=10.0,  # of the fast logarithm in torch's exponential: docs/design/exactness.md
        excess_beyond_gap=0.2,
    ),
    presets=("paper", "cpu", "tp"),
)
