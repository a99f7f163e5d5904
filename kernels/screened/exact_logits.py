"""Device code: exact logits of single tokens, and how programs share lists of tokens.

Two forms compute the logits. `_single_logits` is a matrix product in the order of tile_logits.
`products` computes single rows by mma.sync: a warp has eight rows on the diagonal of its
tensor-core instruction, rows of the weight are rows of one operand and rows of hidden are columns
of the other, and both begin at the column where the token's sum begins. Nothing passes through
shared memory and no warp waits for another, so a sum takes little more than the latency of D / 16
dependent instructions.
"""

import triton
import triton.language as tl

from fsbench.kernels.device.epilogue import capped
from fsbench.kernels.device.mainloop import ROTATION, first_column
from fsbench.kernels.device.rows import noise_of_rows
from fsbench.kernels.noise.contract import bits_of_tokens, gumbel, temperatures


@triton.jit
def parts_of_lists(number, LIST: tl.constexpr, least: tl.constexpr, most: tl.constexpr):
    """Return how lists are cut into parts, for part_of_list: (entries, size, parts, ends).

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
    """Return (list, first entry, end) of a part.

    every: int32, 0, 1, ... for the lists. others: from parts_of_lists.
    """
    b = tl.sum((ends <= part).to(tl.int32), 0)
    first = tl.sum(tl.where(every == b, part - (ends - parts), 0), 0) * size
    return b, first, tl.minimum(first + size, tl.sum(tl.where(every == b, entries, 0), 0))


@triton.jit
def exact_scores(request, sizes, b, token, exists, NOISE: tl.constexpr, SEED_PER_ROW: tl.constexpr,
                 OFFSET_PER_ROW: tl.constexpr, TEMPERATURE_PER_ROW: tl.constexpr,
                 BLOCKS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
                 IN_BULK: tl.constexpr, BY_WARPS: tl.constexpr):  # fmt: skip
    """Return the scores of tokens [R] of row b, fp32, as a fused kernel has them before the mask.

    Args:
        request: (hidden, weight, seed, offset, temperature, soft cap, bias, bias of rows), as the
            arguments of resolve_kernel. sizes: (V, D).
        exists: which of the tokens exist; the others are 0.
        IN_BULK: whether whole rows are asked for at once, by ask_for_rows.
        others: as in exact_logits.
    """
    hidden_ptr, weight_ptr, _, _, _, soft_cap, bias_ptr, row_bias_ptr = request
    V, D = sizes
    if IN_BULK:
        ask_for_rows(weight_ptr + token.to(tl.int64) * D, exists, D)
    # The noise is computed while the rows are loaded.
    if NOISE == "token":
        g, _ = noise_of_tokens(
            request, b, token, NOISE, SEED_PER_ROW, OFFSET_PER_ROW, TEMPERATURE_PER_ROW
        )
    y = exact_logits(
        hidden_ptr, weight_ptr, soft_cap, bias_ptr, row_bias_ptr, b, token, exists, V, D, BLOCKS,
        STEP, EVEN, BY_WARPS,
    )  # fmt: skip
    if NOISE == "token":
        y += g
    return tl.where(y == y, y, float("inf"))


@triton.jit
def noise_of_tokens(request, b, token, NOISE: tl.constexpr, SEED_PER_ROW: tl.constexpr,
                    OFFSET_PER_ROW: tl.constexpr, TEMPERATURE_PER_ROW: tl.constexpr):  # fmt: skip
    """Return (T g, T): the noise in the scores of tokens [R] of row b, and the temperature.

    request: as in exact_scores. Without noise, T g is 0.
    """
    _, _, seed_ptr, offset_ptr, temperature, _, _, _ = request
    T = tl.load(temperature + b) if TEMPERATURE_PER_ROW else tl.full((), temperature, tl.float32)
    T, _ = temperatures(T)
    g = 0.0
    if NOISE == "token":
        seed, offset, row = noise_of_rows(
            seed_ptr, offset_ptr, b, None, SEED_PER_ROW, OFFSET_PER_ROW
        )
        g = T * gumbel(bits_of_tokens(token, row, seed, offset))
    return g, T


@triton.jit
def exact_logits(hidden_ptr, weight_ptr, soft_cap, bias_ptr, row_bias_ptr, b, token, exists, V, D,
                 BLOCKS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
                 BY_WARPS: tl.constexpr):  # fmt: skip
    """Return the logits of tokens [R] of row b, fp32, as a fused kernel has them before the mask.

    exists: which of the tokens exist; the others are 0.
    BY_WARPS: every warp has eight of the tokens and computes them by `products`.
    """
    if BY_WARPS:
        rows = weight_ptr + token.to(tl.int64) * D
        y = products(hidden_ptr + b.to(tl.int64) * D, rows, first_column(token, D), D)
    else:
        y = _single_logits(hidden_ptr, weight_ptr, b, token, exists, D, BLOCKS, STEP, EVEN)
    y, _ = with_options(y, soft_cap, bias_ptr, row_bias_ptr, b, token, V)
    return y


@triton.jit
def with_options(y, soft_cap, bias_ptr, row_bias_ptr, b, token, V):
    """Return (logits of tokens [R] of row b with soft cap and bias, the bias)."""
    bias = 0.0
    if soft_cap is not None:
        y = capped(y, soft_cap)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + token).to(tl.float32)
        y += bias
    if row_bias_ptr is not None:
        bias = tl.load(row_bias_ptr + b.to(tl.int64) * V + token).to(tl.float32)
        y += bias
    return y, bias


@triton.jit
def ask_for_rows(row, exists, D):
    """Prefetch the rows of the weight at pointers `row`, where `exists`, into the L2.

    This is one instruction a row, and nothing waits for it; the loop over columns would ask for a
    few steps at a time. It needs compute capability 9.0 and rows that TMA could load.
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
        [row.to(tl.int64), exists.to(tl.int32), D * BYTES],
        tl.int32,
        False,
        1,
    )


