"""The FlashInfer baselines: the arguments that they pass, on a CPU; independent steps, on a GPU."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from fsbench.baselines import (
    flashinfer_gumbel,
    flashinfer_gumbel_lean,
    flashinfer_joint,
    flashinfer_min_p,
    flashinfer_top_k_top_p,
    flashinfer_top_k_top_p_lean,
)
from fsbench.baselines.providing import flashinfer
from fsbench.problem import Problem

SEED, STEP = torch.tensor([11]), torch.tensor([5])
# Key and position are exchanged: FlashInfer's steps would overlap otherwise.
PHILOX = {"seed": STEP, "offset": SEED}


class Recorder:
    """Replaces a FlashInfer function: keeps its last arguments, returns a fixed result."""

    def __init__(self, result) -> None:
        self.result = result

    def __call__(self, tensor, *args, **kwargs):
        self.tensor, self.args, self.kwargs = tensor, args, kwargs
        return self.result(tensor)


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch, eager):
    """Replace flashinfer.sampling, and the fp32-output matmul that CPUs lack."""
    module = ModuleType("flashinfer.sampling")
    module.softmax = Recorder(lambda logits: logits.softmax(-1))  # type: ignore[attr-defined]
    for name in (
        "min_p_sampling_from_probs",
        "sampling_from_logits",
        "sampling_from_probs",
        "top_k_top_p_sampling_from_logits",
        "top_k_top_p_sampling_from_probs",
    ):
        setattr(module, name, Recorder(lambda tensor: tensor.argmax(-1).int()))
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", module)
    monkeypatch.setattr(
        flashinfer, "float_logits", lambda hidden, weight: hidden.float() @ weight.float().T
    )
    return module


def step(module, temperature: float, **filters) -> tuple[torch.Tensor, torch.Tensor]:
    """Build and launch on random bf16 inputs; return the tokens and the bf16 logits [3, 20]."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 8, generator=generator).bfloat16()
    weight = torch.randn(20, 8, generator=generator).bfloat16()
    problem = Problem(3, 8, 20, "bf16", temperature, **filters)
    return module.PROVIDER.build(problem, weight)(hidden, SEED, STEP), hidden @ weight.T


def assert_padded(tensor: torch.Tensor, expected: torch.Tensor, padding: float) -> None:
    """[3, 64] fp32, contiguous: the expected columns, then padding."""
    assert tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.shape == (3, 64)
    torch.testing.assert_close(tensor[:, :20], expected, rtol=0.02, atol=0.02)
    assert (tensor[:, 20:] == padding).all()


@pytest.mark.parametrize(
    ("module", "function", "filters"),
    [
        (flashinfer_gumbel, "sampling_from_logits", {}),
        (flashinfer_top_k_top_p, "top_k_top_p_sampling_from_logits", {"top_k": -1, "top_p": 1.0}),
    ],
)
def test_steps_of_the_paper(sampling, module, function: str, filters: dict) -> None:
    tokens, logits = step(module, temperature=2.0)
    call = getattr(sampling, function)
    assert call.tensor.dtype == torch.bfloat16 and call.tensor.is_contiguous()
    assert torch.equal(call.tensor, logits / 2)
    indices = call.kwargs.pop("indices")
    assert indices.dtype == torch.int32 and indices.tolist() == [0, 1, 2]
    assert call.kwargs == {**PHILOX, **filters}
    assert torch.equal(tokens, logits.argmax(-1).int())


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_lean_steps(sampling, temperature: float) -> None:
    _, logits = step(flashinfer_gumbel_lean, temperature)
    call = sampling.sampling_from_logits
    assert_padded(call.tensor, logits.float() / temperature, -torch.inf)
    assert call.kwargs == PHILOX
    _, logits = step(flashinfer_top_k_top_p_lean, temperature)
    assert sampling.softmax.kwargs == {"temperature": temperature}
    assert_padded(sampling.softmax.tensor, logits.float(), -torch.inf)
    assert sampling.sampling_from_probs.kwargs == PHILOX


