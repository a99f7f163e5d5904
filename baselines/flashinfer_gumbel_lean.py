"""FI2 without the avoidable passes of the paper's version.

    tokens = argmax_v (logits_v / T + g_v)

One matmul with fp32 output and FlashInfer's Gumbel-max kernel, nothing else at T = 1. Otherwise the
logits are divided in place, since the kernel takes no temperature. Noise tail, random numbers and
undefined rows are those of `flashinfer_gumbel`; its logits are not rounded to bf16.
"""

from __future__ import annotations

from fsbench.baselines.providing.flashinfer import build_lean
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    from flashinfer.sampling import sampling_from_logits

    temperature = problem.temperature

    def sample(logits: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        if temperature != 1:
            logits.div_(temperature)
        return sampling_from_logits(logits, seed=seed, offset=offset)

    return build_lean(problem, weight, sample)


PROVIDER = Provider(
    name="flashinfer_gumbel_lean",
    label="FI2, lean",
    kind=Kind.EXACT,
    build=build,
    requires=("flashinfer",),
    capabilities=Capabilities(
        host_sync_free=True,
        batch_invariant=True,
        exact_to_gap=11.0,
        seed_stride=4,  # see providing.flashinfer
    ),
    presets=("lean",),
)
