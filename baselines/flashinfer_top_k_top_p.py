"""FI1, as the paper ran it: FlashInfer's top-k/top-p sampler, on most problems with both off.

    tokens = top_p_sample(softmax(top_k_mask(logits / T, k)), p)

k and p are those of the problem: top-k first, then p of the remaining mass; tokens equal to the
last one kept are kept, too. If both are off k = -1 and p = 1, as the paper timed it: the filters
keep every token, so it draws from the full softmax, but their passes remain: division by T, a
masked copy of the logits, a softmax, a cast to fp32, then inverse-CDF sampling, whose check of the
drawn token against p reads the row again. `flashinfer_top_k_top_p_lean` omits what it can.
Random numbers: see `providing.flashinfer`.

Not corrected here, because the paper ran it so: FlashInfer casts after the softmax, so in bf16 the
probabilities are rounded to 8 bits (up to 0.4 %) and need not sum to 1. A deficit goes to the last
token, an excess is cut off the last tokens. With varied logits the errors cancel; with
equal logits they add up, so up to 0.4 % of all draws are wrong (V = 128,256: 0.14 %).

Undefined rows, by reading: a NaN logit, or no finite one, leaves no valid probability and the
result is token 0.
"""

from __future__ import annotations

from functools import partial

from fsbench.baselines.providing.flashinfer import TOP_K_TOP_P, build_as_in_paper, top_k_and_top_p
from fsbench.baselines.providing.logits import Gather, gathering
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, Shard, Tensor


def build(problem: Problem, weight: Tensor, gather: Gather | None = None) -> Launch:
    from flashinfer.sampling import top_k_top_p_sampling_from_logits

    top_k, top_p = top_k_and_top_p(problem, weight.device)
    sample = partial(top_k_top_p_sampling_from_logits, top_k=top_k, top_p=top_p)
    return build_as_in_paper(problem, weight, sample, gather)


def build_sharded(problem: Problem, shard: Shard) -> Launch:
    return build(problem, shard.weight, gathering(shard))


PROVIDER = Provider(
    name="flashinfer_top_k_top_p",
    label="FI1 (FlashInfer top-k/top-p)",
    kind=Kind.EXACT,
    build=build,
    build_sharded=build_sharded,
    requires=("flashinfer",),
    capabilities=Capabilities(host_sync_free=True, known_deviation=0.004, **TOP_K_TOP_P),
    presets=("paper", "tp", "truncated"),
)
