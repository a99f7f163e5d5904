"""Score target tokens with the fused kernels: the target takes the place of the drawn token.

NOISE is "target" then, and the targets replace the seeds. A group's score is 0 if the target is in
it, else -1. As in any draw, the score is +inf in an undefined row.
"""

import triton
import triton.language as tl

from fsbench.kernels.noise.group import group_of_token, token_of_member

IGNORED = tl.constexpr(-100)
"""The target to skip, as in torch.nn.functional.cross_entropy."""


@triton.jit
def targets_of_rows(targets_ptr, offsets, mask, V):
    """Load targets as int32; -1 if a target is not in [0, V)."""
    target = tl.load(targets_ptr + offsets, mask=mask, other=-1)
    return tl.where((target >= 0) & (target < V), target, -1).to(tl.int32)


@triton.jit
def target_draws(y, m, v0, index, target, temperature):
    """Return each group's (score, token, logit of the token), [R, G], as `group_draws` does.

    Args:
        y, m: the members and the largest of them. v0, index: as in `group_noise`.
        target: int32 [R, 1]. temperature: scalar or [R, 1]; NaN if it is invalid.
    """
    in_group = group_of_token(target) == (v0 >> 5) + index
    member = ((target >> 3) & 15) * 2 + (target & 1)
    score = tl.where(m > float("-inf"), tl.where(in_group, 0.0, -1.0), float("-inf"))
    score = tl.where((float("inf") > m) & (temperature == temperature), score, float("inf"))
    return score, token_of_member(v0, index, member), _select(y, member)


@triton.jit
def _select(y, member):
    """Return y[member] elementwise, by halving the tuple y."""
    HALF: tl.constexpr = len(y) // 2
    if HALF == 0:
        return y[0]
    else:
        half = ()
        for i in tl.static_range(HALF):
            half = half + (tl.where((member & HALF) != 0, y[HALF + i], y[i]),)  # noqa: RUF005
        return _select(half, member)


@triton.jit
def scored(targets_ptr, offsets, mask, token, logprob, V):
    """Return (log-probability of the target, whether it is valid) from the best candidate's."""
    target = tl.load(targets_ptr + offsets, mask=mask, other=IGNORED)
    valid = (token >= 0) & (target >= 0) & (target < V)
    # If all tokens of its group are forbidden, the target is not the best candidate.
    logprob = tl.where(token == target, logprob, float("-inf"))
    logprob = tl.where(valid, logprob, float("nan"))
    return tl.where(target == IGNORED, 0.0, logprob), valid | (target == IGNORED)


@triton.jit
def count_larger(y, limits, counts):
    """Add the number of members (32 tensors [R, G]) above each limit [R, 1] to counts [R, G]."""
    updated = ()
    for i in tl.static_range(len(counts)):
        count = counts[i]
        for j in tl.static_range(32):
            count += (y[j] > limits[i]).to(tl.int32)
        updated = updated + (count,)  # noqa: RUF005
    return updated


@triton.jit
def store_rank(rank_ptr, limits_ptr, targets_ptr, offsets, mask, token, logit, V):
    """Turn the counts of all programs into ranks; -1 for a target without a rank.

    The target's logit from the pass over the weight may differ from its limit in the last bit. The
    target does not count as larger than itself then.
    """
    target = tl.load(targets_ptr + offsets, mask=mask, other=IGNORED)
    rank = tl.load(rank_ptr + offsets, mask=mask, other=0, cache_modifier=".cg")
    limit = tl.load(limits_ptr + offsets, mask=mask, other=0.0)
    rank -= ((token == target) & (logit > limit)).to(tl.int32)
    ranked = (token >= 0) & (target >= 0) & (target < V)
    tl.store(rank_ptr + offsets, tl.where(ranked, rank, -1), mask=mask)
