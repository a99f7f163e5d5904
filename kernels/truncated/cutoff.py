"""Device code: where a row of logits is cut off.

A token's key is the int64 of `ordered_key`: larger logit first, of equal logits the lower token.
All keys of a row differ, so a filter keeps the tokens from one key on, and a cutoff is that key.
Filters add up from the top until enough is reached: top-k counts tokens, and top-p adds masses,
exp((y - top) / T). A step of the searches here divides the interval of the cutoff by four. If keys
are few, each is compared with all others instead.
"""

import triton
import triton.language as tl

from fsbench.kernels.device.thresholds import three_sums
from fsbench.kernels.noise.keys import LOWEST, ordered, ordered_key, value_of

NOTHING = tl.constexpr((LOWEST.value - 1) << 32)
"""A key below those of all finite logits: no token."""

COUNT_BITS = tl.constexpr(13)
"""Low bits of a packed weight: they count tokens, of which there are at most 4096 at once."""

MASS_UNITS = tl.constexpr(2.0**36)
"""Units of mass, a fraction of the largest logit's mass. Packed weights have integer masses, so the
order of summation does not matter. 4096 of them fit above the count."""

GATHERED = tl.constexpr(4096)
"""Tokens of a row that are gathered at most, so that their packed weights may be added up."""

RANKED = tl.constexpr(512)
"""Up to this number of gathered tokens each is compared with all, without a search."""

FEW_RANKED = tl.constexpr(128)
"""Up to this number the comparison takes one step or two."""

TERMS = tl.constexpr(64)
"""Masses that a lane adds up one after another. Of all V / 512 the error would reach 2^-14."""

WAYS = tl.constexpr(4)
"""Parts into which a step of a search divides the keys."""


@triton.jit
def first_key(order):
    """Return the lowest key of a logit; order: `ordered` of it, int32."""
    return order.to(tl.int64) << 32


@triton.jit
def is_kept(y, token, cut):
    """Return whether tokens with logits y are at or above the cutoff, without 64-bit keys."""
    order = ordered(y)
    cut_order = (cut >> 32).to(tl.int32)
    # A cutoff need not be a token's key: with bit 31, no token at its logit is kept.
    last = (0x7FFFFFFF - tl.minimum(cut & 0xFFFFFFFF, 0x80000000)).to(tl.int32)
    return (order > cut_order) | ((order == cut_order) & (token <= last))


@triton.jit
def load_keys(keys_ptr, first, n, N: tl.constexpr):
    """Load keys first .. first + N - 1 of n, int64 [N]; NOTHING after the last."""
    place = first + tl.arange(0, N)
    return tl.load(keys_ptr + place, mask=place < n, other=NOTHING)


@triton.jit
def unpacked(keys):
    """Return (logits fp32, tokens int32) of keys; NOTHING gives -inf."""
    token = 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)
    return value_of((keys >> 32).to(tl.int32)), token


@triton.jit
def packed_weights(y, exists, top, sharpness):
    """Pack mass and count into int64, 0 if not `exists`. Up to 4096 of them may be added up."""
    mass = (tl.exp2(sharpness * (y - top)) * MASS_UNITS).to(tl.int64)
    return tl.where(exists, (mass << COUNT_BITS) + 1, 0)


@triton.jit
def counted(weights):
    """Return the number of tokens in a sum of packed weights."""
    return weights & 0x1FFF


@triton.jit
def mass_of(weights):
    """Return the mass in a sum of packed weights, in MASS_UNITS."""
    return weights >> COUNT_BITS


@triton.jit
def cut_among(keys, weights, low, high, target, BY_MASS: tl.constexpr):
    """Return (the largest key from which on weights reach `target`, their sum), in registers.

    Args:
        keys: int64 [N], in any order. weights: packed, int64 [N]; those from `high` on are 0.
        low: a key at which `target` is reached; if it is not, `low` is the cutoff.
        target: int64, at least 1: tokens, or with BY_MASS mass.
    """
    from_low = tl.sum(tl.where(keys >= low, weights, 0))
    from_high = tl.zeros((), tl.int64)
    shift: tl.constexpr = COUNT_BITS if BY_MASS else 0
    bits: tl.constexpr = -1 if BY_MASS else 0x1FFF
    while _undecided(from_low, from_high, target, BY_MASS):
        step = tl.maximum((high >> 2) - (low >> 2), 1)
        t1 = tl.minimum(low + step, high)
        t2 = tl.minimum(low + 2 * step, high)
        t3 = tl.minimum(low + 3 * step, high)
        r1, r2, r3 = three_sums(
            tl.where(keys >= t1, weights, 0),
            tl.where(keys >= t2, weights, 0),
            tl.where(keys >= t3, weights, 0),
        )
        # Sums fall with the key: the last that is enough is the new lower end, the next the upper.
        enough1 = ((r1 >> shift) & bits) >= target
        enough2 = ((r2 >> shift) & bits) >= target
        enough3 = ((r3 >> shift) & bits) >= target
        high = tl.where(enough3, high, tl.where(enough2, t3, tl.where(enough1, t2, t1)))
        from_high = tl.where(
            enough3, from_high, tl.where(enough2, r3, tl.where(enough1, r2, r1))
        )  # fmt: skip
        low = tl.where(enough3, t3, tl.where(enough2, t2, tl.where(enough1, t1, low)))
        from_low = tl.where(enough3, r3, tl.where(enough2, r2, tl.where(enough1, r1, from_low)))
    return low, from_low


