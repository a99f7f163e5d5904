"""Numbers of a row, in Gluon; the portable twin is `rows`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fsbench.kernels.noise.contract import temperatures


@gluon.jit
def per_row(pointer, row, B, PER_ROW: gl.constexpr):
    """The value of each row, of row's shape; or the one for all of them, a scalar."""
    if PER_ROW:
        return gl.load(pointer + row, mask=row < B, other=0)
    else:
        return gl.load(pointer)


@gluon.jit
def row_temperatures(temperature, row, B, PER_ROW: gl.constexpr):
    """(T, 1 / T) of each row; see noise.contract."""
    T = gl.load(temperature + row, mask=row < B, other=0) if PER_ROW else temperature
    return temperatures(T)
