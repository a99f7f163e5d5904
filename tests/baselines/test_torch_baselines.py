"""The CPU-capable baselines: stored logits, and what undefined rows return."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fsbench.baselines import (
    exponential_race,
    greedy,
    matmul_only,
    multinomial,
    multinomial_compiled,
    weight_stream,
)
from fsbench.discover import discover
from fsbench.problem import Problem
from fsbench.provider import padded

STORING = ("greedy", "multinomial", "akunu_cpu", "sort_top_k_top_p")
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
V, D = 50, 8
NOISE = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


def inputs(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Identical hidden rows [B, D] and a weight [V, D] whose logits have a deviation near 1."""
    generator = torch.Generator().manual_seed(7)
    dtype = TORCH_DTYPES[problem.dtype]
    row = torch.randn(1, problem.D, generator=generator)
    weight = torch.randn(problem.V, problem.D, generator=generator) / problem.D**0.5
    return row.expand(problem.B, -1).contiguous().to(dtype), weight.to(dtype)


ON_CPU = sorted(
    name
    for name, entry in discover().items()
    if entry.unavailable_reason("cpu") is None and "compiled" not in name
)


@pytest.fixture
def default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ON_CPU)
def test_torchs_default_dtype_changes_no_token(default_dtype, name, dtype):
    """T, penalties and what a sampler keeps are not of it."""
    provider = discover()[name].provider
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "history": 8}
    problems = (
        Problem(40, 16, 500, "fp32", T, "cpu", **options)
        for T, options in ((0.7, penalties), (0.7, {}), (1.0, {}), (0.0, {}))
    )
    problem = next(each for each in problems if not provider.unsupported_reason(each))
    hidden, weight = inputs(problem)

    def drawn():
        torch.manual_seed(3)
        return provider.build(problem, weight.clone())(hidden, *NOISE)

    expected = drawn()
    default_dtype(dtype)
    assert torch.equal(drawn(), expected)


@pytest.mark.parametrize("name", STORING)
@pytest.mark.parametrize("V", [50, 64])
def test_rows_of_stored_logits_are_aligned_and_their_padding_is_never_drawn(name, V) -> None:
    """All logits are negative, so a zero of the padding would be the likeliest token."""
    problem = Problem(3, D, V, "fp32", 1.0, "cpu")
    weight = torch.full((V, D), -100.0)
    weight[V - 1] = -1.0
    seen = []

    class Products(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function in (torch.Tensor.__matmul__, torch.Tensor.matmul):
                seen.append(result.shape)
            return result

    launch = importlib.import_module(f"fsbench.baselines.{name}").PROVIDER.build(problem, weight)
    with Products():
        tokens = launch(torch.ones(3, D), *NOISE)
    assert tokens.tolist() == [V - 1] * 3
    assert seen == [(3, 64)]


def test_the_bound_returns_a_view_of_aligned_rows() -> None:
    problem = Problem(3, D, V, "bf16", 1.0, "cpu")
    hidden, weight = inputs(problem)
    logits = matmul_only.PROVIDER.build(problem, weight)(hidden, *NOISE)
    assert logits.shape == (3, V) and logits.stride() == (64, 1)
    torch.testing.assert_close(logits, hidden @ weight.T)


def test_a_weight_is_padded_with_zeros_or_left_as_it_is() -> None:
    weight = torch.randn(65, 3)
    more = padded(weight)
    assert more.shape == (128, 3) and torch.equal(more[:65], weight) and not more[65:].any()
    assert padded(weight[:64]).data_ptr() == weight.data_ptr()


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
    weight = torch.tensor([[1.0], [float("nan")], [2.0], [float("nan")]])
    problem = Problem(1, 1, 4, "fp32", 1.0, "cpu")
    launch = greedy.PROVIDER.build(problem, weight)
    assert launch(torch.ones(1, 1), *NOISE).tolist() == [1]
    launch = greedy.PROVIDER.build(problem, torch.full((4, 1), float("-inf")))
    assert launch(torch.ones(1, 1), *NOISE).tolist() == [0]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("V", "D", "programs"), [(1, 1, 3), (127, 41, 3), (64, 512, 2), (257, 1000, 5)]
)
def test_the_weight_stream_reads_every_element_once(V, D, programs) -> None:
    """Small integers make fp32 sums exact in any order."""
    weight = torch.randint(-8, 9, (V, D)).half()
    partial = weight_stream.weight_stream(weight, torch.full((programs,), float("nan")))
    assert partial.sum().item() == weight.double().sum().item()


def test_the_papers_preset_has_the_papers_rivals() -> None:
    of = [entry for entry in discover().values() if entry.source.startswith("fsbench.baselines.")]
    assert {entry.name for entry in of if "paper" in entry.provider.presets} == {
        *("multinomial_compiled", "flashinfer_top_k_top_p", "flashinfer_gumbel"),
        *("matmul_only", "weight_stream"),
    }