def test_fi1_takes_the_filters_of_a_problem(sampling) -> None:
    call = sampling.top_k_top_p_sampling_from_logits
    for top_k in (7, 0):
        step(flashinfer_top_k_top_p, temperature=1.0, top_k=top_k, top_p=0.5)
        assert (call.kwargs["top_k"], call.kwargs["top_p"]) == (top_k or -1, 0.5)
    step(flashinfer_top_k_top_p, temperature=1.0, top_k=7, top_p=0.5, mixed=True)
    assert call.kwargs["top_k"].tolist() == [7, 7, 20]
    assert call.kwargs["top_k"].dtype == torch.int32
    assert call.kwargs["top_p"].tolist() == [0.5, 1.0, 0.5]


@pytest.mark.parametrize(
    ("module", "order"), [(flashinfer_top_k_top_p_lean, "top_k_first"), (flashinfer_joint, "joint")]
)
def test_lean_filters(sampling, module, order: str) -> None:
    _, logits = step(module, 2.0, top_k=7, top_p=0.5)
    assert sampling.softmax.kwargs == {"temperature": 2.0}
    call = sampling.top_k_top_p_sampling_from_probs
    assert_padded(call.tensor, logits.float().softmax(-1), 0.0)  # the replaced softmax has no T
    assert call.args == (7, 0.5)
    assert call.kwargs == {"filter_apply_order": order, **PHILOX}
    step(module, 2.0, top_p=0.5)
    assert call.args == (64, 0.5), "top-k off is all columns"


def test_min_p(sampling) -> None:
    _, logits = step(flashinfer_min_p, 2.0, min_p=0.25)
    assert sampling.softmax.kwargs == {"temperature": 2.0}
    call = sampling.min_p_sampling_from_probs
    assert_padded(call.tensor, logits.float().softmax(-1), 0.0)  # the replaced softmax has no T
    assert (call.args, call.kwargs) == ((0.25,), PHILOX)


def test_min_p_that_is_off_keeps_no_padding(sampling) -> None:
    """The kernel keeps probabilities >= min_p * max, so 0 would keep those of the padding, 0."""
    call = sampling.min_p_sampling_from_probs

    def kept() -> torch.Tensor:
        (min_p,) = call.args
        return call.tensor >= torch.as_tensor(min_p).reshape(-1, 1) * call.tensor.amax(1)[:, None]

    step(flashinfer_min_p, 1.0)
    assert kept()[:, :20].all() and not kept()[:, 20:].any()
    step(flashinfer_min_p, 1.0, min_p=0.25, mixed=True)
    assert call.args[0].dtype == torch.float32 and call.args[0][[0, 2]].tolist() == [0.25, 0.25]
    assert kept()[1, :20].all() and not kept()[0, :20].all() and not kept()[:, 20:].any()


def test_min_p_refuses_other_filters() -> None:
    for filters in ({"top_k": 7, "min_p": 0.1}, {"top_p": 0.9, "min_p": 0.1}):
        name = next(iter(filters))
        reason = flashinfer_min_p.PROVIDER.unsupported_reason(Problem(3, 8, 20, **filters))
        assert reason == f"does not apply {name}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    "module",
    [
        flashinfer_gumbel,
        flashinfer_gumbel_lean,
        flashinfer_min_p,
        flashinfer_top_k_top_p,
        flashinfer_top_k_top_p_lean,
    ],
)
def test_steps_are_independent(module) -> None:
    """With flat logits, tokens of two steps differ by d as often as any other d.

    Noise that a step shares with an earlier one, shifted by some tokens, repeats winners at that
    distance: passing the step as FlashInfer's offset would make up to 3/4 of them do so.
    """
    pytest.importorskip("flashinfer")
    B, V, steps = 4096, 64, 32
    weight = torch.zeros(V, 64, dtype=torch.bfloat16, device="cuda")
    hidden = torch.ones(B, 64, dtype=torch.bfloat16, device="cuda")
    seed, offset = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
    launch = module.PROVIDER.build(Problem(B, 64, V), weight)
    tokens = []
    for _ in range(steps):
        tokens.append(launch(hidden, seed, offset).long())
        offset += 1
    drawn = torch.stack(tokens)  # [steps, B]
    for lag in (1, 2, 3, 4):
        shifts = (drawn[:-lag] - drawn[lag:]) % V
        counts = torch.bincount(shifts.flatten(), minlength=V).double()
        expected = shifts.numel() / V
        assert (counts - expected).abs().max().item() < 6 * expected**0.5
