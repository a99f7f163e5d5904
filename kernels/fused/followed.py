"""One launch that follows the accepted drafts of every request: what verify_drafts returns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsbench.kernels.configs.gpu import bind_and_launch, launching_on


@triton.jit(do_not_specialize=["k", "vocab_size", "parents_stride"])
def _follow_drafts_kernel(
    sampled_ptr,  # [B, k + 1] int64
    drafts_ptr,  # [B, k] int32 or int64
    parents_ptr,  # [k] or [B, k] int32 or int64; or None: a chain
    tokens_ptr,  # this and what follows: [B, k + 1] int64, [B] int64, [B, k + 1] int64, [B, k] bool
    num_accepted_ptr,
    nodes_ptr,
    refused_ptr,
    k,
    vocab_size,  # or None
    parents_stride,  # 0 if all requests share a tree
    BLOCK: tl.constexpr,  # at least k + 1
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < k
    draft = tl.load(drafts_ptr + row * k + at, mask=there, other=-1).to(tl.int64)
    parent = at
    if parents_ptr is not None:
        parent = tl.load(parents_ptr + row * parents_stride + at, mask=there, other=-1)
    refused = (draft < 0) | (parent < 0) | (parent > at)
    if vocab_size is not None:
        refused |= draft >= vocab_size
    tl.store(refused_ptr + row * k + at, refused, mask=there)

    sampled_ptr += row * (k + 1)
    nodes = tl.where(at == 0, 0, -1)
    count = 0
    token = tl.load(sampled_ptr)
    # The first right draft behind the node that is reached. A parent is an earlier node, so nodes
    # ascend and the path ends.
    draft_at = tl.min(tl.where(~refused & (parent == 0) & (draft == token), at, BLOCK))
    while draft_at < BLOCK:
        node = draft_at + 1
        count += 1
        nodes = tl.where(at == count, node, nodes)
        token = tl.load(sampled_ptr + node)
        draft_at = tl.min(tl.where(~refused & (parent == node) & (draft == token), at, BLOCK))
    tokens = tl.load(sampled_ptr + nodes, mask=nodes >= 0, other=-1)
    tl.store(tokens_ptr + row * (k + 1) + at, tokens, mask=at <= k)
    tl.store(nodes_ptr + row * (k + 1) + at, nodes.to(tl.int64), mask=at <= k)
    tl.store(num_accepted_ptr + row, count)


def follow_drafts(
    sampled: Tensor, drafts: Tensor, parents: Tensor | None, vocab_size: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of Verified. sampled: [B, k + 1], B at least 1; others as verify_drafts."""
    B, k = drafts.shape
    found = (
        *(sampled.new_empty(B, k + 1), sampled.new_empty(B), sampled.new_empty(B, k + 1)),
        torch.empty(B, k, dtype=torch.bool, device=drafts.device),
    )
    with launching_on(drafts.device):
        tokens, num_accepted, nodes, refused = found
        bind_and_launch(
            _follow_drafts_kernel,
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
    return found
