"""Device code of filters from the screen, first launch: the largest that every logit may be.

The screen of screened.portable without noise and without records. It stores the upper bound of each
logit where the fused kernel would store the logit, with the largest of every group of 32.
"""

import triton
import triton.language as tl

from fsbench.kernels.device.epilogue import allowed_words, masked
from fsbench.kernels.device.mainloop import program_share
from fsbench.kernels.device.prefetch import touch
from fsbench.kernels.device.stored_logits import store_largest, store_logits
from fsbench.kernels.screened.ends import ABSOLUTE_SLACK, CAP_SLACK, known_logits
from fsbench.kernels.screened.portable import prefetch_tile, screened_logits
from fsbench.kernels.screened.rounding import round_claimed_rows, wait_for_rows


@triton.jit(do_not_specialize=["B", "V"])
def filter_screen_kernel(
    hidden_ptr,  # [B, D]
    codes_ptr,  # [blocks of rows * 2 * BLOCK_B, D] int8, scratch; see code_row
    codes,  # the same, descriptor (USE_TMA) or pointer
    copy_ptr,  # [V, D] int8
    copy,  # the same, descriptor (USE_TMA) or pointer
    scale_ptr,  # [V] fp32
    residual_ptr,  # [V] fp32
    norm_ptr,  # [V] fp32
    numbers_ptr,  # [ROW_NUMBERS, B] fp32, scratch
    soft_cap,  # fp32 or None
    bias_ptr,  # [V] or None
    row_bias_ptr,  # [B, V] or None
    mask_ptr,  # [B, mask_words] int32, or None
    counters_ptr,  # CLAIMED, ROUNDED; 0 at first, put back to it by the second launch
    found_ptr,  # [B] int32, out: 0
    logits_ptr,  # [B, stride] fp32, out: upper bounds, +inf where there is none
    largest_ptr,  # [stride // 128, B, 4] fp32, out: the largest of each group
    B,
    V,
    D,
    stride,
    gamma,  # this and the next: as in screened.portable
    norm_inflation,
    root,
    mask_words,
    UNIT: tl.constexpr,
    ROUNDED_AT_ONCE: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,  # a multiple of 128
    BLOCK_D: tl.constexpr,
    V_ON_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    NVIDIA: tl.constexpr,
    FENCED: tl.constexpr,
):
    if UNIT < 16:
        D = D // UNIT * UNIT
    pid_b, pid_v, programs_v = program_share(B, BLOCK_B)
    if USE_TMA and NVIDIA:
        prefetch_tile(copy_ptr, pid_v * BLOCK_V, V, D, BLOCK_V, AHEAD)
    cols = tl.arange(0, ROUNDED_AT_ONCE)
    round_claimed_rows(
        hidden_ptr, codes_ptr, numbers_ptr, found_ptr, counters_ptr, cols, B, D, gamma,
        norm_inflation, root, FENCED,
    )  # fmt: skip
    wait_for_rows(counters_ptr, B, FENCED)
    rows = pid_b * BLOCK_B + tl.arange(0, BLOCK_B)
    step = tl.load(numbers_ptr + rows, mask=rows < B, other=0.0)[:, None]
    reach = tl.load(numbers_ptr + B + rows, mask=rows < B, other=0.0)[:, None]
    spread = tl.load(numbers_ptr + 2 * B + rows, mask=rows < B, other=0.0)[:, None]
    extra = tl.full((1, 1), 2 * ABSOLUTE_SLACK, tl.float32)
    if soft_cap is not None:
        extra += soft_cap * CAP_SLACK
    bounds = (0.0, 0.0, extra, reach, spread)
    # What is absent is an empty tuple, as None cannot be in one.
    vectors = (scale_ptr, residual_ptr, norm_ptr, () if bias_ptr is None else (bias_ptr,))
    row_biases = None
    if row_bias_ptr is not None:
        row_biases = row_bias_ptr + rows.to(tl.int64)[:, None] * V
    for tile_v in tl.range(pid_v, tl.cdiv(V, BLOCK_V), programs_v, flatten=FLATTEN):
        v0 = tile_v * BLOCK_V
        words = None
        if mask_ptr is not None:
            words = allowed_words(mask_ptr, rows, v0, B, V, mask_words, BLOCK_V)
        line = tl.minimum(v0 + tl.arange(0, BLOCK_V // 8) * 8, V - 1)
        touch(scale_ptr + line, NVIDIA)
        touch(residual_ptr + line, NVIDIA)
        touch(norm_ptr + line, NVIDIA)
        z = screened_logits(
            codes, copy, pid_b, v0, V, D, BLOCK_B, BLOCK_V, BLOCK_D, V_ON_M, USE_TMA
        )
        token = (v0 + tl.arange(0, BLOCK_V))[None, :]
        y, bound = known_logits(
            z * step, token, vectors, row_biases, rows, B, V, bounds, soft_cap
        )  # fmt: skip
        upper = y + bound
        upper = tl.where(upper == upper, upper, float("inf"))  # where there is no bound
        if mask_ptr is not None:
            upper = masked(upper, words)
        upper = tl.where(token < V, upper, float("-inf"))
        store_logits(logits_ptr, upper, rows, v0, B, stride)
        store_largest(largest_ptr, upper, rows, v0, B, stride)
