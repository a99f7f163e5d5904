"""What only a GPU shows: FlashInfer's steps are independent, the weight stream reads everything."""

from __future__ import annotations

import importlib

import pytest
import torch

from fsbench.problem import Problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize(
    "name",
    [
        "flashinfer_gumbel",
        "flashinfer_gumbel_lean",
        "flashinfer_top_k_top_p",
        "flashinfer_top_k_top_p_lean",
    ],
)
def test_flashinfer_steps_are_independent(name: str) -> None:
    """With flat logits, tokens of two steps differ by d as often as any other d.

    Noise that a step shares with an earlier one, moved by some tokens, repeats winners at that
    distance: passing the step as FlashInfer's offset would make up to 3/4 of them do so.
    """
    pytest.importorskip("flashinfer")
    B, V, steps = 4096, 64, 32
    weight = torch.zeros(V, 64, dtype=torch.bfloat16, device="cuda")
    hidden = torch.ones(B, 64, dtype=torch.bfloat16, device="cuda")
    seed, offset = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
    provider = importlib.import_module(f"fsbench.baselines.{name}").PROVIDER
    launch = provider.build(Problem(B, 64, V), weight)
    tokens = []
    for _ in range(steps):
        tokens.append(launch(hidden, seed, offset).long())
        offset += 1
    drawn = torch.stack(tokens)  # [steps, B]
    for lag in (1, 2, 3, 4):
        moved = (drawn[:-lag] - drawn[lag:]) % V
        counts = torch.bincount(moved.flatten(), minlength=V).double()
        expected = moved.numel() / V
        assert (counts - expected).abs().max().item() < 6 * expected**0.5


@pytest.mark.parametrize("shape", [(1, 1), (1001, 77), (5000, 4096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weight_stream_reads_every_element(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Small integers sum exactly; the graph replay must see a weight changed in place."""
    from fsbench.baselines.weight_stream import PROVIDER

    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    V, D = shape
    weight = torch.randint(-4, 5, shape, device="cuda").to(dtype)
    launch = PROVIDER.build(Problem(1, D, V, names[dtype]), weight)
    unused = torch.zeros(1, dtype=torch.int64, device="cuda")
    assert launch(weight[:1], unused, unused).sum().item() == weight.double().sum().item()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        partial = launch(weight[:1], unused, unused)
    weight.neg_()
    graph.replay()
    assert partial.sum().item() == weight.double().sum().item()
