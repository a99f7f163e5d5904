"""Device code of the screen: lower and upper bounds of scores.

`screened.bounds.score_bounds` is the same in torch and defines the constants;
docs/guide/screened-head.md proves it.
"""

import triton
import triton.language as tl

from fsbench.kernels.device.epilogue import capped
from fsbench.kernels.screened import bounds as in_torch

LARGEST_TEMPERATURE = tl.constexpr(in_torch.LARGEST_TEMPERATURE)
ROUGH_SLACK = tl.constexpr(in_torch.ROUGH_NOISE_SLACK * in_torch.INFLATION)
BIAS_SLACK = tl.constexpr(in_torch.BIAS_SLACK)
CAP_SLACK = tl.constexpr(in_torch.CAP_SLACK)
ROUNDING = tl.constexpr(in_torch.ROUNDING)
ABSOLUTE_SLACK = tl.constexpr(in_torch.ABSOLUTE_SLACK)
LOWEST_BOUND = tl.constexpr(-3.4028234663852886e38)
"""Lower bound of a row at first: the lowest finite number. Forbidden tokens have -inf."""
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def rough_gumbel(bits, NVIDIA: tl.constexpr):
    """Return Gumbel(0, 1) noise of 32 random bits, fp32, within 2^-10 of noise.contract.gumbel.

    This is -log E, E = -log(1 - u), u = (bits + 0.5) 2^-32. If v = 1 - u is above 1 - 2^-10, u
    approximates E.
    """
    others = (bits.to(tl.int32, bitcast=True) ^ -1).to(tl.uint32, bitcast=True)
    v = others.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    u = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    E = tl.where(v > 0.9990234375, u, _rough_log2(v, NVIDIA) * -LN_2)
    return _rough_log2(E, NVIDIA) * -LN_2


@triton.jit
def _rough_log2(x, NVIDIA: tl.constexpr):
    """Return log2 of a normal number, within 2^-22 (relative, unless x is between 0.5 and 2)."""
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )
    else:
        return tl.log2(x)


@triton.jit
def known_logits(z, tokens, vectors, row_biases, rows, B, V, bounds, soft_cap):
    """Return (y, bound): each logit is within bound of y; bound includes the slack of its score.

    A y of NaN has no bound; comparisons let it pass. Where a bias of -inf forbids a token,
    y is -inf and bound is finite unless the logit may be undefined.

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
        in_bounds = (rows < B)[:, None] & inside
        bias = tl.load(row_biases + tokens, mask=in_bounds, other=float("-inf")).to(tl.float32)
        y += bias
        bound += tl.where(tl.abs(bias) < float("inf"), tl.abs(bias) * BIAS_SLACK, 0.0)
    if soft_cap is not None:
        y = tl.where(inside, y, float("-inf"))  # the cap of the -inf there is a number
    return y, bound


@triton.jit
def larger(a, b):
    """Return the larger of two, or the one that is not NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.NONE)
