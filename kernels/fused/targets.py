"""Device code: the logits of given tokens, a row of the weight each, before the pass over it all.

A rank counts logits above the target's, so this must be known first. The order of summation is
that of device.mainloop, and with it the bits.
"""

import triton
import triton.language as tl

from fsbench.kernels.device.epilogue import capped
from fsbench.kernels.device.given import targets_of_rows
from fsbench.kernels.device.mainloop import ROTATION, first_column
from fsbench.kernels.device.quantised import converted, scaled, scales_of_tokens

TARGETS_AT_ONCE = tl.constexpr(16)
"""Targets of a program, and columns of a step times 4: the least that a matrix product takes."""


@triton.jit(do_not_specialize=["count", "V"])
def target_logits_kernel(
    hidden_ptr,  # [B, D]
    weight_ptr,  # [>= V, D]
    scale_ptr,  # [V] or [1] fp32, of a quantised weight; or None
    targets_ptr,  # [B, samples] int64
    soft_cap,
    bias_ptr,
    row_bias_ptr,
    mask_ptr,
    limits_ptr,  # [B, samples] fp32, out; 0 of a target that is none
    rank_ptr,  # [B, samples] int32, out: 0
    count,  # B samples
    V,
    D,
    mask_words,
    samples,
    SCALE_PER_ROW: tl.constexpr,
    STEP: tl.constexpr,
):
    at = tl.program_id(0) * TARGETS_AT_ONCE + tl.arange(0, TARGETS_AT_ONCE)
    target = targets_of_rows(targets_ptr, at, at < count, V)
    there = target >= 0
    token = tl.where(there, target, 0)
    row = at // samples
    width = tl.cdiv(D, ROTATION) * ROTATION
    h_row = hidden_ptr + row.to(tl.int64)[:, None] * D
    w_row = weight_ptr + token.to(tl.int64)[:, None] * D
    acc = tl.zeros((TARGETS_AT_ONCE, TARGETS_AT_ONCE), tl.float32)
    for step in range(width // STEP):
        # Each pair of rows begins at the first column of its token: the diagonal is what counts.
        column = first_column(token, D) + step * STEP
        column = tl.where(column < width, column, column - width)
        column = tl.multiple_of(column, STEP)  # which Triton 3.8 and later forget in tl.where
        columns = column[:, None] + tl.arange(0, STEP)
        inside = there[:, None] & (columns < D)
        h = tl.load(h_row + columns, mask=inside, other=0.0)
        w = tl.load(w_row + columns, mask=inside, other=0.0)
        if w.dtype != h.dtype:
            w = converted(w, h.dtype)
        acc = tl.dot(h, w.T, acc, input_precision="ieee")
    place = tl.arange(0, TARGETS_AT_ONCE)
    y = tl.sum(tl.where(place[:, None] == place[None, :], acc, 0.0), axis=1)
    if scale_ptr is not None:
        y = scaled(y, scales_of_tokens(scale_ptr, token, V, SCALE_PER_ROW))
    if soft_cap is not None:
        y = capped(y, soft_cap)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + token, mask=there, other=0.0).to(tl.float32)
    if row_bias_ptr is not None:
        y += tl.load(row_bias_ptr + row.to(tl.int64) * V + token, mask=there, other=0.0).to(
            tl.float32
        )
    if mask_ptr is not None:
        word = tl.load(mask_ptr + row.to(tl.int64) * mask_words + token // 32, mask=there, other=0)
        y = tl.where(((word >> (token & 31)) & 1) != 0, y, float("-inf"))
    tl.store(limits_ptr + at, y, mask=at < count)
    tl.store(rank_ptr + at, 0, mask=at < count)
