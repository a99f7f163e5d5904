"""Preparing, saving and loading the int8 copy of a head."""

from __future__ import annotations

import pytest
import torch

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.screened import head as _screened_head
from fsbench.kernels.screened.files import load_head, save_head, weight_hash
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_saved_head_is_loaded_bit_by_bit(tmp_path, dtype):
    weight = weight_of(dtype=dtype)
    weight[3, 0] = torch.nan
    head = prepare_head(weight)
    save_head(head, tmp_path / "head.safetensors")
    loaded = load_head(tmp_path / "head.safetensors", weight)
    assert loaded.weight is weight
    for part, other in zip(head[1:], loaded[1:], strict=True):
        assert part.dtype == other.dtype
        assert torch.equal(part, other)


def test_a_head_of_another_weight_is_refused(tmp_path):
    weight = weight_of()
    path = tmp_path / "head.safetensors"
    save_head(prepare_head(weight), path)
    changed = weight.clone()
    changed[69, 47] += 1
    for other in (changed, weight[:, :24].contiguous(), weight.half(), weight.view(35, 96)):
        with pytest.raises(
            InvalidArgument, match=r"weight: expected the one that .* was made from"
        ):
            load_head(path, other)


def test_other_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    weight = weight_of()
    with pytest.raises(FileNotFoundError):
        load_head(tmp_path / "nothing.safetensors", weight)
    (tmp_path / "text").write_text("not a head")
    with pytest.raises(InvalidArgument, match="path: expected a screened head"):
        load_head(tmp_path / "text", weight)
    save_file({"codes": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(InvalidArgument, match="path: expected a file with format"):
        load_head(tmp_path / "other.safetensors", weight)


def test_what_is_no_head_is_named():
    with pytest.raises(InvalidType, match="weight: expected a tensor of bf16"):
        prepare_head([[1.0]])
    with pytest.raises(InvalidType, match=r"weight: .* got torch.int8"):
        prepare_head(torch.zeros(2, 2, dtype=torch.int8))
    with pytest.raises(InvalidArgument, match="weight: expected a non-empty matrix"):
        prepare_head(torch.zeros(2, 0))
    with pytest.raises(InvalidArgument, match="weight: expected it contiguous"):
        prepare_head(torch.zeros(4, 3).T)
    with pytest.raises(InvalidArgument, match="weight: expected at most 131072 columns"):
        prepare_head(torch.zeros(1, 131_073))


def test_the_hash_covers_dtype_shape_and_values():
    weight = weight_of()
    hashes = {
        weight_hash(w)
        for w in (weight, weight.view(35, 96), weight.view(torch.float16), weight + 1)
    }
    assert len(hashes) == 4
    assert weight_hash(weight.clone()) == weight_hash(weight)
