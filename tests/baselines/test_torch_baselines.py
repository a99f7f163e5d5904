"""Baselines that run on a CPU: stored logits, penalties, scores, compilation, undefined rows."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fsbench.baselines import (
    exponential_race,
    greedy,
    matmul_only,
    multinomial,
    multinomial_compiled,
    score_chunked,
    weight_stream,
)
from fsbench.baselines.providing.logits import penalizer
from fsbench.discover import discover
from fsbench.inputs import TORCH_DTYPES, make_hidden, make_weight
from fsbench.kernels import flash_score
from fsbench.problem import Problem
from fsbench.provider import padded
from fsbench.verify.pathwise import check_on_problem, penalized

V, D = 50, 8
NOISE = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
ENTRIES = discover()
ON_CPU = sorted(
    name
    for name, entry in ENTRIES.items()
    if entry.unavailable_reason("cpu") is None and "compiled" not in name
)


def inputs(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return equal rows of hidden [B, D], and a weight [V, D]."""
    return make_hidden(problem, 7)[:1].expand(problem.B, -1).contiguous(), make_weight(problem, 7)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ON_CPU)
def test_torchs_default_dtype_changes_no_token(name, eager):
    provider = ENTRIES[name].provider
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "history": 8}
    problems = (
        Problem(40, 16, 500, "fp32", T, "cpu", **options)
        for T, options in ((0.7, penalties), (0.7, {}), (1.0, {}), (0.0, {}))
    )
    problem = next(each for each in problems if not provider.unsupported_reason(each))
    hidden, weight = inputs(problem)
    tokens = []
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            torch.manual_seed(3)
            tokens.append(provider.build(problem, weight.clone())(hidden, *NOISE))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(tokens[0], tokens[1]) and torch.equal(tokens[0], tokens[2])


def test_logits_are_a_view_of_aligned_rows() -> None:
    problem = Problem(3, D, V, "bf16", 1.0, "cpu")
    hidden, weight = inputs(problem)
    logits = matmul_only.PROVIDER.build(problem, weight)(hidden, *NOISE)
    assert logits.shape == (3, V) and logits.stride() == (64, 1)
    torch.testing.assert_close(logits, hidden @ weight.T)
    weight = torch.randn(65, 3)
    more = padded(weight)
    assert more.shape == (128, 3) and torch.equal(more[:65], weight) and not more[65:].any()
    assert padded(weight[:64]).data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("history", [0, 1, 301])
def test_penalties_are_those_of_the_reference(history: int) -> None:
    options = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": -0.2}
    sizes = (5, 8, 200, "fp32", 1.0, "cpu")
    problem = Problem(*sizes, **options, history=history) if history else Problem(*sizes)
    logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(history))
    expected, _ = penalized(problem, logits.clone())
    assert bool((expected != logits).any(1).all()) == bool(history)
    changed = penalizer(problem, torch.device("cpu"))(logits)
    assert changed is logits
    assert torch.allclose(changed, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 7, 8])
def test_chunks_of_any_size_score_all_rows(rows, monkeypatch):
    monkeypatch.setattr(score_chunked, "ROWS", rows)
    problem = Problem(7, 16, 50, "fp32", 1.0, "cpu")
    hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
    launch = score_chunked.PROVIDER.build(problem, weight)
    assert check_on_problem(score_chunked.PROVIDER, problem, launch, hidden, weight).passed


@pytest.mark.interpreter
def test_flash_score_names_its_tile_shapes():
    problem = Problem(7, 16, 50, "fp16", 0.5, "cpu")
    assert flash_score.PROVIDER.build(problem, make_weight(problem, 0)).config


@pytest.mark.parametrize("module", [multinomial, multinomial_compiled, exponential_race])
def test_samplers_on_undefined_rows(module, eager) -> None:
    """As their docstrings say."""
    problem = Problem(3, D, V, "fp32", 1.0, "cpu")
    hidden, weight = inputs(problem)
    launch = module.PROVIDER.build(problem, weight)
    hidden[1] = float("nan")
    if module is exponential_race:
        assert launch(hidden, *NOISE)[1] == 0
    else:
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            launch(hidden, *NOISE)


def test_greedy_on_undefined_rows() -> None:
    """As its docstring says: the first NaN, or token 0 where every logit is -inf."""
    problem = Problem(1, 1, 4, "fp32", 1.0, "cpu")
    with_nan = torch.tensor([[1.0], [float("nan")], [2.0], [float("nan")]])
    for weight, token in ((with_nan, 1), (torch.full((4, 1), float("-inf")), 0)):
        launch = greedy.PROVIDER.build(problem, weight)
        assert launch(torch.ones(1, 1), *NOISE).tolist() == [token]


@pytest.mark.parametrize("module", [multinomial_compiled, exponential_race])
def test_a_sweep_of_shapes_compiles_each_once_and_never_at_launch(module, monkeypatch) -> None:
    """With a backend that counts graphs: the limit of recompilations is Dynamo's."""
    from torch._dynamo.testing import CompileCounter  # takes seconds to load

    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    shapes = [(B, V) for V in (60, 61) for B in (1, 2, 3, 4, 5)]
    assert len(shapes) > torch._dynamo.config.recompile_limit
    launches = []
    for B, V in shapes:
        problem = Problem(B, 16, V, "fp32", 1.0, "cpu")
        launches.append(module.PROVIDER.build(problem, torch.randn(V, 16)))
    assert counter.frame_count == len(shapes)
    torch.compiler.set_stance("fail_on_recompile")
    try:
        for launch, (B, V) in zip(launches, shapes, strict=True):
            tokens = launch(torch.randn(B, 16), *NOISE)
            assert tokens.shape == (B,) and 0 <= tokens.min() <= tokens.max() < V
    finally:
        torch.compiler.set_stance("default")
    assert counter.frame_count == len(shapes)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("V", "D", "programs"), [(1, 1, 3), (127, 41, 3), (64, 512, 2), (257, 1000, 5)]
)
def test_the_weight_stream_reads_every_element_once(V, D, programs) -> None:
    """Small integers make fp32 sums exact in any order."""
    weight = torch.randint(-8, 9, (V, D)).half()
    partial_sums = weight_stream.weight_stream(weight, torch.full((programs,), float("nan")))
    assert partial_sums.sum().item() == weight.double().sum().item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("shape", [(1, 1), (1001, 77), (5000, 4096)])
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_the_weight_stream_on_a_gpu(shape: tuple[int, int], dtype: str) -> None:
    """The replay of a graph must see a weight changed in place."""
    weight = torch.randint(-4, 5, shape, device="cuda").to(TORCH_DTYPES[dtype])
    launch = weight_stream.PROVIDER.build(Problem(1, shape[1], shape[0], dtype), weight)
    unused = torch.zeros(1, dtype=torch.int64, device="cuda")
    assert launch(weight[:1], unused, unused).sum().item() == weight.double().sum().item()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        partial_sums = launch(weight[:1], unused, unused)
    weight.neg_()
    graph.replay()
    assert partial_sums.sum().item() == weight.double().sum().item()


def test_the_papers_preset_has_the_papers_baselines() -> None:
    baselines = [entry for entry in ENTRIES.values() if ".baselines." in entry.source]
    assert {entry.name for entry in baselines if "paper" in entry.provider.presets} == {
        *("multinomial_compiled", "flashinfer_top_k_top_p", "flashinfer_gumbel"),
        *("flashsampling_authors", "matmul_only", "weight_stream"),
    }
