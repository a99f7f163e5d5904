"""Multinomial sampling in eager PyTorch: the simplest code.

    tokens = multinomial(softmax(hidden @ weight.T / T))

Each step is a pass over the logits. For one sample torch.multinomial is itself an exponential race
(see `exponential_race`, with the same truncated tail) behind about ten small kernels that check the
probabilities: two thirds of its time (pytorch issue 177127). Its noise is torch's generator, so
seed and offset are not read.

Undefined rows: a NaN logit, or no finite one, makes every probability of the row NaN. On a CPU
torch.multinomial then raises RuntimeError; on a GPU a device-side assert fires, after which the
process cannot use CUDA.
"""

from __future__ import annotations

from fsbench.baselines.providing.logits import TORCH_NOISE, scaled_logits
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Tensor, padded


def build(problem: Problem, weight: Tensor) -> Launch:
    import torch

    weight = padded(weight)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        probs = scaled_logits(hidden, weight, problem.V, problem.temperature).softmax(dim=-1)
        return torch.multinomial(probs, 1).squeeze(1)

    return launch


PROVIDER = Provider(
    name="multinomial",
    label="Multinomial Sampling (eager)",
    kind=Kind.EXACT,
    build=build,
    capabilities=TORCH_NOISE,
    presets=("smoke", "cpu"),
)
