"""`verify_drafts`: which tokens of a speculative step stand, given one draw at every position.

A request that has p tokens and k drafts is fed its last token and the drafts in one pass, which
gives the hidden states of positions p - 1 .. p + k - 1. One token is drawn at each:

    position         p - 1     p       ...   p + k - 1
    fed              last      d_1     ...   d_k
    drawn            x_1       x_2     ...   x_(k+1)

x_1 was drawn after tokens that are certain, so it stands. x_(i+1) was drawn after d_1 .. d_i and
stands if these are x_1 .. x_i. So the output is always a draw from the model, never a draft: it
follows the model's law whatever proposes the drafts (an n-gram table, say), and draft i + 1 is
accepted with the probability that the model gives it. This is rejection sampling (Leviathan et
al., 2023; Chen et al., 2023) for a proposal that is certain of its token, where a draw that
differs from the draft already follows the law that is drawn from after a rejection.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.checks.tensors import check_tensor


class Verified(NamedTuple):
    """What verify_drafts returns.

    tokens: int64 [B, k + 1]: the tokens that stand, then -1.
    num_accepted: int64 [B]: how many of them are drafts, 0 to k.
    """

    tokens: Tensor
    num_accepted: Tensor


def verify_drafts(sampled: Tensor, drafts: Tensor) -> Verified:
    """The drafts that were drawn, up to the first that was not, and the draw that follows them.

    Args:
        sampled: int64 [B * (k + 1)] or [B, k + 1]: the tokens that flash_sample drew from the
            hidden states of each request's last token and its k drafts, request by request.
        drafts: int32 or int64 [B, k], contiguous. A request with fewer drafts has -1 behind them.

    Returns:
        Verified. The token behind the accepted drafts is the correction of the first wrong draft,
        or a free one if none was wrong. Where that draw does not exist (flash_sample gave -1) it
        is left out: a request gained (tokens >= 0).sum(1) tokens, which else is num_accepted + 1.

    Noise: give every position its own. With the request's seed at each of its positions (seed
    int64 [B * (k + 1)]) and the position as offset, the draw at a position is the one that plain
    decoding makes there, and so speculation changes no token (docs/using-the-kernel.md).

    No host synchronisation: may be captured in a CUDA graph and compiled.

    Raises:
        InvalidType, InvalidArgument: an argument of the wrong type, dtype, shape, device or layout.
    """
    if not isinstance(drafts, torch.Tensor):
        raise InvalidType(f"drafts: expected a tensor; got {type(drafts).__name__}")
    if drafts.ndim != 2:
        raise InvalidArgument(f"drafts: expected a matrix [B, k]; got {list(drafts.shape)}")
    B, k = drafts.shape
    check_tensor("drafts", drafts, [torch.int32, torch.int64], [(B, k)], drafts.device)
    shapes = [(B * (k + 1),), (B, k + 1)]
    sampled = check_tensor("sampled", sampled, [torch.int64], shapes, drafts.device).view(B, k + 1)

    # A draw that does not exist is -1, and so is a draft: neither makes the other true.
    right = (sampled[:, :k] == drafts) & (drafts >= 0)
    num_accepted = right.long().cumprod(1).sum(1)
    position = torch.arange(k + 1, device=drafts.device)
    return Verified(sampled.masked_fill(position > num_accepted[:, None], -1), num_accepted)
