"""The inputs have the logits they promise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fsbench import inputs
from fsbench.inputs import TORCH_DTYPES, head_with_logits, make_hidden, make_weight
from fsbench.problem import QUANTIZED, Problem


def _problem(logits: str, **changes) -> Problem:
    sizes = {"B": 4, "D": 256, "V": 3000, "dtype": "fp32", "device": "cpu", **changes}
    return Problem(**sizes, logits=logits)


def _logits(problem: Problem, seed: int = 0) -> torch.Tensor:
    return make_hidden(problem, seed).float() @ make_weight(problem, seed).float().T


@pytest.mark.parametrize(("sigma", "dtype"), [(0.5, "bf16"), (4.0, "fp16"), (4.0, "fp32")])
def test_normal_logits_have_the_stated_deviation(sigma, dtype):
    logits = _logits(_problem(f"normal:{sigma}", dtype=dtype, B=8))
    # A row's deviation is sigma |h| / sqrt(D), and |h|^2 / D = 1 +- sqrt(2 / D).
    assert float(logits.std()) == pytest.approx(sigma, rel=0.07)
    assert abs(float(logits.mean())) < 0.03 * sigma
    rows = np.corrcoef(logits.numpy())
    assert np.abs(rows - np.eye(8)).max() < 0.3  # each row has other logits


def test_logits_of_deviation_zero_are_equal():
    assert float(_logits(_problem("normal:0")).abs().max()) == 0


def test_zipf_logits_follow_the_logarithm_of_the_rank_in_shuffled_order():
    logits = _logits(_problem("zipf:1.5"))
    profile = -1.5 * np.log(np.arange(1, 3001))
    for row in logits.numpy():
        assert np.corrcoef(np.sort(row)[::-1], profile)[0, 1] > 0.99
        assert np.polyfit(profile, np.sort(row)[::-1], 1)[0] == pytest.approx(1, rel=0.05)
        assert abs(np.corrcoef(row, np.arange(3000))[0, 1]) < 0.1


def test_peaked_logits_have_one_token_above_all_others():
    logits = _logits(_problem("peaked:12"))
    top = logits.topk(2, dim=1)
    assert len(set(top.indices[:, 0].tolist())) == 1  # the same token in every row
    # The gap is 12 up to the row's mean of hidden, less the noise's maximum.
    assert torch.all((top.values[:, 0] - logits.mean(1) - 12).abs() < 0.6)
    assert torch.all(top.values[:, 1] - logits.mean(1) < 0.6)


@pytest.mark.parametrize("logits", ["normal:1", "zipf:1", "peaked:5"])
def test_inputs_are_a_function_of_the_seed(logits):
    problem = _problem(logits)
    for make in (make_weight, make_hidden):
        torch.manual_seed(1)
        first = make(problem, 7)
        torch.manual_seed(2)
        assert torch.equal(first, make(problem, 7))
        assert not torch.equal(first, make(problem, 8))
    assert torch.equal(make_weight(_problem(logits, B=16), 7), make_weight(problem, 7))


def test_shapes_and_dtypes():
    for dtype, expected in TORCH_DTYPES.items():
        problem = _problem("zipf:1", dtype=dtype, B=3, D=8, V=5)
        for tensor, shape in ((make_weight(problem, 0), (5, 8)), (make_hidden(problem, 0), (3, 8))):
            assert (tensor.shape, tensor.dtype) == (shape, expected) and tensor.is_contiguous()


def test_the_weight_is_made_in_blocks_without_a_seam(monkeypatch):
    problem = _problem("zipf:1", V=1000)
    whole = make_weight(problem, 0)
    monkeypatch.setattr(inputs, "_ROWS_AT_ONCE", 128)
    blocks = make_weight(problem, 0)
    means = [make.mean(1) * problem.D for make in (whole, blocks)]  # the profile, noise aside
    assert torch.allclose(*means, atol=8 * 0.1)
    noise = blocks - blocks.mean(1, keepdim=True)
    assert not torch.isclose(noise[128:], noise[:-128]).all(1).any()  # no block repeats another's


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("logits", ["normal:0", "normal:0.01", "peaked:12"])
@pytest.mark.parametrize("form", QUANTIZED)
def test_a_quantized_head_has_the_numbers_of_its_weight(form, logits, dtype, monkeypatch):
    monkeypatch.setattr(inputs, "_ROWS_AT_ONCE", 128)  # in blocks, the last of them shorter
    problem = _problem(logits, dtype=dtype, V=300, weights=form)
    weight, plain = make_weight(problem, 0), make_weight(replace(problem, weights=""), 0)
    head = inputs.quantized(weight, form)
    assert torch.equal(head.weight.double() * head.scale.double()[:, None], weight.double())
    assert torch.equal(inputs.stored(problem, weight), weight)
    assert torch.equal(head.scale.log2(), head.scale.log2().round())
    # An int8 step is that of the largest entry; e4m3 is off by 1/16, or half of the smallest.
    largest = plain.abs().amax(1, keepdim=True).float()
    step = {"int8": largest / 127, "fp8": plain.abs().float() / 16 + largest / 448 / 512}[form]
    assert ((plain.float() - weight.float()).abs() <= step.clamp_min(2.0**-16)).all()


def test_head_with_logits_is_exact_and_takes_at_most_d_rows():
    logits = 30 * torch.randn(5, 77, generator=torch.Generator().manual_seed(0))
    for dtype in TORCH_DTYPES.values():
        hidden, weight = head_with_logits(logits, dtype, D=16)
        assert (hidden.shape, weight.shape) == ((5, 16), (77, 16))
        assert hidden.is_contiguous() and weight.is_contiguous()
        assert torch.equal(hidden @ weight.T, logits.to(dtype))
    with pytest.raises(ValueError, match=r"logits: expected at most D=4 rows; got 5"):
        head_with_logits(torch.zeros(5, 3), torch.float32, D=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(1,), (7, 3), (60, 4)])
def test_a_fingerprint_changes_with_every_element_and_their_order(monkeypatch, dtype, shape):
    monkeypatch.setattr(inputs, "_WORDS_AT_ONCE", 4)
    tensor = torch.arange(1, 1 + torch.Size(shape).numel()).to(dtype).view(shape)
    mark = inputs.fingerprint(tensor)
    assert inputs.fingerprint(tensor.clone()) == mark
    for index in range(tensor.numel()):
        changed = tensor.clone()
        changed.view(-1)[index] += 1
        assert inputs.fingerprint(changed) != mark
        changed.view(-1)[index], changed.view(-1)[-1] = tensor.view(-1)[-1], tensor.view(-1)[index]
        assert (inputs.fingerprint(changed) == mark) == (index == tensor.numel() - 1)
