"""One rank's own part of a draw from a sharded vocabulary, for samplers that merge elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from fsbench.kernels.call.request import Request
from fsbench.kernels.call.result import Sample
from fsbench.kernels.configs.choice import choose
from fsbench.kernels.fused.draw import draw
from fsbench.kernels.shard.vocab_shard import VocabShard


def local_draw(
    hidden: Tensor,
    weight: Tensor | VocabShard,
    seed: Tensor,
    offset: Tensor,
    temperature: float,
    *,
    return_logz: bool = False,
) -> Sample:
    """This rank's best candidates, packed (noise.keys.ordered_key), in place of tokens.

    The largest over all ranks is the row's: the noise of a token is the same on any rank. logz is
    that of the rank's tokens; it means nothing where these have no draw. Arguments are those of
    fsbench.kernels.flash_sample, which checks them; this does not.
    """
    shard = weight if isinstance(weight, VocabShard) else None
    matrix = weight.weight if isinstance(weight, VocabShard) else weight
    B, device = hidden.shape[0], hidden.device
    request = Request(
        hidden=hidden,
        weight=matrix,
        seed=seed,
        offset=offset,
        temperature=temperature,
        soft_cap=None,
        bias=None,
        mask=None,
        vocab_size=len(matrix) if shard is None else shard.vocab_size,
        num_samples=1,
        noise="group",
        shard=shard,
        merge_later=True,
    )
    out = Sample(
        torch.empty(B, dtype=torch.int64, device=device),
        torch.empty(B, dtype=torch.bool, device=device),
        None,
        torch.empty(B, dtype=torch.float32, device=device) if return_logz else None,
    )
    draw(request, choose(hidden, matrix, "group"), out)
    return out
