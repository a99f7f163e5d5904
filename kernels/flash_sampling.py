"""FlashSampling: exact sampling fused into the LM-head matmul (Algorithm 1), portable Triton.

    token_b = argmax_v (hidden_b . weight_v + T g_bv),   g_bv i.i.d. Gumbel(0, 1)

is a draw from softmax(hidden_b @ weight.T / T). The maximum splits over vocabulary tiles, so the
noise is added to each tile of logits on chip and only the best candidate of a tile survives: the
[B, V] logits never reach memory. Group noise: 32 tokens share one Gumbel (Lemma D.1). One launch,
and a few KiB of workspace. flash_sample runs it where flash_sampling_hopper cannot run or is not
faster.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fsbench.kernels.providing.launches import (
    FULL_CONTRACT,
    FlashSampling,
    accept,
    build_sharded,
    flash_sample,
    matmul_form,
    noise_map,
)
from fsbench.kernels.providing.tuning import tuning
from fsbench.problem import QUANTIZED
from fsbench.provider import Kind, Provider

PROVIDER = Provider(
    name="flash_sampling",
    label="FlashSampling (Triton)",
    kind=Kind.EXACT,
    requires=("triton",),
    noise_map=noise_map,
    capabilities=replace(FULL_CONTRACT, quantized=QUANTIZED),
    build=partial(FlashSampling, kernel="portable"),
    build_sharded=partial(build_sharded, kernel="portable"),
    sample=partial(flash_sample, kernel="portable"),
    accept=accept,
    call="flash_sample",
    presets=("paper", "quick", "lean", "tp"),
    tuning=tuning("portable"),
    matmul_form=matmul_form,
)
