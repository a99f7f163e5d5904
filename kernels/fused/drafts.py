"""`verify_drafts`: accept the drafts of a speculative step that equal the model's samples.

The model processes a request's last token and its k drafts in one pass, which gives the hidden
states of positions p - 1 .. p + k - 1. One token is sampled at each position:

    position         p - 1     p       ...   p + k - 1
    input            last      d_1     ...   d_k
    sampled          x_1       x_2     ...   x_(k+1)

x_1 was sampled after the request's own tokens, so it is accepted. x_(i+1) was sampled after
d_1 .. d_i, and is accepted if these equal x_1 .. x_i. So each output token is a sample of the model
and never a draft, and the output has the model's distribution whatever proposes the drafts. In a
tree of drafts a draft's parent takes the place of the draft before it. docs/guide/speculation.md
has the proof and acceptance rates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsbench.errors import InvalidArgument
from fsbench.kernels.checks.tensors import check_dense, check_tensor
from fsbench.kernels.checks.values import check_integer
from fsbench.kernels.configs.gpu import bind_and_launch, launching_on

_INTEGERS = (torch.int32, torch.int64)
MAX_DRAFTS = 4096
"""The kernel handles fewer drafts than this; more are verified by torch operations."""


class Verified(NamedTuple):
    """The result of `verify_drafts`. Node 0 of a request is its last token, node i its draft i.

    Attributes:
        tokens: int64 [B, k + 1], the accepted tokens, then -1.
        num_accepted: int64 [B], the number of accepted drafts, 0 to k.
        nodes: int64 [B, k + 1], the node after which each token was sampled, then -1. The request's
            KV cache keeps these positions of the pass and drops the others.
        refused: bool [B, k], drafts that cannot be accepted: missing (negative), not below
            vocab_size, or with a parent that is not an earlier node.
    """

    tokens: Tensor
    num_accepted: Tensor
    nodes: Tensor
    refused: Tensor


def verify_drafts(
    sampled: Tensor,
    drafts: Tensor,
    parents: Tensor | None = None,
    *,
    vocab_size: int | None = None,
) -> Verified:
    """Return each request's accepted drafts, and the sampled token that follows them.

    Use a different noise at each position (`step_noise`). Then each sample is the one of plain
    decoding at its position, and speculation changes no token, whatever drafts and parents contain.

    On a GPU this is one kernel launch without a host synchronization. It can be compiled, and
    captured in a CUDA graph after a call with the same number of drafts.

    Args:
        sampled: int64 [B * (k + 1)] or [B, k + 1], the tokens sampled from the hidden states of
            each request's last token and its k drafts, request by request.
        drafts: int32 or int64 [B, k], contiguous. A request with fewer drafts is padded with -1.
        parents: for trees, int32 or int64 [k], one tree for all requests, or [B, k]: the node that
            draft i follows, 0 (the last token) to i - 1. None is the chain 0, 1, .. k - 1. Of equal
            drafts with the same parent the first is used.
        vocab_size: drafts from vocab_size on are marked as refused.

    Returns:
        Verified. The token after the accepted drafts corrects the first wrong draft, or is an
        additional token if no draft is wrong. It is missing if that sample does not exist
        (flash_sample returned -1): a request gains (tokens >= 0).sum(1) tokens, usually
        num_accepted + 1.

    Raises:
        InvalidType, InvalidArgument: an argument of the wrong type, dtype, shape, device or layout.
    """
    check_dense("drafts", drafts)
    if drafts.ndim != 2:
        raise InvalidArgument(f"drafts: expected a matrix [B, k]; got {list(drafts.shape)}")
    (B, k), device = drafts.shape, drafts.device
    check_tensor("drafts", drafts, _INTEGERS, [(B, k)], device)
    shapes = [(B * (k + 1),), (B, k + 1)]
    sampled = check_tensor("sampled", sampled, [torch.int64], shapes, device).view(B, k + 1)
    V = None if vocab_size is None else check_integer("vocab_size", vocab_size, 1, 2**31)
    if parents is not None:
        check_tensor("parents", parents, _INTEGERS, [(k,), (B, k)], device)
    if device.type == "cuda" and B and k < MAX_DRAFTS and not torch.compiler.is_compiling():
        return Verified(*verified_by_kernel(sampled, drafts, parents, V))
    return verified_by_torch(sampled, drafts, parents, V)


def verified_by_torch(
    sampled: Tensor, drafts: Tensor, parents: Tensor | None, vocab_size: int | None
) -> Verified:
    """Run `verify_drafts` on checked arguments with torch operations; sampled: [B, k + 1]."""
    (B, k), device = drafts.shape, drafts.device
    refused = drafts < 0
    if vocab_size is not None:
        refused |= drafts >= vocab_size
    node = torch.arange(k + 1, device=device)
    if parents is None:
        accepted = (sampled[:, :k] == drafts) & ~refused
        num_accepted = accepted.long().cumprod(1).sum(1)
        is_rejected = node > num_accepted[:, None]
        nodes = node.expand(B, k + 1).masked_fill(is_rejected, -1)
        return Verified(sampled.masked_fill(is_rejected, -1), num_accepted, nodes, refused)

    parent_nodes, is_earlier = _parent_nodes(parents, B, k)
    refused |= ~is_earlier
    accepted = torch.ones(B, k + 1, dtype=torch.bool, device=device)
    accepted[:, 1:] = (sampled.gather(1, parent_nodes[:, 1:]) == drafts) & ~refused
    # Of equal drafts with the same parent accept the first, so that accepted drafts are one path.
    same = (parent_nodes[:, :, None] == parent_nodes[:, None, :]) & accepted[:, None, :]
    precedes = node[None, :] < node[:, None]
    accepted[:, 1:] &= ~(same & precedes & (node > 0)).any(2)[:, 1:]
    accepted, depth = _connected(parent_nodes, accepted)
    nodes = torch.full((B, k + 2), -1, device=device)  # the last column is for rejected drafts
    nodes.scatter_(1, torch.where(accepted, depth, k + 1), node.expand(B, k + 1))
    nodes = nodes[:, : k + 1]
    tokens = sampled.gather(1, nodes.clamp_min(0)).masked_fill(nodes < 0, -1)
    return Verified(tokens, accepted.sum(1) - 1, nodes, refused)


def step_noise(
    seed: Tensor, position: Tensor, k: int, parents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (seed, offset) of all rows of a speculative step, int64 [B * (k + 1)] each.

    They are those of plain decoding: the request's seed, and the position of the row's token.

    Args:
        seed: int64 [B], one for each request (also if B is 1).
        position: int64 [B], the position of each request's last token.
        k: the number of drafts.
        parents: as in `verify_drafts`. A draft's position is position + its depth in the tree.

    Raises:
        InvalidType, InvalidArgument: as verify_drafts.
    """
    check_dense("position", position)
    B, device = position.numel(), position.device
    check_tensor("position", position, [torch.int64], [(B,)], device)
    check_tensor("seed", seed, [torch.int64], [(B,)], device)
    check_integer("k", k, 0, 2**20)
    depth = torch.arange(k + 1, device=device)
    if parents is not None:
        check_tensor("parents", parents, _INTEGERS, [(k,), (B, k)], device)
        parent_nodes, _ = _parent_nodes(parents, B, k)
        depth = _connected(parent_nodes, torch.ones_like(parent_nodes, dtype=torch.bool))[1]
    return seed.repeat_interleave(k + 1), (position[:, None] + depth).flatten()


