"""Device code of the screen: round hidden to two bytes, and add up the products of both.

Programs claim rows. So a program waits only for programs that already run, and the launch ends even
if other work keeps programs from starting. `screened.bounds.screen_hidden` is the same in torch;
docs/guide/screened-head.md proves it.
"""

import triton
import triton.language as tl

from fsbench.kernels.device.mainloop import prefetch
from fsbench.kernels.noise.arithmetic import nan_max
from fsbench.kernels.screened import bounds as in_torch
from fsbench.kernels.screened.bounds import accumulation_error
from fsbench.kernels.screened.int8_copy import LARGEST_ENTRY as _LARGEST_ENTRY
from fsbench.kernels.screened.int8_copy import SMALLEST_MAXIMUM as _SMALLEST_MAXIMUM

LARGEST_ENTRY = tl.constexpr(_LARGEST_ENTRY)
LARGEST_STEPS = tl.constexpr(float(in_torch.LARGEST_STEPS))
SMALLEST_MAXIMUM = tl.constexpr(_SMALLEST_MAXIMUM)
INFLATION = tl.constexpr(in_torch.INFLATION)
ROUNDING = tl.constexpr(in_torch.ROUNDING)
ROW_NUMBERS = tl.constexpr(3)
"""step, reach and spread of a row, one after the other."""
CLAIMED = tl.constexpr(0)
"""Counter: rows of hidden that programs have claimed."""
ROUNDED = tl.constexpr(1)
"""Counter: rows of hidden that are rounded."""
ARRIVED = tl.constexpr(2)
"""Counter: programs of the second launch that are done."""
LEADING = tl.constexpr(3)
"""Counter: rows whose leader programs have claimed."""
LED = tl.constexpr(4)
"""Counter: rows whose leader is computed and whose list is shortened."""


@triton.jit
def code_row(b, part):
    """Return the row of the codes with the high (part 0) or low bytes (1) of row b of hidden.

    The high bytes of eight rows are followed by their low bytes. So a thread that gets the sum of
    the high bytes from the tensor core gets that of the low bytes, too.
    """
    return b // 8 * 16 + part * 8 + b % 8


@triton.jit
def _round_row(hidden_ptr, codes_ptr, numbers_ptr, cols, b, B, D, gamma, norm_inflation, root):
    """Store row b of hidden as two bytes, and its step, reach and spread (bounds.screen_hidden).

    Args:
        hidden_ptr: [B, D]. codes_ptr: int8 [blocks of rows * 2 BLOCK_B, D]; see code_row.
        numbers_ptr: fp32 [ROW_NUMBERS, B]. gamma: accumulation_error(D).
        norm_inflation: 1 + (D + 4) 2^-24. root: sqrt(D).
        cols: int32, 0, 1, ...: the columns of a step.
    """
    AT_ONCE: tl.constexpr = cols.shape[0]
    row = hidden_ptr + b.to(tl.int64) * D
    nothing = (cols * 0).to(tl.float32)
    largest = nothing
    for d in range(0, D, AT_ONCE):
        h = tl.load(row + d + cols, mask=d + cols < D, other=0.0).to(tl.float32)
        largest = nan_max(largest, tl.abs(h))
    top = tl.reduce(largest, 0, nan_max)
    screened = top <= LARGEST_ENTRY  # False for NaN
    rounded = screened & (top >= SMALLEST_MAXIMUM)
    unit = tl.where(rounded, top, 1.0)
    inverse = 1.0 / unit
    squares = nothing
    errors = nothing
    high_row = codes_ptr + code_row(b, 0).to(tl.int64) * D
    low_row = codes_ptr + code_row(b, 1).to(tl.int64) * D
    for d in range(0, D, AT_ONCE):
        in_bounds = d + cols < D
        h = tl.load(row + d + cols, mask=in_bounds, other=0.0).to(tl.float32)
        x = tl.where(rounded, h, 0.0) * inverse
        # Any integer near enough would do: the error is measured, not assumed.
        code = tl.floor(x * LARGEST_STEPS + 0.5)
        high = tl.floor((code + 128.0) * (1.0 / 256.0))
        error = x - code * (1.0 / LARGEST_STEPS)
        squares += x * x
        errors += error * error
        tl.store(high_row + d + cols, high.to(tl.int8), mask=in_bounds)
        tl.store(low_row + d + cols, (code - 256.0 * high).to(tl.int8), mask=in_bounds)
    size = tl.sqrt(tl.sum(squares, 0)) * norm_inflation + 5.551115123125783e-17
    spread = tl.sqrt(tl.sum(errors, 0)) * norm_inflation + 5.551115123125783e-17
    spread += 9.5367431640625e-07 * size
    size = tl.where(rounded, unit * size, root * SMALLEST_MAXIMUM)
    spread = tl.where(rounded, unit * spread, root * SMALLEST_MAXIMUM)
    reach = size * (1.0 + gamma) * INFLATION
    spread = (spread + (gamma + ROUNDING) * (size + spread)) * INFLATION
    step = tl.where(rounded, top * (1.0 / LARGEST_STEPS), 0.0)
    tl.store(numbers_ptr + b, step)
    tl.store(numbers_ptr + B + b, tl.where(screened, reach, float("inf")))
    tl.store(numbers_ptr + 2 * B + b, tl.where(screened, spread, 0.0))


