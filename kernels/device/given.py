"""A given token in place of a draw: the fused kernels leave its logit as they leave a winner's.

The "noise" is "given" then, and a row's targets stand where its seeds do. A group's score is 0 if
the target is in it, else -1; +inf in a row that is undefined, as in any draw.
"""

import triton
import triton.language as tl

from fsbench.kernels.noise.group import group_of_token, token_of_member

IGNORED = tl.constexpr(-100)
"""A target that is none, as in torch.nn.functional.cross_entropy."""


@triton.jit
def targets_of_rows(targets_ptr, at, there, V):
    """The targets at `at`, int32; -1 for what is none of V tokens."""
    target = tl.load(targets_ptr + at, mask=there, other=-1)
    return tl.where((target >= 0) & (target < V), target, -1).to(tl.int32)


@triton.jit
def given_draws(y, m, v0, index, target, temperature):
    """As noise.group.group_draws of every group, [R, G]: (score, token, its logit).

    Args:
        y, m: members and the largest of them. v0, index: of group_noise. target: int32 [R, 1].
        temperature: scalar or [R, 1], NaN where it is none.
    """
    here = group_of_token(target) == (v0 >> 5) + index
    member = ((target >> 3) & 15) * 2 + (target & 1)
    score = tl.where(m > float("-inf"), tl.where(here, 0.0, -1.0), float("-inf"))
    score = tl.where((float("inf") > m) & (temperature == temperature), score, float("inf"))
    return score, token_of_member(v0, index, member), _chosen(y, member)


@triton.jit
def _chosen(y, member):
    """The member of a number from 0 to 31."""
    HALF: tl.constexpr = len(y) // 2
    if HALF == 0:
        return y[0]
    else:
        rest = ()
        for i in tl.static_range(HALF):
            rest = rest + (tl.where((member & HALF) != 0, y[HALF + i], y[i]),)  # noqa: RUF005
        return _chosen(rest, member)


@triton.jit
def scored(targets_ptr, at, there, token, logprob, V):
    """(log-probability of the target, whether there is one), from those of the best candidate."""
    target = tl.load(targets_ptr + at, mask=there, other=IGNORED)
    valid = (token >= 0) & (target >= 0) & (target < V)
    # No candidate is the target where all of its group are forbidden.
    logprob = tl.where(token == target, logprob, float("-inf"))
    logprob = tl.where(valid, logprob, float("nan"))
    return tl.where(target == IGNORED, 0.0, logprob), valid | (target == IGNORED)


@triton.jit
def count_larger(y, limits, counts):
    """Add to counts, [R, G] each, how many members (32 tensors [R, G]) are above limits, [R, 1]."""
    more = ()
    for i in tl.static_range(len(counts)):
        count = counts[i]
        for j in tl.static_range(32):
            count += (y[j] > limits[i]).to(tl.int32)
        more = more + (count,)  # noqa: RUF005
    return more


@triton.jit
def store_rank(rank_ptr, limits_ptr, targets_ptr, at, there, token, logit, V):
    """Make ranks of the counts that all programs left: -1 where there is none.

    A target never counts as larger than itself, should its logit of the pass over the weight (that
    of `token`, if this is the target) have another last bit than its limit.
    """
    target = tl.load(targets_ptr + at, mask=there, other=IGNORED)
    rank = tl.load(rank_ptr + at, mask=there, other=0, cache_modifier=".cg")
    limit = tl.load(limits_ptr + at, mask=there, other=0.0)
    rank -= ((token == target) & (logit > limit)).to(tl.int32)
    ranked = (token >= 0) & (target >= 0) & (target < V)
    tl.store(rank_ptr + at, tl.where(ranked, rank, -1), mask=there)
