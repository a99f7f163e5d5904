"""What a row of the batch draws with: seed, offset, temperature, and its number in the noise."""

import triton
import triton.language as tl

from fsbench.kernels.noise.contract import temperatures


@triton.jit
def _per_row(pointer, rows, B, PER_ROW: tl.constexpr):
    """The value of each row, [R, 1]; or the one for all of them, a scalar."""
    if PER_ROW:
        return tl.load(pointer + rows, mask=rows < B, other=0)[:, None]
    else:
        return tl.load(pointer)


@triton.jit
def settings(seed_ptr, offset_ptr, temperature, rows, B, SEED_PER_ROW: tl.constexpr,
             OFFSET_PER_ROW: tl.constexpr, TEMPERATURE_PER_ROW: tl.constexpr):  # fmt: skip
    """(seed, number in the noise, offset, T, 1 / T) of rows: [R, 1], or scalar if one for all."""
    seed = _per_row(seed_ptr, rows, B, SEED_PER_ROW)
    # A seed of its own identifies a request; else its row in the batch does.
    row = rows[:, None] * 0 if SEED_PER_ROW else rows[:, None]
    offset = tl.zeros((), tl.int64)
    if offset_ptr is not None:
        offset = _per_row(offset_ptr, rows, B, OFFSET_PER_ROW)
    if TEMPERATURE_PER_ROW:
        T = _per_row(temperature, rows, B, True)
    else:
        T = tl.full((1, 1), temperature, tl.float32)
    T, inverse_temperature = temperatures(T)
    return seed, row, offset, T, inverse_temperature
