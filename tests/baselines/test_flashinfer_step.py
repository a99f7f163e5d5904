"""The FlashInfer steps with a stand-in for FlashInfer: what they hand over, on a CPU."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from fsbench.baselines import (
    flashinfer_gumbel,
    flashinfer_gumbel_lean,
    flashinfer_joint,
    flashinfer_top_k_top_p,
    flashinfer_top_k_top_p_lean,
)
from fsbench.baselines.providing import flashinfer as _flashinfer
from fsbench.problem import Problem

SEED, STEP = torch.tensor([11]), torch.tensor([5])


class Recorder:
    """Stands for a FlashInfer function: keeps its last arguments, returns a fixed result."""

    def __init__(self, result) -> None:
        self.result = result

    def __call__(self, tensor, *args, **kwargs):
        self.tensor, self.args, self.kwargs = tensor, args, kwargs
        return self.result(tensor)


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch):
    """A stand-in for flashinfer.sampling, and for the fp32-output matmul that CPUs lack."""
    module = ModuleType("flashinfer.sampling")
    module.softmax = Recorder(lambda logits: logits.softmax(-1))  # type: ignore[attr-defined]
    for name in (
        "sampling_from_logits",
        "sampling_from_probs",
        "top_k_top_p_sampling_from_logits",
        "top_k_top_p_sampling_from_probs",
    ):
        setattr(module, name, Recorder(lambda tensor: tensor.argmax(-1).int()))
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", module)
    monkeypatch.setattr(
        _flashinfer, "float_logits", lambda hidden, weight: hidden.float() @ weight.float().T
    )
    return module


def step(module, temperature: float, **filters) -> tuple[torch.Tensor, torch.Tensor]:
    """Build and launch on random bf16 inputs; returns the tokens and the bf16 logits [3, 20]."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 8, generator=generator).bfloat16()
    weight = torch.randn(20, 8, generator=generator).bfloat16()
    problem = Problem(3, 8, 20, "bf16", temperature, **filters)
    return module.PROVIDER.build(problem, weight)(hidden, SEED, STEP), hidden @ weight.T


@pytest.mark.parametrize(
    ("module", "function", "filters"),
    [
        (flashinfer_gumbel, "sampling_from_logits", {}),
        (
            flashinfer_top_k_top_p,
            "top_k_top_p_sampling_from_logits",
            {"top_k": -1, "top_p": 1.0},
        ),
    ],
)
def test_as_in_paper(sampling, module, function: str, filters: dict) -> None:
    tokens, logits = step(module, temperature=2.0)
    called = getattr(sampling, function)
    assert called.tensor.dtype == torch.bfloat16 and called.tensor.is_contiguous()
    assert torch.equal(called.tensor, logits / 2)
    indices = called.kwargs.pop("indices")
    assert indices.dtype == torch.int32
    assert indices.tolist() == [0, 1, 2]
    # Key and position exchanged: FlashInfer's steps would overlap otherwise.
    assert called.kwargs == {"seed": STEP, "offset": SEED, **filters}
    assert torch.equal(tokens, logits.argmax(-1).int())


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_lean_gumbel(sampling, temperature: float) -> None:
    _, logits = step(flashinfer_gumbel_lean, temperature)
    called = sampling.sampling_from_logits
    assert called.tensor.dtype == torch.float32 and called.tensor.is_contiguous()
    torch.testing.assert_close(
        called.tensor[:, :20], logits.float() / temperature, rtol=0.01, atol=0.01
    )
    assert (called.tensor[:, 20:] == -torch.inf).all() and called.tensor.shape == (3, 64)
    assert called.kwargs == {"seed": STEP, "offset": SEED}


def test_lean_top_k_top_p(sampling) -> None:
    _, logits = step(flashinfer_top_k_top_p_lean, temperature=2.0)
    assert sampling.softmax.kwargs == {"temperature": 2.0}
    given = sampling.softmax.tensor
    torch.testing.assert_close(given[:, :20], logits.float(), rtol=0.01, atol=0.01)
    assert (given[:, 20:] == -torch.inf).all() and given.shape == (3, 64)
    assert sampling.sampling_from_probs.kwargs == {"seed": STEP, "offset": SEED}


def test_fi1_takes_the_filters_of_a_problem(sampling) -> None:
    step(flashinfer_top_k_top_p, temperature=1.0, top_k=7, top_p=0.5)
    called = sampling.top_k_top_p_sampling_from_logits
    assert (called.kwargs["top_k"], called.kwargs["top_p"]) == (7, 0.5)
    step(flashinfer_top_k_top_p, temperature=1.0, top_p=0.5)
    assert (called.kwargs["top_k"], called.kwargs["top_p"]) == (-1, 0.5)
    step(flashinfer_top_k_top_p, temperature=1.0, top_k=7, top_p=0.5, mixed=True)
    assert called.kwargs["top_k"].tolist() == [7, 7, 20]
    assert called.kwargs["top_k"].dtype == torch.int32
    assert called.kwargs["top_p"].tolist() == [0.5, 1.0, 0.5]


@pytest.mark.parametrize(
    ("module", "order"), [(flashinfer_top_k_top_p_lean, "top_k_first"), (flashinfer_joint, "joint")]
)
def test_lean_filters(sampling, module, order: str) -> None:
    _, logits = step(module, 2.0, top_k=7, top_p=0.5)
    assert sampling.softmax.kwargs == {"temperature": 2.0}
    called = sampling.top_k_top_p_sampling_from_probs
    torch.testing.assert_close(
        called.tensor[:, :20], logits.float().softmax(-1), rtol=0.02, atol=0.02
    )  # the stand-in's softmax has no T
    assert called.args == (7, 0.5)
    assert called.kwargs == {"filter_apply_order": order, "seed": STEP, "offset": SEED}
    step(module, 2.0, top_p=0.5)
    assert called.args == (64, 0.5), "top-k off is all columns"