def _parent_nodes(parents: Tensor, B: int, k: int) -> tuple[Tensor, Tensor]:
    """Return each node's parent, int64 [B, k + 1], 0 if invalid; and whether it is valid [B, k]."""
    parents = parents.long().expand(B, k)
    is_earlier = (parents >= 0) & (parents <= torch.arange(k, device=parents.device))
    return torch.nn.functional.pad(parents.where(is_earlier, 0), (1, 0)), is_earlier


def _connected(parent_nodes: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Return (accepted with all ancestors, depth) of each node, [B, n] each, in log n steps."""
    n = parent_nodes.shape[1]
    depth = (torch.arange(n, device=parent_nodes.device) > 0).long().expand_as(parent_nodes)
    for _ in range((n - 1).bit_length()):
        accepted = accepted & accepted.gather(1, parent_nodes)
        depth = depth + depth.gather(1, parent_nodes)
        parent_nodes = parent_nodes.gather(1, parent_nodes)
    return accepted, depth


@triton.jit(do_not_specialize=["k", "vocab_size", "parents_stride"])
def _verify_drafts_kernel(
    sampled_ptr,  # [B, k + 1] int64
    drafts_ptr,  # [B, k] int32 or int64
    parents_ptr,  # [k] or [B, k] int32 or int64; or None: a chain
    tokens_ptr,  # [B, k + 1] int64, out
    num_accepted_ptr,  # [B] int64, out
    nodes_ptr,  # [B, k + 1] int64, out
    refused_ptr,  # [B, k] bool, out
    k,
    vocab_size,  # or None
    parents_stride,  # 0 if all requests share a tree
    BLOCK: tl.constexpr,  # at least k + 1
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_draft = column < k
    draft = tl.load(drafts_ptr + row * k + column, mask=is_draft, other=-1).to(tl.int64)
    parent = column
    if parents_ptr is not None:
        parent = tl.load(parents_ptr + row * parents_stride + column, mask=is_draft, other=-1)
    refused = (draft < 0) | (parent < 0) | (parent > column)
    if vocab_size is not None:
        refused |= draft >= vocab_size
    tl.store(refused_ptr + row * k + column, refused, mask=is_draft)

    sampled_ptr += row * (k + 1)
    nodes = tl.where(column == 0, 0, -1)
    count = 0
    token = tl.load(sampled_ptr)
    # Find the first accepted child of the current node. A parent is an earlier node, so nodes
    # ascend and the loop ends.
    child = tl.min(tl.where(~refused & (parent == 0) & (draft == token), column, BLOCK))
    while child < BLOCK:
        node = child + 1
        count += 1
        nodes = tl.where(column == count, node, nodes)
        token = tl.load(sampled_ptr + node)
        child = tl.min(tl.where(~refused & (parent == node) & (draft == token), column, BLOCK))
    tokens = tl.load(sampled_ptr + nodes, mask=nodes >= 0, other=-1)
    tl.store(tokens_ptr + row * (k + 1) + column, tokens, mask=column <= k)
    tl.store(nodes_ptr + row * (k + 1) + column, nodes.to(tl.int64), mask=column <= k)
    tl.store(num_accepted_ptr + row, count)


def verified_by_kernel(
    sampled: Tensor, drafts: Tensor, parents: Tensor | None, vocab_size: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `verify_drafts` on checked arguments with the kernel; sampled: [B, k + 1], B >= 1."""
    B, k = drafts.shape
    results = (
        *(sampled.new_empty(B, k + 1), sampled.new_empty(B), sampled.new_empty(B, k + 1)),
        torch.empty(B, k, dtype=torch.bool, device=drafts.device),
    )
    with launching_on(drafts.device):
        tokens, num_accepted, nodes, refused = results
        bind_and_launch(
            _verify_drafts_kernel,
            (B,),
            sampled_ptr=sampled,
            drafts_ptr=drafts,
            parents_ptr=parents,
            tokens_ptr=tokens,
            num_accepted_ptr=num_accepted,
            nodes_ptr=nodes,
            refused_ptr=refused,
            k=k,
            vocab_size=vocab_size,
            parents_stride=0 if parents is None or parents.ndim == 1 else k,
            BLOCK=triton.next_power_of_2(k + 1),
        )
    return results