@triton.jit
def ask_for_hidden(hidden_ptr, line, B, D):
    """Prefetch a program's share of hidden [B, D] into the L2, before the copy fills the queues.

    line: int32, 0, 1, ... NVIDIA only.
    """
    N: tl.constexpr = line.shape[0]
    PER_LINE: tl.constexpr = 128 * 8 // hidden_ptr.dtype.element_ty.primitive_bitwidth
    size = B.to(tl.int64) * D
    for first in range(tl.program_id(0) * N, tl.cdiv(size, PER_LINE), tl.num_programs(0) * N):
        prefetch(hidden_ptr + tl.minimum((first + line).to(tl.int64) * PER_LINE, size - 1))


@triton.jit
def round_claimed_rows(hidden_ptr, codes_ptr, numbers_ptr, found_ptr, counters_ptr, cols, B, D,
                       gamma, norm_inflation, root, FENCED: tl.constexpr):  # fmt: skip
    """Round the rows that this program claims; cols as in _round_row.

    FENCED: whether TMA may read the codes, on NVIDIA GPUs of compute capability 9.0 and later.
    """
    b = tl.atomic_add(counters_ptr + CLAIMED, 1, sem="relaxed")
    while b < B:
        _round_row(
            hidden_ptr, codes_ptr, numbers_ptr, cols, b, B, D, gamma, norm_inflation, root
        )  # fmt: skip
        tl.store(found_ptr + b, 0)
        _fence_for_tma(b, FENCED)
        tl.debug_barrier()
        tl.atomic_add(counters_ptr + ROUNDED, 1, sem="release")
        b = tl.atomic_add(counters_ptr + CLAIMED, 1, sem="relaxed")


@triton.jit
def wait_for_rows(counters_ptr, B, FENCED: tl.constexpr):
    """Wait until programs have rounded all rows."""
    rounded = tl.atomic_add(counters_ptr + ROUNDED, 0, sem="acquire")
    while rounded < B:
        rounded = tl.atomic_add(counters_ptr + ROUNDED, 0, sem="acquire")
    _fence_for_tma(rounded, FENCED)


@triton.jit
def _fence_for_tma(x, FENCED: tl.constexpr):
    """Make earlier writes visible to TMA; x is any int32 scalar."""
    if FENCED:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [x], tl.int32, False, 1
        )


@triton.jit
def both_bytes(sums):
    """Return 256 high + low, fp32 [R, W], of sums int32 [2 R, W] in the order of code_row."""
    R: tl.constexpr = sums.shape[0] // 2
    W: tl.constexpr = sums.shape[1]
    high, low = sums.reshape(R // 8, 2, 8, W).permute(0, 2, 3, 1).split()
    both = high.to(tl.float32) * 256.0 + low.to(tl.float32)
    return both.reshape(R, W)


COUNTERS = 16
"""Five are used; 16 keep what follows aligned."""


def rounding_numbers(D: int) -> dict[str, float]:
    """Return the kernel arguments of the rounding of hidden that depend on D, by name."""
    return {
        "gamma": accumulation_error(D),
        "norm_inflation": 1 + (D + 4) * 2.0**-24,
        "root": D**0.5,
    }


def rounded_columns(D: int, num_warps: int) -> int:
    """Return how many columns of hidden are rounded at a time: 16 in each thread."""
    return min(512 * num_warps, triton.next_power_of_2(D))
