"""Shared device code, in the interpreter: the fp32 Gumbel map, packed candidates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fsbench import reference
from fsbench.kernels.noise import contract, keys

pytestmark = pytest.mark.interpreter


@triton.jit
def _map_kernel(bits_ptr, gumbel_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + offs).to(tl.uint32)
    tl.store(gumbel_ptr + offs, contract.gumbel(bits))


@triton.jit
def _key_kernel(score_ptr, token_ptr, key_ptr, back_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    key = keys.ordered_key(tl.load(score_ptr + offs), tl.load(token_ptr + offs))
    tl.store(key_ptr + offs, key)
    tl.store(back_ptr + offs, keys.token_of_key(key))


@pytest.fixture(scope="module")
def codes() -> torch.Tensor:
    """Sorted 32-bit codes: both ends and the middle whole, the rest random and log-spaced."""
    rng = np.random.default_rng(0)
    end = np.arange(1 << 15)
    log_spaced = (2 ** np.linspace(0, 32, 1 << 16)).astype(np.int64).clip(0, 2**32 - 1)
    middle = 2**31 + np.arange(-(1 << 14), 1 << 14)
    random = rng.integers(0, 2**32, (1 << 20) - 2 * len(end) - len(log_spaced) - len(middle))
    return torch.from_numpy(
        np.sort(np.concatenate([end, 2**32 - 1 - end, log_spaced, middle, random]))
    )


@pytest.fixture(scope="module")
def mapped(codes: torch.Tensor) -> torch.Tensor:
    values = torch.full((len(codes),), torch.nan)
    _map_kernel[(len(codes) // 8192,)](codes, values, BLOCK=8192)
    return values


def test_gumbel_is_accurate_finite_and_monotone(codes, mapped):
    values = mapped
    exact = reference.gumbel(codes)
    assert (values.double() - exact).abs().max() < reference.GUMBEL_ERROR / 2
    assert (values[1:] <= values[:-1]).all()
    assert values.min() == pytest.approx(-3.13, abs=1e-3)
    assert values.max() == pytest.approx(22.874, abs=1e-3)


def test_exponential_keeps_relative_precision_at_its_small_end(codes, mapped):
    """E = exp(-g) has no atoms where the winners are: neighbouring codes stay apart."""
    smallest = mapped[:4096]
    assert (smallest[1:] < smallest[:-1])[codes[1:4096] != codes[:4095]].all()


def test_keys_order_scores_first_then_lower_tokens():
    infinity = float("inf")
    scores = [-infinity, -3e38, -1.5, -1e-45, 0.0, 0.0, 1e-45, 2.5, 3e38, infinity]
    tokens = [5, 5, 7, 1, 9, 3, 0, 2**31 - 17, 4, 5]
    n = 16
    score = torch.tensor(scores + [0.0] * (n - len(scores)))
    token = torch.tensor(tokens + [0] * (n - len(tokens)), dtype=torch.int32)
    key, back = torch.zeros(2, n, dtype=torch.int64)
    _key_kernel[(1,)](score, token, key, back, N=n)
    ordered = key[: len(scores)].tolist()
    assert ordered == sorted(ordered)
    assert ordered[0] > keys.LOWEST_KEY.value
    expected = [-1, *tokens[1:-1], -1]  # infinite scores are no draw
    assert back[: len(scores)].tolist() == expected
