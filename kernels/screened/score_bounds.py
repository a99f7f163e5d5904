"""Device code of the screen: what every score lies between.

`screened.bounds.score_bounds` is the same in torch and defines the constants;
docs/guide/screened-head.md proves it.
"""

import triton
import triton.language as tl

from fsbench.kernels.device.epilogue import capped
from fsbench.kernels.noise.keys import flipped, ordered
from fsbench.kernels.screened import bounds as in_torch

LARGEST_TEMPERATURE = tl.constexpr(in_torch.LARGEST_TEMPERATURE)
ROUGH_SLACK = tl.constexpr(in_torch.ROUGH_NOISE_SLACK * in_torch.INFLATION)
BIAS_SLACK = tl.constexpr(in_torch.BIAS_SLACK)
CAP_SLACK = tl.constexpr(in_torch.CAP_SLACK)
ABSOLUTE_SLACK = tl.constexpr(in_torch.ABSOLUTE_SLACK)
LOWEST_BOUND = tl.constexpr(-3.4028234663852886e38)
"""Of a row without a lower bound yet: the lowest finite number. Forbidden tokens have -inf."""
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def bound_key(x):
    """fp32 -> int64 of the same order, above the lowest one; no NaN."""
    return ordered(x).to(tl.int64) << 32


@triton.jit
def bound_of_key(key):
    """The inverse of bound_key; LOWEST_BOUND for a key at rest."""
    order = (key >> 32).to(tl.int32)
    bits = flipped(order)
    # A key at rest has bits that are no number.
    x = tl.where(order == -(2**31), 0, bits).to(tl.float32, bitcast=True)
    return tl.where(order == -(2**31), LOWEST_BOUND, x)


@triton.jit
def rough_gumbel(bits, NVIDIA: tl.constexpr):
    """32 random bits (uint32) -> Gumbel(0, 1) in fp32, within 2^-10 of noise.contract.gumbel.

    -log E, E = -log(1 - u), u = (bits + 0.5) 2^-32. For 1 - u above 1 - 2^-10, E is taken for u.
    """
    others = (bits.to(tl.int32, bitcast=True) ^ -1).to(tl.uint32, bitcast=True)
    rest = others.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # 1 - u
    u = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    E = tl.where(rest > 0.9990234375, u, _rough_log2(rest, NVIDIA) * -LN_2)
    return _rough_log2(E, NVIDIA) * -LN_2


@triton.jit
def _rough_log2(x, NVIDIA: tl.constexpr):
    """log2 of a normal number: within 2^-22 if x is between 0.5 and 2, else of its own size."""
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )
    else:
        return tl.log2(x)


@triton.jit
def known_logits(z, tokens, vectors, row_biases, rows, B, V, bounds, soft_cap):
    """(y, bound) of logits: each is within bound of y, with the slack of its score.

    NaN stands for what has no bound, so that comparisons let it pass. Where a bias of -inf forbids
    a token y is -inf, and bound is finite unless the logit may be undefined.

    Args:
        z: [R, W], still to be multiplied by the tokens' scales. tokens: int32 [1, W].
        row_biases: pointers to bias[rows, 0], [R, 1], or None.
    """
    scale_ptr, residual_ptr, norm_ptr, bias_ptr = vectors
    _, _, extra, reach, spread = bounds
    inside = tokens < V
    y = z * tl.load(scale_ptr + tokens, mask=inside, other=1.0)
    residual = tl.load(residual_ptr + tokens, mask=inside, other=0.0)
    norm = tl.load(norm_ptr + tokens, mask=inside, other=0.0)
    bound = residual * reach + (norm * spread + extra)
    if soft_cap is not None:
        y = capped(y, soft_cap)
    if len(bias_ptr) > 0:
        bias = tl.load(bias_ptr[0] + tokens, mask=inside, other=float("-inf")).to(tl.float32)
        y += bias
        bound += tl.where(tl.abs(bias) < float("inf"), tl.abs(bias) * BIAS_SLACK, 0.0)
    if row_biases is not None:
        there = (rows < B)[:, None] & inside
        bias = tl.load(row_biases + tokens, mask=there, other=float("-inf")).to(tl.float32)
        y += bias
        bound += tl.where(tl.abs(bias) < float("inf"), tl.abs(bias) * BIAS_SLACK, 0.0)
    if soft_cap is not None:
        y = tl.where(inside, y, float("-inf"))  # the cap of the -inf there is a number
    return y, bound


@triton.jit
def larger(a, b):
    """The larger of two, or the one that is a number."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.NONE)
