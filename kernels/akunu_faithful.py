"""akunu's sampler over stored logits as its text describes it, with its approximations.

cuBLAS; one program of 1024 threads per row, which writes logit + T Gumbel in fp16; an argmax as
another launch. Deviations from the exact distribution: the threshold of top-k comes from 12
bisections, to 0.007 of a logit, that of top-p from 8, which keep at most p; u is clamped to
[1e-7, 1 - 1e-7]; scores have 11 bits, so some winners are ties, which the lower token wins.
`akunu_exact` has no such deviations; docs/results/filters.md has their effects. The text's
repetition penalty is not built.

Undefined rows, by reading: a NaN logit is never above a threshold, and argmax decides whether it
wins; a row without a finite logit gives token 0.
"""

from __future__ import annotations

from typing import Any

from fsbench.kernels.providing.filters import AKUNU_ORDER, draw_of_stored, launch_rows
from fsbench.problem import FILTERS
from fsbench.provider import Capabilities, Kind, Provider, Tensor

TOKENS_AT_ONCE = 4096
NUM_WARPS = 32


def akunu_scores(
    logits: Tensor,
    seed: Tensor,
    offset: Tensor,
    temperature: float,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Return fp16 [B, V]: logit + T Gumbel of the kept tokens, -inf of the others.

    Args:
        logits: [B, V] with contiguous rows, bf16, fp16 or fp32; read as fp16.
        seed, offset: int64 [1]. They are added: neighboring seeds are neighboring positions.
    """
    import torch

    from fsbench.kernels.providing.akunu import akunu_faithful_kernel

    B, V = logits.shape
    scores = torch.empty(B, V, dtype=torch.float16, device=logits.device)
    launch_rows(
        akunu_faithful_kernel, B, logits.device,
        logits, scores, seed, offset, float(temperature), top_k, float(top_p), float(min_p),
        logits.stride(0), V, BLOCK=TOKENS_AT_ONCE, num_warps=NUM_WARPS,
    )  # fmt: skip
    return scores


def akunu_faithful(
    logits: Tensor, seed: Tensor, offset: Tensor, temperature: float, **filters: Any
) -> Tensor:
    """Draw tokens, int64 [B]: the argmax of akunu_scores, with its arguments."""
    return akunu_scores(logits, seed, offset, temperature, **filters).argmax(dim=-1)


PROVIDER = Provider(
    name="akunu_faithful",
    label="akunu, as described",
    kind=Kind.TRUNCATED,
    requires=("triton",),
    capabilities=Capabilities(
        zero_temperature=True,
        host_sync_free=True,
        batch_invariant=True,
        filters=FILTERS,
        filter_order=AKUNU_ORDER,
        ties="kept",
        known_deviation=0.5,  # fp16: of logits near -1000 two neighbors are 0.5 apart
        seed_stride=2**20,
    ),
    build=draw_of_stored(akunu_faithful),
    presets=("truncated",),
)
