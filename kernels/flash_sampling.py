"""FlashSampling: exact sampling fused into the LM-head matmul, in portable Triton.

    token_b = argmax_v (hidden_b . weight_v + T g_bv),   g_bv i.i.d. Gumbel(0, 1)

is a draw from softmax(hidden_b @ weight.T / T). The maximum splits over vocabulary tiles, so the
noise is added to each tile of logits on chip and only the best candidate of a tile survives: the
[B, V] logits never reach memory. Tiles and reduction are those of the paper's Algorithm 1, but in
one launch. The noise is that of its Algorithm I.2 with groups of 32 tokens, which share one Gumbel
(Lemma D.1), and with an inverse CDF inside the group. A few KiB of workspace. flash_sample runs it
where flash_sampling_hopper cannot run or is not faster.
"""

from __future__ import annotations

from dataclasses import replace

from fsbench.kernels.providing.launches import flash_sampler, matmul_form
from fsbench.kernels.providing.tuning import tuning

PROVIDER = replace(
    flash_sampler("flash_sampling", "FlashSampling (Triton)", kernel="portable"),
    tuning=tuning("portable"),
    matmul_form=matmul_form,
)
