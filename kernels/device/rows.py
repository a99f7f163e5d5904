"""What a row of the batch draws with: seed, offset, temperature, and its number in the noise."""

import triton
import triton.language as tl

from fsbench.kernels.noise.contract import temperatures


@triton.jit
def of_row(value, row, DTYPE: tl.constexpr, PER_ROW: tl.constexpr):
    """The number of a row: value is a pointer to [B], or the number of all rows."""
    if PER_ROW:
        return tl.load(value + row).to(DTYPE)
    else:
        return tl.full((), value, DTYPE)


@triton.jit
def _of_rows(pointer, rows, there, PER_ROW: tl.constexpr):
    """The value of each row, of their shape; or the one for all of them, a scalar."""
    if PER_ROW:
        return tl.load(pointer + rows, mask=there, other=None if there is None else 0)
    else:
        return tl.load(pointer)


@triton.jit
def offsets_of_rows(offset_ptr, rows, there, PER_ROW: tl.constexpr):
    """The offsets of rows: of their shape, or scalar if one for all; 0 without a pointer."""
    if offset_ptr is None:
        return tl.cast(0, tl.int64)
    else:
        return _of_rows(offset_ptr, rows, there, PER_ROW)


@triton.jit
def seeds_of_rows(seed_ptr, rows, there, PER_ROW: tl.constexpr):
    """(seed, number in the noise) of rows: of their shape, or the seed scalar if one for all."""
    # A seed of its own identifies a request; else its row in the batch does.
    return _of_rows(seed_ptr, rows, there, PER_ROW), rows * 0 if PER_ROW else rows


@triton.jit
def noise_of_rows(seed_ptr, offset_ptr, rows, there, SEED_PER_ROW: tl.constexpr,
                  OFFSET_PER_ROW: tl.constexpr):  # fmt: skip
    """(seed, offset, number in the noise) of rows: of their shape, or scalar if one for all.

    rows: a tensor of any shape, or a scalar. there: which of them exist; None if all do.
    """
    seed, row = seeds_of_rows(seed_ptr, rows, there, SEED_PER_ROW)
    return seed, offsets_of_rows(offset_ptr, rows, there, OFFSET_PER_ROW), row


@triton.jit
def temperatures_of_rows(temperature, rows, there, PER_ROW: tl.constexpr):
    """(T, 1 / T) of rows: of their shape, or scalar if one for all; see noise.contract."""
    return temperatures(
        tl.load(temperature + rows, mask=there, other=0) if PER_ROW else temperature
    )


@triton.jit
def settings(seed_ptr, offset_ptr, temperature, rows, B, SEED_PER_ROW: tl.constexpr,
             OFFSET_PER_ROW: tl.constexpr, TEMPERATURE_PER_ROW: tl.constexpr):  # fmt: skip
    """(seed, number in the noise, offset, T, 1 / T) of rows: [R, 1], or one for all."""
    there = rows < B
    seed, offset, row = noise_of_rows(
        seed_ptr, offset_ptr, rows, there, SEED_PER_ROW, OFFSET_PER_ROW
    )
    if SEED_PER_ROW:
        seed = seed[:, None]
    if OFFSET_PER_ROW and offset_ptr is not None:
        offset = offset[:, None]
    if TEMPERATURE_PER_ROW:
        T = tl.load(temperature + rows, mask=there, other=0)[:, None]
    else:
        T = tl.full((1, 1), temperature, tl.float32)
    T, inverse_temperature = temperatures(T)
    return seed, row[:, None], offset, T, inverse_temperature
