"""Device code of filters from the screen, fourth launch: the exact logits of the candidates.

They replace the upper bounds in the stored rows; all programs share all lists. Rows to be computed
in full get all of their logits, again by all programs. After it a row has its k largest logits, and
elsewhere what is below the kth: what truncated.select makes of it is what it makes of the logits.
"""

import triton
import triton.language as tl

from fsbench.kernels.device.epilogue import allowed_words, processed, shared_bias
from fsbench.kernels.device.mainloop import tile_logits
from fsbench.kernels.device.stored_logits import place_of_largest, store_largest, store_logits
from fsbench.kernels.noise.group import group_of_token
from fsbench.kernels.screened.exact import ask_for_rows, exact_logits, part_of_list, parts_of_lists


@triton.jit(do_not_specialize=["B", "V"])
def filter_resolve_kernel(
    hidden,  # [B, D] descriptor (USE_TMA) or pointer: for rows that are computed in full
    weight,  # [>= V, D], likewise
    hidden_ptr,  # the same as pointers: for single tokens
    weight_ptr,
    soft_cap,
    bias_ptr,
    row_bias_ptr,
    mask_ptr,
    listed_ptr,  # [B] int32, [B, LIST] int32: of the third launch
    list_ptr,
    found_ptr,  # [B] int32, out: candidates; -1 for a row that is computed in full
    logits_ptr,  # [B, stride] fp32: upper bounds; out: logits of candidates, or of whole rows
    largest_ptr,  # [stride // 128, B, 4] fp32; out: the largest of each group as it is then
    B,
    V,
    D,
    stride,
    mask_words,
    POWER_B: tl.constexpr,  # a power of two, at least B
    LIST: tl.constexpr,
    AT_ONCE: tl.constexpr,  # this and what follows: as in screened.resolve
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    IN_BULK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,  # a multiple of 128
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    every = tl.arange(0, POWER_B)
    number = tl.load(listed_ptr + every, mask=every < B, other=0)
    if tl.program_id(0) == 0:
        tl.store(found_ptr + every, tl.where(number > LIST, -1, number), mask=every < B)
    entries, size, parts, ends = parts_of_lists(number, LIST, 4, AT_ONCE)
    for part in range(tl.program_id(0), tl.sum(parts, 0), tl.num_programs(0)):
        b, first, end = part_of_list(part, every, entries, size, parts, ends)
        i = first + tl.arange(0, AT_ONCE)
        there = i < end
        token = tl.load(list_ptr + b.to(tl.int64) * LIST + i, mask=there, other=0)
        if IN_BULK:
            ask_for_rows(weight_ptr + token.to(tl.int64) * D, there, D)
        y = exact_logits(
            hidden_ptr, weight_ptr, soft_cap, bias_ptr, row_bias_ptr, b, token, there, V, D, BLOCKS,
            STEP, EVEN, False,
        )  # fmt: skip
        tl.store(logits_ptr + b.to(tl.int64) * stride + token, y, mask=there)
        # Without a sign, so that the maximum of the bits is a NaN where there is one.
        y = tl.where(y == y, y, float("nan"))
        place = place_of_largest(group_of_token(token), b, B)
        tl.atomic_max(largest_ptr + place, y, mask=there, sem="relaxed")
    if tl.max(number, 0) > LIST:
        for block in range(0, tl.cdiv(B, BLOCK_B)):
            rows = block * BLOCK_B + tl.arange(0, BLOCK_B)
            full = tl.load(listed_ptr + rows, mask=rows < B, other=0) > LIST
            if tl.max(full.to(tl.int32), 0) > 0:
                _store_in_full(
                    hidden, weight, soft_cap, bias_ptr, row_bias_ptr, mask_ptr, logits_ptr,
                    largest_ptr, block * BLOCK_B, rows, full, B, V, D, stride, mask_words,
                    BLOCK_B, BLOCK_V, BLOCK_D, USE_TMA,
                )  # fmt: skip


@triton.jit
def _store_in_full(hidden, weight, soft_cap, bias_ptr, row_bias_ptr, mask_ptr, logits_ptr,
                   largest_ptr, b0, rows, full, B, V, D, stride, mask_words, BLOCK_B: tl.constexpr,
                   BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
                   USE_TMA: tl.constexpr):  # fmt: skip
    """This program's tiles of the logits of a block of rows; only those of `full` are stored."""
    stored = tl.where(full, rows, B)  # what is from B on is not
    for tile_v in tl.range(tl.program_id(0), tl.cdiv(V, BLOCK_V), tl.num_programs(0)):
        v0 = tile_v * BLOCK_V
        words = None
        if mask_ptr is not None:
            words = allowed_words(mask_ptr, rows, v0, B, V, mask_words, BLOCK_V)
        bias = None
        if bias_ptr is not None:
            bias = shared_bias(bias_ptr, v0, V, BLOCK_V)
        logits = tile_logits(
            hidden, weight, b0, v0, v0, B, V, D, BLOCK_B, BLOCK_V, BLOCK_D, True, USE_TMA
        )
        logits = processed(logits, rows, v0, B, V, soft_cap, bias, row_bias_ptr, words)
        store_logits(logits_ptr, logits, stored, v0, B, stride)
        store_largest(largest_ptr, logits, stored, v0, B, stride)
