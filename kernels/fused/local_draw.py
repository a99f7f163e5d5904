"""One rank's own part of a draw from a sharded vocabulary, for samplers that merge elsewhere."""

from __future__ import annotations

from torch import Tensor

from fsbench.kernels.call.request import checked_request
from fsbench.kernels.call.result import Extras, Sample, empty_sample
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
    fsbench.kernels.flash_sample.
    """
    request = checked_request(
        hidden,
        weight,
        seed=seed,
        offset=offset,
        temperature=temperature,
        soft_cap=None,
        bias=None,
        mask=None,
        vocab_size=None,
        may_be_sharded=True,
    )._replace(merge_later=True)
    out = empty_sample(request, Extras(logz=return_logz))
    draw(request, "auto", None, out)
    return out
