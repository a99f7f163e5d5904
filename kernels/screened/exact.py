"""Device code: exact logits of single tokens, and how programs share lists of them."""

import triton
import triton.language as tl

from fsbench.kernels.device.epilogue import capped
from fsbench.kernels.device.mainloop import ROTATION, first_column
from fsbench.kernels.screened.chain import products


@triton.jit
def parts_of_lists(number, LIST: tl.constexpr, least: tl.constexpr, most: tl.constexpr):
    """How lists are cut into parts, for part_of_list: (entries, size, parts, ends).

    Args:
        number: of entries on each list, int32; above LIST, where the list is too short, it has no
            part. least, most: entries of a part.

    Returns:
        entries, parts: of each list. size: entries of a part. ends: parts of this list and those
            before it.
    """
    entries = tl.where(number > LIST, 0, number)
    # Few are spread over all programs; with many, half of the programs have a part.
    size = tl.minimum(tl.maximum(2 * tl.sum(entries, 0) // tl.num_programs(0), least), most)
    parts = (entries + size - 1) // size
    return entries, size, parts, tl.cumsum(parts, 0)


@triton.jit
def part_of_list(part, every, entries, size, parts, ends):
    """(list, first entry, end) of a part.

    every: int32, 0, 1, ... for the lists. others: of parts_of_lists.
    """
    b = tl.sum((ends <= part).to(tl.int32), 0)
    first = tl.sum(tl.where(every == b, part - (ends - parts), 0), 0) * size
    return b, first, tl.minimum(first + size, tl.sum(tl.where(every == b, entries, 0), 0))


@triton.jit
def exact_logits(hidden_ptr, weight_ptr, soft_cap, bias_ptr, row_bias_ptr, b, token, there, V, D,
                 BLOCKS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
                 BY_WARPS: tl.constexpr):  # fmt: skip
    """The logits of tokens [R] of row b, fp32, as a fused kernel has them before the mask.

    there: which of them exist; tokens are 0 where not.
    BY_WARPS: every warp has eight of the tokens; see screened.chain.
    """
    if BY_WARPS:
        rows = weight_ptr + token.to(tl.int64) * D
        y = products(hidden_ptr + b.to(tl.int64) * D, rows, first_column(token, D), D)
    else:
        y = _single_logits(hidden_ptr, weight_ptr, b, token, there, D, BLOCKS, STEP, EVEN)
    if soft_cap is not None:
        y = capped(y, soft_cap)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + token).to(tl.float32)
    if row_bias_ptr is not None:
        y += tl.load(row_bias_ptr + b.to(tl.int64) * V + token).to(tl.float32)
    return y


@triton.jit
def ask_for_rows(row, there, D):
    """Bring the rows of the weight at pointers `row`, where `there`, into the L2.

    One instruction a row, and nothing waits for it; the loop over columns would ask for a few
    steps at a time. For compute capability 9.0 and later, and rows that TMA could load.
    """
    BYTES: tl.constexpr = row.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $2, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $3;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r",
        [row.to(tl.int64), there.to(tl.int32), D * BYTES],
        tl.int32,
        False,
        1,
    )


@triton.jit
def _single_logits(hidden_ptr, weight_ptr, b, token, there, D, BLOCKS: tl.constexpr,
                   STEP: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """hidden[b] . weight[token] of tokens [R], fp32, in the order of tile_logits.

    Tokens begin their sums at blocks of 256 columns of their own. So the other operand is hidden
    from every block on, and a token's logit is the element of the product that began where it did.
    """
    R: tl.constexpr = token.shape[0]
    block = tl.arange(0, BLOCKS)
    width = D if EVEN else tl.cdiv(D, ROTATION) * ROTATION
    first = first_column(token, D)
    d = tl.arange(0, STEP)[None, :]
    h_row = hidden_ptr + b.to(tl.int64) * D
    w_row = weight_ptr + token.to(tl.int64)[:, None] * D
    acc = tl.zeros((R, BLOCKS), tl.float32)
    for step in range(width // STEP):
        w_col = first + step * STEP
        # Triton 3.8 and later forget in tl.where that all is a multiple of STEP, which divides the
        # unit that columns begin at.
        w_col = tl.multiple_of(tl.where(w_col < width, w_col, w_col - width), STEP)
        w_cols = w_col[:, None] + d
        h_col = block * ROTATION + step * STEP
        h_col = tl.multiple_of(tl.where(h_col < width, h_col, h_col - width), STEP)
        h_cols = h_col[:, None] + d
        w_there = there[:, None]
        h_there = (block * ROTATION < width)[:, None]
        if not EVEN:
            w_there &= w_cols < D
            h_there &= h_cols < D
        w = tl.load(w_row + w_cols, mask=w_there, other=0.0)
        h = tl.load(h_row + h_cols, mask=h_there, other=0.0)
        acc = tl.dot(w, h.T, acc, input_precision="ieee")
    own = (first // ROTATION)[:, None] == block[None, :]
    return tl.sum(tl.where(own, acc, 0.0), axis=1)
