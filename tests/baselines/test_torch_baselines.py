"""The CPU-capable baselines: distribution, temperature, dtypes, and what undefined rows return."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch.overrides import TorchFunctionMode

from fsbench.baselines import (
    exponential_race,
    greedy,
    matmul_only,
    multinomial,
    multinomial_compiled,
)
from fsbench.problem import DTYPES, Problem
from fsbench.provider import padded

STORING = ("greedy", "multinomial", "akunu_cpu", "sort_top_k_top_p")
EXACT = (multinomial, multinomial_compiled, exponential_race)
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROWS, V, D, DRAWS = 2000, 50, 8, 10
NOISE = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


def inputs(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Identical hidden rows [B, D] and a weight [V, D] whose logits have a deviation near 1."""
    generator = torch.Generator().manual_seed(7)
    dtype = TORCH_DTYPES[problem.dtype]
    row = torch.randn(1, problem.D, generator=generator)
    weight = torch.randn(problem.V, problem.D, generator=generator) / problem.D**0.5
    return row.expand(problem.B, -1).contiguous().to(dtype), weight.to(dtype)


def g_test(tokens: np.ndarray, probs: np.ndarray) -> float:
    """p-value of the G-test of tokens against probs, bins pooled to an expectation of 10 each.

    A token outside [0, V) is no draw at all: p = 0.
    """
    if tokens.min() < 0 or tokens.max() >= len(probs):
        return 0.0
    observed = np.bincount(tokens, minlength=len(probs))
    order = np.argsort(probs)
    expected = len(tokens) * probs[order] / probs.sum()
    bins = np.minimum(np.cumsum(expected) // 10, expected.sum() // 10 - 1).astype(int)
    _, bins = np.unique(bins, return_inverse=True)
    seen, due = np.bincount(bins, observed[order]), np.bincount(bins, expected)
    g = 2 * np.sum(np.where(seen > 0, seen * np.log(np.maximum(seen, 1) / due), 0))
    return float(chi2.sf(g, len(due) - 1))


def test_g_test_rejects_a_bias_and_accepts_none() -> None:
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(V))
    drawn = rng.choice(V, size=20_000, p=probs)
    assert g_test(drawn, probs) > 1e-6
    assert g_test(drawn, np.roll(probs, 1)) < 1e-6
    rare = int(np.argmin(probs))
    assert g_test(np.where(np.arange(20_000) % 100 == 0, rare, drawn), probs) < 1e-6


@pytest.mark.parametrize("module", EXACT, ids=lambda module: module.PROVIDER.name)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_from_softmax(module, temperature: float) -> None:
    """Built once per temperature, since compiling is slow; an undefined row comes last."""
    problem = Problem(ROWS, D, V, "fp32", temperature, "cpu")
    hidden, weight = inputs(problem)
    torch.manual_seed(20)
    launch = module.PROVIDER.build(problem, weight)
    draws = [launch(hidden, *NOISE) for _ in range(DRAWS)]
    for tokens in draws:
        assert tokens.shape == (ROWS,)
        assert tokens.dtype in (torch.int32, torch.int64)
    assert not torch.equal(draws[0], draws[1])
    logits = (hidden[0].double() @ weight.double().T) / temperature
    tokens = torch.cat(draws).numpy()
    assert g_test(tokens, logits.softmax(-1).numpy()) > 1e-6
    assert g_test(tokens, (2 * logits).softmax(-1).numpy()) < 1e-6

    undefined = hidden.clone()
    undefined[3] = float("nan")
    if module is exponential_race:
        assert launch(undefined, *NOISE)[3] == 0
    else:
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            launch(undefined, *NOISE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eager_baselines_take_every_dtype(dtype: str) -> None:
    problem = Problem(3, D, V, dtype, 1.0, "cpu")
    hidden, weight = inputs(problem)
    logits = matmul_only.PROVIDER.build(problem, weight)(hidden, *NOISE)
    assert logits.shape == (3, V)
    assert logits.dtype == TORCH_DTYPES[dtype]
    tokens = greedy.PROVIDER.build(problem, weight)(hidden, *NOISE)
    assert torch.equal(tokens, logits.argmax(-1))
    tokens = multinomial.PROVIDER.build(problem, weight)(hidden, *NOISE)
    assert tokens.shape == (3,)
    assert tokens.min() >= 0
    assert tokens.max() < V


def test_exact_baselines_find_the_only_likely_token() -> None:
    weight = torch.zeros(127, 16)
    weight[125] = 10.0
    problem = Problem(1, 16, 127, "fp32", 1.0, "cpu")
    for module in EXACT:
        launch = module.PROVIDER.build(problem, weight)
        assert launch(torch.ones(1, 16), *NOISE).tolist() == [125]


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


def test_greedy_on_undefined_rows() -> None:
    """As its docstring says: the first NaN, or token 0 where every logit is -inf."""
    weight = torch.tensor([[1.0], [float("nan")], [2.0], [float("nan")]])
    problem = Problem(1, 1, 4, "fp32", 1.0, "cpu")
    launch = greedy.PROVIDER.build(problem, weight)
    assert launch(torch.ones(1, 1), *NOISE).tolist() == [1]
    launch = greedy.PROVIDER.build(problem, torch.full((4, 1), float("-inf")))
    assert launch(torch.ones(1, 1), *NOISE).tolist() == [0]


def test_greedy_takes_temperature_zero_and_samplers_do_not() -> None:
    cold = Problem(1, D, V, "fp32", 0.0, "cpu")
    assert greedy.PROVIDER.unsupported_reason(cold) is None
    for module in EXACT:
        reason = module.PROVIDER.unsupported_reason(cold)
        assert reason is not None
        assert "temperature 0" in reason
        assert (
            module.PROVIDER.unsupported_reason(dataclasses.replace(cold, temperature=1.0)) is None
        )
