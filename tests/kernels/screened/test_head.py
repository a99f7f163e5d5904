"""Preparing the int8 copy of a head."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import flash_sample, truncated_sample
from fsbench.kernels.screened import int8_copy as _screened_head
from fsbench.kernels.screened.api import screened_sample
from fsbench.kernels.screened.head import prepare_head

pytestmark = pytest.mark.usefixtures("one_thread")


def weight_of(V: int = 70, D: int = 48, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_a_head_does_not_depend_on_how_many_rows_are_prepared_at_once(monkeypatch):
    weight = weight_of()
    whole = prepare_head(weight)
    monkeypatch.setattr(_screened_head, "_AT_ONCE", 5 * weight.shape[1])
    for part, other in zip(whole.copy, prepare_head(weight).copy, strict=True):
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


def test_a_head_of_a_parameter_has_no_gradient():
    weight = torch.nn.Parameter(weight_of(dtype=torch.float32))
    head = prepare_head(weight)
    assert head.weight is weight
    assert not any(part.requires_grad for part in head.copy)
    hidden, seed = weight_of(3, dtype=torch.float32), torch.tensor([1])
    assert screened_sample(hidden, head, seed=seed).valid.all()


def write_a_row(weight):
    with torch.inference_mode():
        weight[3] = 7.0


@pytest.mark.parametrize(
    "change",
    [lambda weight: weight.add_(1.0), write_a_row, lambda weight: weight.set_(weight.clone())],
    ids=["add in place", "write in inference mode", "move"],
)
def test_a_head_whose_weight_changed_is_refused_until_it_is_refreshed(change):
    weight, hidden = weight_of(), weight_of(3)
    head = prepare_head(weight)
    call = {"seed": torch.tensor([1]), "noise": "token"}
    screened_sample(hidden, head, **call)
    old = head.codes
    change(weight)
    message = r"head: expected an unchanged weight; .* call head\.refresh\(weight\)"
    for sampler, more in (
        (screened_sample, {}), (screened_sample, {"num_samples": 2}), (flash_sample, {}),
        (truncated_sample, {}), (truncated_sample, {"top_k": 20}),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=message):
            sampler(hidden, head, **call, **more)
    head.refresh(weight)
    assert head.codes is old
    for part, other in zip(head.copy, prepare_head(weight).copy, strict=True):
        assert torch.equal(part, other)
    same = flash_sample(hidden, weight, **call)
    assert torch.equal(screened_sample(hidden, head, **call).tokens, same.tokens)


def test_a_head_takes_another_weight_of_its_shape_alone():
    head, other = prepare_head(weight_of()), weight_of() * 2
    head.refresh(other)
    assert head.weight is other
    head.check()
    for wrong, error in ((weight_of(71), InvalidArgument), (other.float(), InvalidType)):
        with pytest.raises(error, match="weight: expected"):
            head.refresh(wrong)


def test_check_finds_a_change_that_torch_does_not_count():
    weight = weight_of()
    head = prepare_head(weight)
    weight.data.mul_(3.0)
    with pytest.raises(InvalidArgument, match="got one that does not at row 0"):
        head.check()
    head.refresh()
    weight[0, 0] += 0.0  # a write that changes nothing: within the bounds
    with pytest.raises(InvalidArgument, match="head: expected an unchanged weight"):
        screened_sample(weight_of(3), head, seed=torch.tensor([1]))
    head.check()
    screened_sample(weight_of(3), head, seed=torch.tensor([1]))


def test_a_weight_of_inference_mode_has_no_version():
    with torch.inference_mode():
        weight = weight_of()
        head = prepare_head(weight)
        assert screened_sample(weight_of(3), head, seed=torch.tensor([1])).valid.all()
        weight.set_(weight.clone())
        with pytest.raises(InvalidArgument, match="head: expected an unchanged weight"):
            screened_sample(weight_of(3), head, seed=torch.tensor([1]))


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
def test_bad_weights(weight, error, message):
    with pytest.raises(error, match=message):
        prepare_head(weight)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_head_is_not_copied_and_the_message_says_what_to_do(copied):
    """A copy would have the original's key: a compiled call would draw from the original."""
    head = prepare_head(weight_of())
    with pytest.raises(InvalidType, match=r"ScreenedHead: expected not to be copied .* save_head"):
        copied(head)


def test_a_compiled_call_whose_head_is_gone_says_so():
    hidden, seed = weight_of(3), torch.tensor([1])
    keys = [prepare_head(weight_of()).key for _ in range(20)]  # addresses may repeat, keys do not
    assert len(set(keys)) == 20
    out = [torch.empty(3, dtype=dtype) for dtype in (torch.int64, torch.bool, torch.int32)]
    layout = f"tokens;valid;found|hidden:tensor;seed:tensor;head:key:{keys[0]}"
    with pytest.raises(InvalidArgument, match="keep a reference to it"):
        torch.ops.fsbench.screened_sample(layout, [hidden, seed], [], [], out)
