"""`verify_drafts`: which tokens of a speculative step stand, given one draw at every position.

A request that has p tokens and k drafts is fed its last token and the drafts in one pass, which
gives the hidden states of positions p - 1 .. p + k - 1. One token is drawn at each:

    position         p - 1     p       ...   p + k - 1
    fed              last      d_1     ...   d_k
    drawn            x_1       x_2     ...   x_(k+1)

x_1 was drawn after tokens that are certain, so it stands. x_(i+1) was drawn after d_1 .. d_i and
stands if these are x_1 .. x_i. So the output is always a draw from the model, never a draft: it
follows the model's law whatever proposes the drafts. In a tree of drafts a draft's parent takes the
place of the one before it. docs/guide/speculation.md has the proof, and how often drafts are
accepted.
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
AT_ONCE = 4096
"""A step with so many drafts does not fit the kernel's program."""


class Verified(NamedTuple):
    """What verify_drafts returns. Node 0 of a request is its last token, node i its draft i.

    tokens: int64 [B, k + 1]: the tokens that stand, then -1.
    num_accepted: int64 [B]: how many of them are drafts, 0 to k.
    nodes: int64 [B, k + 1]: the node behind which each token was drawn, then -1. These rows of the
        pass are the request's own: its cache keeps them, and drops the others.
    refused: bool [B, k]: drafts that no draw can confirm: missing (below 0), not below vocab_size,
        or with a parent that is no earlier node.
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
    """The drafts that were drawn, up to the first that was not, and the draw that follows them.

    Args:
        sampled: int64 [B * (k + 1)] or [B, k + 1]: the tokens that were drawn from the hidden
            states of each request's last token and its k drafts, request by request.
        drafts: int32 or int64 [B, k], contiguous. A request with fewer drafts has -1 in the places
            that are left.
        parents: for trees, int32 or int64 [k], one tree for all requests, or [B, k]: the node that
            draft i follows, 0 (the last token) to i - 1. None is the chain 0, 1, .. k - 1. Of equal
            drafts behind one node the first counts.
        vocab_size: drafts from it on are refused by name; no draw confirms them anyway.

    Returns:
        Verified. The token behind the accepted drafts is the correction of the first wrong draft,
        or a free one if none was wrong. Where that draw does not exist (flash_sample gave -1) it
        is left out: a request gained (tokens >= 0).sum(1) tokens, which else is num_accepted + 1.

    Noise: give every position its own (`step_noise`). Then the draw at a position is the one that
    plain decoding makes there, and speculation changes no token, whatever is in drafts and parents.

    On a GPU it is one launch. No host synchronization: may be compiled, and captured in a CUDA
    graph after a call with as many drafts.

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
    if device.type == "cuda" and B and k < AT_ONCE and not torch.compiler.is_compiling():
        return Verified(*follow_drafts(sampled, drafts, parents, V))
    return verified_by_torch(sampled, drafts, parents, V)


def verified_by_torch(
    sampled: Tensor, drafts: Tensor, parents: Tensor | None, vocab_size: int | None
) -> Verified:
    """As verify_drafts, of checked arguments, sampled [B, k + 1]: many small launches."""
    (B, k), device = drafts.shape, drafts.device
    refused = drafts < 0
    if vocab_size is not None:
        refused |= drafts >= vocab_size
    place = torch.arange(k + 1, device=device)
    if parents is None:
        right = (sampled[:, :k] == drafts) & ~refused
        num_accepted = right.long().cumprod(1).sum(1)
        behind = place > num_accepted[:, None]
        nodes = place.expand(B, k + 1).masked_fill(behind, -1)
        return Verified(sampled.masked_fill(behind, -1), num_accepted, nodes, refused)

    before, known = _before(parents, B, k)
    refused |= ~known
    right = torch.ones(B, k + 1, dtype=torch.bool, device=device)
    right[:, 1:] = (sampled.gather(1, before[:, 1:]) == drafts) & ~refused
    # Of equal drafts behind one node, the first: then those that stand are one path.
    siblings = (before[:, :, None] == before[:, None, :]) & right[:, None, :]
    earlier = place[None, :] < place[:, None]
    right[:, 1:] &= ~(siblings & earlier & (place > 0)).any(2)[:, 1:]
    right, depth = _followed(before, right)
    nodes = torch.full((B, k + 2), -1, device=device)  # the last is for those that do not stand
    nodes.scatter_(1, torch.where(right, depth, k + 1), place.expand(B, k + 1))
    nodes = nodes[:, : k + 1]
    tokens = sampled.gather(1, nodes.clamp_min(0)).masked_fill(nodes < 0, -1)
    return Verified(tokens, right.sum(1) - 1, nodes, refused)


def step_noise(
    seed: Tensor, position: Tensor, k: int, parents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(seed, offset) of every row of a speculative step, int64 [B * (k + 1)] each.

    They are those of plain decoding: the request's own seed, and the position of the row's token.

    Args:
        seed: int64 [B], one for each request (also if B is 1). position: int64 [B], that of each
            request's last token.
        k: drafts. parents: as in verify_drafts; a draft is as many positions on as it has nodes
            before it.

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
        before, _ = _before(parents, B, k)
        depth = _followed(before, torch.ones_like(before, dtype=torch.bool))[1]
    return seed.repeat_interleave(k + 1), (position[:, None] + depth).flatten()


def _before(parents: Tensor, B: int, k: int) -> tuple[Tensor, Tensor]:
    """(the node before each, int64 [B, k + 1], 0 for none; bool [B, k]: it is an earlier one)."""
    parents = parents.long().expand(B, k)
    known = (parents >= 0) & (parents <= torch.arange(k, device=parents.device))
    return torch.nn.functional.pad(parents.where(known, 0), (1, 0)), known


def _followed(before: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """(right: with all nodes before it; depth: how many those are), [B, n] each, in log n steps."""
    n = before.shape[1]
    depth = (torch.arange(n, device=before.device) > 0).long().expand_as(before)
    for _ in range((n - 1).bit_length()):
        right = right & right.gather(1, before)
        depth = depth + depth.gather(1, before)
        before = before.gather(1, before)
    return right, depth


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
