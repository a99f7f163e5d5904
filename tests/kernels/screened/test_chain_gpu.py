"""Sums by warps on a GPU: the bits of those that the tensor core's larger instruction makes."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fsbench.kernels.screened.exact_logits import exact_logits

pytestmark = pytest.mark.gpu


@triton.jit
def _logits(hidden, weight, out, V, D, R: tl.constexpr, BLOCKS: tl.constexpr,
            BY_WARPS: tl.constexpr):  # fmt: skip
    b = tl.program_id(1)
    token = tl.program_id(0) * R + tl.arange(0, R)
    there = token < V
    y = exact_logits(
        hidden, weight, None, None, None, b, tl.where(there, token, 0), there, V, D, BLOCKS, 128,
        True, BY_WARPS,
    )  # fmt: skip
    tl.store(out + b.to(tl.int64) * V + token, y, mask=there)


def logits(hidden: Tensor, weight: Tensor, by_warps: bool, num_warps: int = 4) -> Tensor:
    (B, D), V = hidden.shape, len(weight)
    R = 8 * num_warps if by_warps else 64
    out = torch.empty(B, V, device="cuda")
    blocks = max(8, triton.next_power_of_2(D // 256))
    _logits[(triton.cdiv(V, R), B)](
        hidden=hidden, weight=weight, out=out, V=V, D=D, R=R, BLOCKS=blocks, BY_WARPS=by_warps,
        num_warps=num_warps, num_stages=4,
    )  # fmt: skip
    return out


def numbers(n: int, D: int, spread: str) -> Tensor:
    """What a sum may be sensitive to: ordinary numbers, many magnitudes, or much cancellation."""
    x = torch.randn(n, D, device="cuda")
    if spread == "wide":
        return x * torch.exp2(torch.randint(-12, 12, (n, D), device="cuda").float())
    if spread == "signs":
        return x.sign() * (1 + torch.rand(n, D, device="cuda") / 64)
    return x


@pytest.mark.parametrize("D", [256, 768, 4096, 8192])  # an odd number of parts, and an even one
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spread", ["normal", "wide", "signs"])
def test_sums_by_warps_are_the_same_bits(D, dtype, spread):
    torch.manual_seed(D)
    weight, hidden = numbers(8195, D, spread).to(dtype), numbers(8, D, spread).to(dtype)
    hidden /= D**0.5
    expected = logits(hidden, weight, False)
    for num_warps in (4, 8):
        found = logits(hidden, weight, True, num_warps)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
