"""The seed, the offset, the temperature and the noise row of each row of the batch: device code."""

import triton
import triton.language as tl

from fsbench.kernels.noise.contract import temperatures


@triton.jit
def of_row(value, row, DTYPE: tl.constexpr, PER_ROW: tl.constexpr):
    """Return a row's value: value is a pointer to [B], or one number for all rows."""
    if PER_ROW:
        return tl.load(value + row).to(DTYPE)
    else:
        return tl.full((), value, DTYPE)


@triton.jit
def _of_rows(pointer, rows, mask, PER_ROW: tl.constexpr):
    """Load the value of each row in the shape of rows, or the scalar for all of them."""
    if PER_ROW:
        return tl.load(pointer + rows, mask=mask, other=None if mask is None else 0)
    else:
        return tl.load(pointer)


@triton.jit
def offsets_of_rows(offset_ptr, rows, mask, PER_ROW: tl.constexpr):
    """Load the offsets of rows, or the scalar for all of them; 0 without a pointer."""
    if offset_ptr is None:
        return tl.cast(0, tl.int64)
    else:
        return _of_rows(offset_ptr, rows, mask, PER_ROW)


@triton.jit
def seeds_of_rows(seed_ptr, rows, mask, PER_ROW: tl.constexpr):
    """Load (seed, row in the noise) of rows; the seed is a scalar if all rows share it."""
    # A seed per row identifies the request. With a shared seed its row in the batch does.
    return _of_rows(seed_ptr, rows, mask, PER_ROW), rows * 0 if PER_ROW else rows


@triton.jit
def noise_of_rows(seed_ptr, offset_ptr, rows, mask, SEED_PER_ROW: tl.constexpr,
                  OFFSET_PER_ROW: tl.constexpr):  # fmt: skip
    """Load (seed, offset, row in the noise) of rows; a scalar where all rows share a value.

    Args:
        rows: a tensor of any shape, or a scalar.
        mask: which rows exist; None if all do.
    """
    seed, row = seeds_of_rows(seed_ptr, rows, mask, SEED_PER_ROW)
    return seed, offsets_of_rows(offset_ptr, rows, mask, OFFSET_PER_ROW), row


@triton.jit
def temperatures_of_rows(temperature, rows, mask, PER_ROW: tl.constexpr):
    """Load (T, 1 / T) of rows, or of all rows as scalars; see `noise.contract.temperatures`."""
    return temperatures(tl.load(temperature + rows, mask=mask, other=0) if PER_ROW else temperature)


@triton.jit
def settings(seed_ptr, offset_ptr, temperature, rows, B, SEED_PER_ROW: tl.constexpr,
             OFFSET_PER_ROW: tl.constexpr, TEMPERATURE_PER_ROW: tl.constexpr):  # fmt: skip
    """Load (seed, row in the noise, offset, T, 1 / T): [R, 1] each, or a scalar for all rows."""
    in_batch = rows < B
    seed, offset, row = noise_of_rows(
        seed_ptr, offset_ptr, rows, in_batch, SEED_PER_ROW, OFFSET_PER_ROW
    )
    if SEED_PER_ROW:
        seed = seed[:, None]
    if OFFSET_PER_ROW and offset_ptr is not None:
        offset = offset[:, None]
    if TEMPERATURE_PER_ROW:
        T = tl.load(temperature + rows, mask=in_batch, other=0)[:, None]
    else:
        T = tl.full((1, 1), temperature, tl.float32)
    T, inverse_temperature = temperatures(T)
    return seed, row[:, None], offset, T, inverse_temperature
