"""Inverse-CDF sampling: the search, and the error of sums in fp32 that its docstring states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fsbench.baselines import inverse_cdf
from fsbench.inputs import make_hidden, make_weight
from fsbench.problem import Problem

UNUSED = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
VOCABULARY = 151_936
LIKELY = np.exp(-inverse_cdf.PROVIDER.capabilities.exact_to_gap)


def launched(logits: torch.Tensor, u: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the tokens of logits fp32 [rows, V] at T = 1, if every row draws `u`."""
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.full(shape, u))
    problem = Problem(1, 1, logits.shape[1], "fp32", 1.0, "cpu")
    launches = [inverse_cdf.build(problem, row[:, None]) for row in logits]
    return [int(launch(torch.ones(1, 1), *UNUSED)) for launch in launches]


def test_every_u_draws_a_token_that_has_probability(monkeypatch):
    """u = 0 is not the masked first token, and the largest u is not the masked last one."""
    inf = torch.inf
    logits = torch.tensor([[-inf, 0.0, 0.0, -inf], [0.0, -inf, -inf, -inf], [0.0, 0.0, 1.0, 2.0]])
    assert launched(logits, 0.0, monkeypatch) == [1, 0, 0]
    assert launched(logits, 0.5, monkeypatch) == [2, 0, 3]
    assert launched(logits, 1 - 2**-24, monkeypatch) == [2, 0, 3]


@pytest.mark.parametrize("V", [1, 3, 7, 100, 1001])
def test_the_largest_u_stays_below_a_sum_that_is_not_one(V, monkeypatch):
    logits = torch.linspace(-3, 3, V).expand(5, V) * torch.arange(1.0, 6.0)[:, None]
    assert max(launched(logits, 1 - 2**-24, monkeypatch)) < V


def test_undefined_rows_return_no_token():
    problem = Problem(3, 8, 50, "fp32", 1.0, "cpu")
    hidden = make_hidden(problem, 7)
    hidden[1] = torch.nan
    tokens = inverse_cdf.build(problem, make_weight(problem, 7))(hidden, *UNUSED)
    assert tokens[1] == 50 and tokens[[0, 2]].max() < 50


def exact(row: str) -> np.ndarray:
    """Return probabilities, float64 [V]; a gap in T is that of all tokens to the first."""
    p = np.ones(VOCABULARY)
    if row == "zipf":
        p /= np.arange(1, VOCABULARY + 1)
    elif row != "equal":
        p[1:] = np.exp(-float(row))
    return p / p.sum()


def drawn(p: np.ndarray, order: type) -> np.ndarray:
    """Return how often each token is drawn, over all u: float64 [V].

    Args:
        order: dtype of the running sum, from the first token on; each c_i is then rounded to fp32.
    """
    sums = p.astype(np.float32).cumsum(dtype=order).astype(np.float32)
    points = np.arange(2**24, dtype=np.float32) * np.float32(2**-24) * sums[-1]
    return np.diff(np.searchsorted(points, sums), prepend=0) / len(points)


def test_torchs_sums_on_a_cpu_are_those_in_float64():
    p = torch.from_numpy(exact("18")).float()
    assert torch.equal(p.cumsum(0), p.double().cumsum(0).float())
    assert (p.numpy().cumsum(dtype=np.float32) != p.cumsum(0).numpy()).any()


def test_the_error_of_sums_in_float64_that_are_rounded_to_fp32():
    p = exact("equal")
    assert abs(drawn(p, np.float64) - p).sum() / 2 == pytest.approx(0.0022, abs=5e-5)
    p = exact("zipf")
    error = abs(drawn(p, np.float64) / p - 1)[p > LIKELY].max()
    assert error == pytest.approx(0.003, abs=5e-4)
    p = exact("18")
    counts = drawn(p, np.float64)
    assert (counts == 0).mean() == pytest.approx(0.75, abs=0.005)
    assert counts[1:].sum() == pytest.approx(p[1:].sum(), rel=1e-3)


@pytest.mark.parametrize(("gap", "share"), [("16", 1.076), ("18", 0.0)])
def test_the_error_of_sums_in_fp32(gap, share):
    p = exact(gap)
    assert drawn(p, np.float32)[1:].sum() / p[1:].sum() == pytest.approx(share, abs=5e-4)