@triton.jit
def _undecided(from_low, from_high, target, BY_MASS: tl.constexpr):
    """Return whether the interval has more than one token; both ends are sums of weights."""
    undecided = counted(from_low) - counted(from_high) > 1
    if BY_MASS:
        return undecided
    else:
        return undecided & (counted(from_low) > target)


@triton.jit
def cut_in_registers(keys, weights, low, high, k, p, by_p):
    """Return the cutoff of top-k, then top-p of the remaining mass, among keys from `low` on."""
    low, kept = cut_among(keys, weights, low, high, k.to(tl.int64), False)
    if by_p:
        target = tl.maximum((mass_of(kept).to(tl.float32) * p).to(tl.int64), 1)
        low, kept = cut_among(keys, weights, low, high, target, True)
    return low


@triton.jit
def cut_by_ranks(keys, keys_ptr, n, k, p, by_p, top, sharpness):
    """Return the cutoff as cut_in_registers does, by comparing each key with all others.

    keys: int64 [N], the n keys at keys_ptr (load_keys).
    """
    AT_ONCE: tl.constexpr = 4096 // keys.shape[0]
    above = tl.zeros((keys.shape[0], AT_ONCE), tl.int64)
    for first in tl.range(0, n, AT_ONCE):
        other = load_keys(keys_ptr, first, n, AT_ONCE)
        y, _token = unpacked(other)
        weights = packed_weights(y, other > NOTHING, top, sharpness)
        above += tl.where(other[None, :] > keys[:, None], weights[None, :], 0)
    above = tl.sum(above, axis=1)
    kept = (keys > NOTHING) & (counted(above) < k)
    if by_p:
        y, _token = unpacked(keys)
        mass = mass_of(tl.sum(packed_weights(y, kept, top, sharpness)))
        target = tl.maximum((mass.to(tl.float32) * p).to(tl.int64), 1)
        # The token that crosses p has less than p above it.
        kept = kept & (mass_of(above) < target)
    return tl.min(tl.where(kept, keys, 0x7FFFFFFF << 32))


@triton.jit
def sums_of_row(logits_ptr, V, t, top, sharpness, BLOCK: tl.constexpr):
    """Return (number of a row's tokens with keys from t on, int32; their mass, fp32).

    t: int64 [WAYS]. One program reads the whole row. The relative error of a mass is below 2^-18,
    because parts of TERMS * BLOCK tokens are summed separately.
    """
    counts = tl.zeros((WAYS,), tl.int32)
    masses = tl.zeros((WAYS,), tl.float32)
    for begin in tl.range(0, V, TERMS * BLOCK):
        part_counts = tl.zeros((BLOCK, WAYS), tl.int32)
        part_masses = tl.zeros((BLOCK, WAYS), tl.float32)
        for first in tl.range(begin, tl.minimum(V, begin + TERMS * BLOCK), BLOCK):
            token = first + tl.arange(0, BLOCK)
            y = tl.load(logits_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
            reached = ordered_key(y, token)[:, None] >= t[None, :]
            part_counts = tl.where(reached, part_counts + 1, part_counts)
            part_masses = tl.where(
                reached, part_masses + tl.exp2(sharpness * (y - top))[:, None], part_masses
            )
        counts += tl.sum(part_counts, axis=0)
        masses += tl.sum(part_masses, axis=0)
    return counts, masses


@triton.jit
def cut_by_scans(logits_ptr, V, low, high, target, top, sharpness, BY_MASS: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Return (cutoff, mass from it on) of a whole row, as cut_among; each step reads the row.

    target: fp32, tokens or mass. No token of the row is at `high` or above.
    """
    way = tl.arange(0, WAYS)
    from_high = tl.zeros((), tl.int32)
    mass = tl.zeros((), tl.float32)
    between = V + tl.zeros((), tl.int32)
    while between > 0:
        t = low + tl.maximum((high >> 2) - (low >> 2), 1) * way
        counts, masses = sums_of_row(logits_ptr, V, t, top, sharpness, BLOCK)
        enough = ((masses if BY_MASS else counts.to(tl.float32)) >= target) | (way == 0)
        low = tl.max(tl.where(enough, t, low))
        high = tl.min(tl.where(enough, high, tl.minimum(t, high)))
        from_low = tl.min(tl.where(enough, counts, 0x7FFFFFFF))
        mass = tl.min(tl.where(enough, masses, float("inf")))
        from_high = tl.maximum(from_high, tl.max(tl.where(enough, 0, counts)))
        between = tl.where(from_low - from_high > 1, 1, 0)
        if not BY_MASS:
            between = tl.where(from_low.to(tl.float32) > target, between, 0)
    return low, mass


@triton.jit
def cut_of_row(logits_ptr, V, low, high, k, p, by_p, top, sharpness, BLOCK: tl.constexpr):
    """Return the cutoff as cut_in_registers does, by scans of the row."""
    low, mass = cut_by_scans(
        logits_ptr, V, low, high, k.to(tl.float32), top, sharpness, False, BLOCK
    )
    if by_p:
        target = tl.maximum(p * mass, 1e-30)
        low, mass = cut_by_scans(
            logits_ptr, V, low, high, target, top, sharpness, True, BLOCK
        )  # fmt: skip
    return low
