"""Multinomial sampling under torch.compile: the paper's "Multinomial Sampling" (section 4.1).

    tokens = multinomial(softmax(hidden @ weight.T / T))

One compiled graph, matmul included. The compiler fuses cast, division and softmax, while
torch.multinomial stays a library call with its checks (see `multinomial`). Its noise is torch's
generator, so seed and offset are not read.

Undefined rows (a NaN logit, or no finite one): as `multinomial`.
"""

from __future__ import annotations

from fsbench.baselines.providing.compiled import build_compiled
from fsbench.baselines.providing.logits import TORCH_NOISE, Gather, gathering, scaled_logits
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Shard, Tensor, padded


def build(problem: Problem, weight: Tensor, gather: Gather | None = None) -> Launch:
    import torch

    V, temperature = len(weight), problem.temperature

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        probs = scaled_logits(hidden, weight, V, temperature, gather).softmax(dim=-1)
        return torch.multinomial(probs, 1).squeeze(1)

    return build_compiled(problem, padded(weight), step)


def build_sharded(problem: Problem, shard: Shard) -> Launch:
    """Gather the logits; the generators of all ranks must be in the same state."""
    return build(problem, shard.weight, gathering(shard))


PROVIDER = Provider(
    name="multinomial_compiled",
    label="Multinomial Sampling",
    kind=Kind.EXACT,
    build=build,
    build_sharded=build_sharded,
    capabilities=TORCH_NOISE,
    presets=("paper", "cpu", "tp"),
)
