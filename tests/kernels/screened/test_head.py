"""Preparing the int8 copy of a head."""

from __future__ import annotations

import pytest
import torch

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.screened import head as _screened_head
from fsbench.kernels.screened.api import screened_sample
from fsbench.kernels.screened.head import prepare_head

pytestmark = pytest.mark.usefixtures("one_thread")


def weight_of(V: int = 70, D: int = 48, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_a_head_does_not_depend_on_how_many_rows_are_prepared_at_once(monkeypatch):
    weight = weight_of()
    whole = prepare_head(weight)
    monkeypatch.setattr(_screened_head, "_AT_ONCE", 5 * weight.shape[1])
    for part, other in zip(whole, prepare_head(weight), strict=True):
        assert torch.equal(part, other)


def test_codes_are_the_nearest_and_reach_127():
    weight = weight_of(dtype=torch.float32)
    head = prepare_head(weight)
    assert (head.codes.abs().amax(1) == 127).all()
    error = weight.double() - head.scale.double()[:, None] * head.codes.double()
    assert (error.abs() <= head.scale.double()[:, None] * 0.5001).all()
    assert torch.allclose(head.residual.double(), error.norm(dim=1))
    assert head.weight is weight


def test_memory_is_half_of_a_16_bit_weight_and_12_bytes_a_token():
    weight = weight_of(70, 48)
    assert prepare_head(weight).extra_bytes == weight.nbytes // 2 + 12 * 70


def test_nothing_is_kept_for_a_gradient():
    weight = torch.nn.Parameter(weight_of(dtype=torch.float32))
    head = prepare_head(weight)
    assert head.weight is weight
    assert not any(part.requires_grad for part in head[1:])
    hidden, seed = weight_of(3, dtype=torch.float32), torch.tensor([1])
    sample = screened_sample(hidden, head, seed=seed)
    assert (sample.tokens >= 0).all()


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        ([[1.0]], InvalidType, "weight: expected a tensor of bf16"),
        (torch.zeros(2, 2, dtype=torch.int8), InvalidType, r"weight: .* got torch.int8"),
        (torch.zeros(2, 0), InvalidArgument, "weight: expected a non-empty matrix"),
        (torch.zeros(4, 3).T, InvalidArgument, "weight: expected it contiguous"),
        (torch.zeros(1, 131_073), InvalidArgument, "weight: expected at most 131072 columns"),
    ],
)
def test_what_is_no_head_is_named(weight, error, message):
    with pytest.raises(error, match=message):
        prepare_head(weight)
