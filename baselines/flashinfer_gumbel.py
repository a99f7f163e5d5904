"""FI2, as the paper ran it: FlashInfer's Gumbel-max sampler over stored logits.

    tokens = argmax_v (logits_v / T + g_v),  g = -log(-log(u))

Passes over the logits beyond the matmul: division by T, FlashInfer's cast to fp32, the sampler.
`flashinfer_gumbel_lean` omits the first two. Random numbers: see `providing.flashinfer`.

FlashInfer's fp32 uniforms end before 1, so tokens about 16 T or more below the largest logit are
drawn too rarely (docs/design/exactness.md has how rarely, as measured).

Undefined rows, by reading: after a NaN the running maximum restarts, so the token is arbitrary; a
row of -inf only ends on a padding lane, so the id may be V or more.
"""

from __future__ import annotations

from fsbench.baselines.providing.flashinfer import build_as_in_paper
from fsbench.baselines.providing.logits import Gather, gathering
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, Shard, Tensor


def build(problem: Problem, weight: Tensor, gather: Gather | None = None) -> Launch:
    from flashinfer.sampling import sampling_from_logits

    return build_as_in_paper(problem, weight, sampling_from_logits, gather)


def build_sharded(problem: Problem, shard: Shard) -> Launch:
    return build(problem, shard.weight, gathering(shard))


PROVIDER = Provider(
    name="flashinfer_gumbel",
    label="FI2 (FlashInfer Gumbel-Max)",
    kind=Kind.EXACT,
    build=build,
    build_sharded=build_sharded,
    requires=("flashinfer",),
    capabilities=Capabilities(
        host_sync_free=True,
        batch_invariant=True,
        exact_to_gap=11.0,
        seed_stride=4,  # see providing.flashinfer
    ),
    presets=("paper", "quick", "tp"),
)