@triton.jit
def _single_logits(hidden_ptr, weight_ptr, b, token, exists, D, BLOCKS: tl.constexpr,
                   STEP: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Return hidden[b] . weight[token] of tokens [R], fp32, in the order of tile_logits.

    Each token begins its sum at another block of 256 columns. So the other operand is hidden from
    every block on, and a token's logit is the element of the product that began at its block.
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
        w_mask = exists[:, None]
        h_mask = (block * ROTATION < width)[:, None]
        if not EVEN:
            w_mask &= w_cols < D
            h_mask &= h_cols < D
        w = tl.load(w_row + w_cols, mask=w_mask, other=0.0)
        h = tl.load(h_row + h_cols, mask=h_mask, other=0.0)
        acc = tl.dot(w, h.T, acc, input_precision="ieee")
    is_own_block = (first // ROTATION)[:, None] == block[None, :]
    return tl.sum(tl.where(is_own_block, acc, 0.0), axis=1)


UNIT = tl.constexpr(256)
"""Columns of a part. Two parts are in registers: one is loaded while the other is added."""
LANES = tl.constexpr(4)
"""Lanes of a warp that have a product."""


def _instructions(kind: str) -> str:
    """Return the PTX of a warp's eight products.

    $0: the product of the lane's column, out. $1, $2: pointers to both rows. $3: the first column.
    $4: the number of columns. Both are multiples of UNIT. $5: the element's number. A lane has four
    of 16 columns. The instruction adds its 16 products at once, so it does not matter which lane
    has which columns.
    """
    steps = UNIT.value // 16
    lines = [
        ".reg .pred more, last, odd;",
        ".reg .b64 at, to;",
        ".reg .b32 zero, left, col, lane, held;",
        ".reg .f32 c<4>;",
        *(f".reg .b32 {part}{row}<{2 * steps}>;" for part in "pq" for row in "wh"),
        # Trap if an element is not in its lane: products of other lanes would be wrong.
        "mov.u32 lane, %laneid;",
        "and.b32 held, $5, 31;",
        "setp.ne.u32 odd, lane, held;",
        "@odd trap;",
        "mov.b32 zero, 0;",
        *(f"mov.f32 c{i}, 0f00000000;" for i in range(4)),
        "mov.u32 col, $3;",
        "shr.u32 left, $4, 8;",
    ]

    def address() -> list[str]:
        return [
            "mul.wide.u32 at, col, 2;",
            "add.s64 to, at, $2;",
            "add.s64 at, at, $1;",
            f"add.u32 col, col, {UNIT.value};",
            "setp.ge.u32 last, col, $4;",
            "@last sub.u32 col, col, $4;",
        ]

    def load(part: str, i: int) -> list[str]:
        return [
            f"ld.global.v2.b32 {{{part}{row}{2 * i}, {part}{row}{2 * i + 1}}}, [{base}+{32 * i}];"
            for row, base in (("w", "at"), ("h", "to"))
        ]

    def add(part: str, i: int) -> str:
        sums = "{c0, c1, c2, c3}"
        return (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {sums}, "
            f"{{{part}w{2 * i}, zero, {part}w{2 * i + 1}, zero}}, "
            f"{{{part}h{2 * i}, {part}h{2 * i + 1}}}, {sums};"
        )

    def loop_part(part: str, other: str) -> list[str]:
        """Add a part and load the next columns into it, unless only the other part remains."""
        with_loads = [x for i in range(steps) for x in (add(part, i), *load(part, i))]
        return [
            "setp.le.u32 last, left, 2;",
            f"@last bra end_{part};",
            "sub.u32 left, left, 1;",
            *address(),
            *with_loads,
        ]

    def last_part(part: str, other: str) -> list[str]:
        return [
            f"end_{part}:",
            *(add(part, i) for i in range(steps)),
            "setp.eq.u32 last, left, 1;",
            "@last bra done;",
            *(add(other, i) for i in range(steps)),
            *(["bra done;"] if part == "p" else []),
        ]

    lines += address()
    lines += [x for i in range(steps) for x in load("p", i)]
    lines += ["setp.eq.u32 last, left, 1;", "@last bra end_p;"]
    lines += address()
    lines += [x for i in range(steps) for x in load("q", i)]
    lines += ["again:", *loop_part("p", "q"), *loop_part("q", "p"), "bra again;"]
    lines += [*last_part("p", "q"), *last_part("q", "p"), "done:"]
    lines += [
        "and.b32 lane, lane, 4;",
        "setp.ne.u32 odd, lane, 0;",
        "selp.f32 $0, c1, c0, odd;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


BF16 = tl.constexpr(_instructions("bf16"))
FP16 = tl.constexpr(_instructions("f16"))


@triton.jit
def products(hidden_row, weight_rows, first, D):
    """Return hidden . weight of rows [R], fp32, each from column `first` on, wrapping at D.

    R is eight for each warp of the program, D a multiple of UNIT. hidden_row: a pointer.
    weight_rows: pointers [R].
    """
    R: tl.constexpr = weight_rows.shape[0]
    # Each row has four lanes; one of them has the sum.
    lane = tl.arange(0, LANES)[None, :]
    weight = _flat(weight_rows[:, None] + 4 * lane, R)
    hidden = _flat(hidden_row + (first * 0)[:, None] + 4 * lane, R)
    begin = _flat(first[:, None] + 0 * lane, R)
    number = tl.arange(0, R * LANES)
    if weight_rows.dtype.element_ty == tl.bfloat16:
        sums = tl.inline_asm_elementwise(
            BF16, "=f,l,l,r,r,r", [weight, hidden, begin, D, number], tl.float32, False, 1
        )
    else:
        sums = tl.inline_asm_elementwise(
            FP16, "=f,l,l,r,r,r", [weight, hidden, begin, D, number], tl.float32, False, 1
        )
    has_sum = lane == (tl.arange(0, R) % 8 // 2)[:, None]
    return tl.sum(tl.where(has_sum, sums.reshape(R, LANES), 0.0), axis=1)


@triton.jit
def _flat(x, R: tl.constexpr):
    """Flatten [R, LANES] to [R * LANES], four neighboring lanes of a warp for each row."""
    if x.dtype.is_ptr():
        x = x.to(tl.int64)
    return x.reshape(R * LANES)
