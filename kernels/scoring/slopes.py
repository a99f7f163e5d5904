"""One launch between the matrix products of a chunk of a gradient: from its logits to d logits.

With x the logits of the product, c the soft cap, y the logits after soft cap, bias and mask, and of
a row T, log Z, its entropy H, and the factors a, b and g / T that gradient.py makes:

    d y[v] = exp(y[v] / T - log Z) (a - b (y[v] / T - log Z + H)) + sum of g / T over targets v
    d x[v] = d y[v] (1 - tanh(x[v] / c)^2)

0 where y[v] / T - log Z is not finite: the token is forbidden, or the row undefined.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsbench import reference
from fsbench.kernels.configs.gpu import launching_on
from fsbench.kernels.device.epilogue import capped
from fsbench.kernels.launch.launch_cache import launch_kernel
from fsbench.kernels.launch.request import Request

BLOCK = 1024  # tokens per program


@triton.jit(do_not_specialize=["first", "tokens"])
def _score_slopes_kernel(
    logits_ptr,  # [rows, tokens] fp32
    numbers_ptr,  # [rows, WIDTH] fp32
    targets_ptr,  # [rows, n] int64
    g_ptr,  # [rows, n] fp32
    bias_ptr,  # [rows, tokens], any float dtype; or None
    mask_ptr,  # bool [rows, tokens], or int32 words of 32 tokens; or None
    d_ptr,  # [rows, tokens], out
    soft_cap,  # fp32 or None
    first,  # token of the chunk
    tokens,
    n,
    stride,  # of rows of logits and d
    bias_stride,  # of its rows; 0 if all share one
    mask_stride,
    WIDTH: tl.constexpr,  # 3, or 5 with an entropy's gradient
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = token < tokens
    y = tl.load(logits_ptr + row * stride + token, mask=there, other=0.0)
    slope = 1.0
    if soft_cap is not None:
        y = capped(y, soft_cap)
        slope = 1.0 - (y / soft_cap) * (y / soft_cap)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row * bias_stride + token, mask=there, other=0.0).to(tl.float32)
    if mask_ptr is not None:
        if PACKED:
            words = tl.load(mask_ptr + row * mask_stride + token // 32, mask=there, other=0)
            allowed = ((words >> (token % 32)) & 1) != 0
        else:
            allowed = tl.load(mask_ptr + row * mask_stride + token, mask=there, other=0) != 0
        y = tl.where(allowed, y, float("-inf"))
    numbers_ptr += row * WIDTH
    logp = y * tl.load(numbers_ptr) - tl.load(numbers_ptr + 1)
    factor = tl.load(numbers_ptr + 2)
    if WIDTH == 5:
        factor -= tl.load(numbers_ptr + 4) * (logp + tl.load(numbers_ptr + 3))
    d = tl.exp(logp) * factor
    for i in range(n):
        target = tl.load(targets_ptr + row * n + i) - first
        d += tl.where(token == target, tl.load(g_ptr + row * n + i), 0.0)
    kept = (logp > float("-inf")) & (logp < float("inf"))
    d = tl.where(kept, d * slope, 0.0)
    tl.store(d_ptr + row * stride + token, d.to(d_ptr.dtype.element_ty), mask=there)


def of_chunk(request: Request, rows: slice, tokens: slice) -> Request:
    """The request of a score with targets, bias and mask of these rows and tokens alone."""
    bias, mask = request.bias, request.mask
    if bias is not None:
        bias = bias[rows, tokens] if bias.ndim == 2 else bias[tokens]
    if mask is not None:
        size = 1 if mask.dtype == torch.bool else 32
        mask = mask[rows, tokens.start // size : -(-tokens.stop // size)]
    return request._replace(seed=request.seed[rows], bias=bias, mask=mask)


def slopes(
    logits: Tensor, chunk: Request, first: int, numbers: Tensor, g: Tensor, d: Tensor
) -> None:
    """Write d, of the shape and the stride of logits, fp32 [rows, tokens], in its own dtype.

    Args:
        chunk: of of_chunk. first: its first token.
        numbers: fp32 [rows, 3 or 5]: 1/T, log Z, a; and H, b where the entropy has a gradient.
        g: fp32 [rows, n], g / T; 0 where a target does not count.
    """
    bias, mask = chunk.bias, chunk.mask
    rows, tokens = logits.shape
    with launching_on(logits.device):
        launch_kernel(
            _score_slopes_kernel,
            logits.device,
            (rows, triton.cdiv(tokens, BLOCK)),
            logits_ptr=logits,
            numbers_ptr=numbers,
            targets_ptr=chunk.seed,
            g_ptr=g,
            bias_ptr=bias,
            mask_ptr=mask,
            d_ptr=d,
            soft_cap=chunk.soft_cap,
            first=first,
            tokens=tokens,
            n=g.shape[1],
            stride=logits.stride(0),
            bias_stride=0 if bias is None or bias.ndim == 1 else bias.stride(0),
            mask_stride=0 if mask is None else mask.stride(0),
            WIDTH=numbers.shape[1],
            PACKED=mask is not None and mask.dtype != torch.bool,
            BLOCK=BLOCK,
        )


def slopes_by_torch(
    logits: Tensor, chunk: Request, first: int, numbers: Tensor, g: Tensor, d: Tensor
) -> Tensor:
    """What slopes writes; returns the gradient of y, which is that of the bias, in fp32."""
    inverse, logz, factor, *of_entropy = numbers.split(1, 1)
    y = reference.processed_logits(
        logits, soft_cap=chunk.soft_cap, bias=chunk.bias, mask=chunk.mask
    )
    logp = y * inverse - logz
    nothing = ~logp.isfinite()
    if of_entropy:
        entropy, b = of_entropy
        factor = factor - b * (logp + entropy)
    d_y = logp.exp_().mul_(factor)
    here = chunk.seed - first
    inside = (here >= 0) & (here < d_y.shape[1])
    d_y.scatter_add_(1, here.where(inside, 0), g.where(inside, 0.0)).masked_fill_(nothing, 0.0)
    slope = 1.0 if chunk.soft_cap is None else 1.0 - logits.div_(chunk.soft_cap).tanh_().square_()
    d.copy_((d_y * slope).masked_fill_(nothing, 0.0))
    return d_y
