"""Check that the replaced parts of Triton's interpreter give the results of the originals."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from fsbench.kernels.noise.arithmetic import nan_max

pytestmark = pytest.mark.interpreter


@triton.jit
def _then(a, b, c, d):
    """Compose y -> a y + b with y -> c y + d: associative, but not commutative."""
    return c * a, c * b + d


@triton.jit
def _reduce_kernel(a_ptr, b_ptr, out_ptr, largest_ptr, M: tl.constexpr, N: tl.constexpr):
    index = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + index), tl.load(b_ptr + index)
    slope, shift = tl.reduce((a, b), 1, _then)
    tl.store(out_ptr + tl.arange(0, M), slope * 1000 + shift)
    tl.store(largest_ptr + tl.arange(0, N), tl.reduce(b.to(tl.float32), 0, nan_max))


@pytest.mark.parametrize(("M", "N"), [(1, 1), (1, 8), (4, 1), (4, 8)])
def test_elements_are_combined_in_their_order(M, N):
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-3, 4, (M, N), generator=generator) for _ in range(2))
    out, largest = torch.empty(M, dtype=torch.int64), torch.empty(N)
    _reduce_kernel[(1,)](a, b, out, largest, M, N)
    slope, shift = torch.ones(M, dtype=torch.int64), torch.zeros(M, dtype=torch.int64)
    for column in range(N):
        slope, shift = a[:, column] * slope, a[:, column] * shift + b[:, column]
    assert out.tolist() == (slope * 1000 + shift).tolist()
    assert largest.tolist() == b.amax(0).tolist()


def test_a_launch_leaves_the_language_as_it_was():
    load, sum_of_tensor = tl.load, tl.tensor.sum
    test_elements_are_combined_in_their_order(4, 8)
    assert tl.load is load and tl.tensor.sum is sum_of_tensor
