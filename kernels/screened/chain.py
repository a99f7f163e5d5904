"""Device code: dot products of single rows by one instruction after the other, in registers.

A warp has eight of them side by side on the diagonal of its tensor-core instruction: rows of the
weight are rows of one operand, rows of hidden are columns of the other, and both begin where the
sum of the token does. Nothing passes through shared memory and no warp waits for another, so a sum
takes little more than the latency of D / 16 dependent instructions.
"""

import triton
import triton.language as tl

UNIT = tl.constexpr(256)
"""Columns that are in registers together; twice: one part is loaded while another is added."""
LANES = tl.constexpr(4)
"""Lanes of a warp that have a product."""


def _instructions(kind: str) -> str:
    """PTX of a warp's eight products: $0 = of the lane's column; $1, $2: pointers to both rows.

    $3: the first column, a multiple of UNIT. $4: columns, likewise. $5: the element's number. A
    lane has four of 16 columns: the instruction adds its 16 products at once, so which lane has
    which does not matter.
    """
    steps = UNIT.value // 16
    lines = [
        ".reg .pred more, last, odd;",
        ".reg .b64 at, to;",
        ".reg .b32 zero, left, col, lane, held;",
        ".reg .f32 c<4>;",
        *(f".reg .b32 {part}{row}<{2 * steps}>;" for part in "pq" for row in "wh"),
        # Products of other lanes would be wrong: an element must be in its own.
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
            f"ld.global.v2.b32 {{{part}{row}{2 * i}, {part}{row}{2 * i + 1}}}, [{at}+{32 * i}];"
            for row, at in (("w", "at"), ("h", "to"))
        ]

    def add(part: str, i: int) -> str:
        sums = "{c0, c1, c2, c3}"
        return (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {sums}, "
            f"{{{part}w{2 * i}, zero, {part}w{2 * i + 1}, zero}}, "
            f"{{{part}h{2 * i}, {part}h{2 * i + 1}}}, {sums};"
        )

    def turn(part: str, other: str) -> list[str]:
        """Add a part, and load it anew unless no more than the other one is left."""
        with_loads = [x for i in range(steps) for x in (add(part, i), *load(part, i))]
        return [
            "setp.le.u32 last, left, 2;",
            f"@last bra end_{part};",
            "sub.u32 left, left, 1;",
            *address(),
            *with_loads,
        ]

    def rest(part: str, other: str) -> list[str]:
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
    lines += ["again:", *turn("p", "q"), *turn("q", "p"), "bra again;"]
    lines += [*rest("p", "q"), *rest("q", "p"), "done:"]
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
    """hidden . weight of rows [R], fp32, each from its column `first` on, round at D.

    R is eight for each warp of the program, D a multiple of UNIT. hidden_row: a pointer.
    weight_rows: pointers [R].
    """
    R: tl.constexpr = weight_rows.shape[0]
    # Four lanes for each; one of them has the sum.
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
    own = lane == (tl.arange(0, R) % 8 // 2)[:, None]
    return tl.sum(tl.where(own, sums.reshape(R, LANES), 0.0), axis=1)


@triton.jit
def _flat(x, R: tl.constexpr):
    """[R, LANES] -> [R * LANES]: four lanes of a warp side by side."""
    if x.dtype.is_ptr():
        x = x.to(tl.int64)
    return x.reshape(R * LANES)
