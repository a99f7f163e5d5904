"""Online Group-Gumbel-Max: its law over many chunks, its log Z, and rows of every kind."""

from __future__ import annotations

import pytest
import torch
from capability_checks import assert_law

from fsbench.kernels import group_gumbel_online as module

pytestmark = pytest.mark.usefixtures("one_thread")

INF = float("inf")
DRAWS = 2**16


def draw(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log Z for logits [B, V]: the identity is the hidden states, logits the weight."""
    return module.group_gumbel_online(torch.eye(len(logits)), logits.T, temperature)


def draw_many(row: torch.Tensor, temperature: float) -> torch.Tensor:
    """DRAWS tokens of one row of logits [V]."""
    tokens, _ = module.group_gumbel_online(torch.ones(DRAWS, 1), row[:, None], temperature)
    return tokens


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(4)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 5.0])
@pytest.mark.parametrize("chunk", [1, 16, 100, 8192])
def test_tokens_are_drawn_from_the_softmax(chunk, temperature, monkeypatch):
    """100 tokens: chunks of one token, a partial last one, a single whole one, one too large."""
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", chunk)
    logits = 1.5 * torch.randn(100) - 20
    logits[[0, 40, 99]] = -18.0
    assert_law("tokens", draw_many(logits, temperature), (logits / temperature).softmax(0))


def test_choices_of_rows_steps_and_chunks_are_independent(monkeypatch):
    """With one token per chunk only the merges choose; pairs of them are uniform over all pairs."""
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 1)
    first, second = draw_many(torch.zeros(3), 1.0), draw_many(torch.zeros(3), 1.0)
    uniform = torch.full((9,), 1 / 9)
    assert_law("tokens", 3 * first[0::2] + first[1::2], uniform)
    assert_law("tokens", 3 * first + second, uniform)


def test_log_masses_are_compared_in_float64(monkeypatch):
    """At logits / T of ten million, fp32 has whole numbers only."""
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 1)
    logits = torch.tensor([1.0, 1.0 - 2.0**-24])
    assert_law("tokens", draw_many(logits, 1e-7), (logits.double() / 1e-7).softmax(0))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 20.0])
@pytest.mark.parametrize("chunk", [1, 7, 8192])
def test_log_z_is_the_logsumexp(chunk, temperature, monkeypatch):
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", chunk)
    logits = torch.randn(4, 100) + torch.tensor([[50.0], [-1e4], [1e4], [-90.0]])
    logits[3, :90] = -INF
    _, log_z = draw(torch.where(logits.isinf(), -3e38, logits), temperature)
    exact = (logits.double() / temperature).logsumexp(1)
    assert log_z.dtype == torch.float64
    assert ((log_z - exact) / exact).abs().max() < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_every_kind(temperature, monkeypatch):
    """Undefined rows, chunks without mass, and the sound rows among them; 3 chunks of 4 tokens."""
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 4)
    rows = {
        "nan": ([1.0] * 11 + [torch.nan], None),
        "nan first": ([torch.nan] + [1.0] * 11, None),
        "+inf": ([1.0] * 5 + [INF] + [1.0] * 6, None),
        "all -inf": ([-INF] * 12, None),
        "first chunk": ([1.0, 1.0] + [-INF] * 10, {0, 1}),
        "middle chunk": ([-INF] * 6 + [-50.0] + [-INF] * 5, {6}),
        "last chunk": ([-INF] * 11 + [-50.0], {11}),
    }
    for name, (row, allowed) in rows.items():
        tokens, log_z = module.group_gumbel_online(
            torch.ones(64, 1), torch.tensor(row)[:, None], temperature
        )
        assert set(tokens.tolist()) <= (allowed or {-1}), name
        assert log_z.isnan().all() == (allowed is None), name


def test_an_undefined_row_leaves_its_neighbours_alone():
    weight = torch.ones(50, 8)
    hidden = torch.randn(4, 8)
    hidden[1] = torch.nan
    hidden[2] = -INF
    tokens, log_z = module.group_gumbel_online(hidden, weight, 1.0)
    assert (tokens >= 0).tolist() == log_z.isfinite().tolist() == [True, False, False, True]


@pytest.mark.parametrize("chunk", [1, 4, 8192])
def test_greedy_is_the_lowest_id_among_ties(chunk, monkeypatch):
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", chunk)
    logits = torch.full((3, 10), -9.0)
    logits[0, [2, 3, 9]] = -3.0
    logits[1, [7, 8]] = -3.0
    logits[2, 4:] = -8.9  # more mass than the largest logit's chunk
    logits[2, 1] = -8.8
    tokens, log_z = draw(logits, 0.0)
    assert tokens.tolist() == [2, 7, 1]
    assert torch.equal(log_z, logits.amax(1).double())


def test_temperatures_below_the_smallest_fp32_number_are_greedy(monkeypatch):
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 16)
    logits = torch.randn(5, 50)
    for temperature in (1e-60, 1e-40):
        assert torch.equal(draw(logits, temperature)[0], logits.argmax(1))
