"""FlashSampling: exact sampling fused into the LM-head matmul (Algorithm 1), portable Triton.

    token_b = argmax_v (hidden_b . weight_v + T g_bv),   g_bv i.i.d. Gumbel(0, 1)

is a draw from softmax(hidden_b @ weight.T / T). The maximum splits over vocabulary tiles, so the
noise is added to each tile of logits on chip and only the best candidate of a tile survives: the
[B, V] logits never reach memory. Group noise: 32 tokens share one Gumbel (Lemma D.1). One launch;
nothing but a few KiB of workspace. flash_sample runs it where flash_sampling_hopper cannot.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fsbench.kernels.providing.launches import (
    FULL_CONTRACT,
    FlashSampling,
    flash_sample,
    noise_map,
    vocab_shard,
)
from fsbench.kernels.providing.tuning import tuning
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Shard

if TYPE_CHECKING:
    from torch import Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    """See Provider."""
    return FlashSampling(problem, weight, kernel="portable")


def build_sharded(problem: Problem, shard: Shard) -> Launch:
    """See Provider."""
    return FlashSampling(problem, vocab_shard(shard), kernel="portable")


def matmul_form(problem: Problem, weight: Tensor) -> Launch:
    """See Provider."""
    from fsbench.kernels.providing.matmul_form import build_matmul_form

    return build_matmul_form(problem, weight)


PROVIDER = Provider(
    name="flash_sampling",
    label="FlashSampling (Triton)",
    kind=Kind.EXACT,
    requires=("triton",),
    noise_map=noise_map,
    capabilities=FULL_CONTRACT,
    build=build,
    build_sharded=build_sharded,
    sample=partial(flash_sample, kernel="portable"),
    presets=("paper", "quick", "lean", "tp"),
    tuning=tuning("portable"),
    matmul_form=matmul_form,
)
