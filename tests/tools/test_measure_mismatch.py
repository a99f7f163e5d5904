"""The tool that compares log-probabilities of rollouts and trainers, on a CPU and small heads."""

from __future__ import annotations

from types import SimpleNamespace

import measure_mismatch
import pytest
import torch
from measure_mismatch import COLUMNS, PAIRS, difference, table

from fsbench import inputs
from fsbench.problem import Problem


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(measure_mismatch, "DEVICE", "cpu")
    monkeypatch.setattr(measure_mismatch, "SHAPES", {"cpu": (12, 64, 500)})
    monkeypatch.setattr(measure_mismatch, "BATCHES", (1, 8))


def test_a_difference_is_what_was_planted():
    trainer = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0], dtype=torch.float64)
    rollout = trainer - torch.tensor([0.0, 1e-4, -2e-3, 0.5, torch.nan])
    tokens, *shares = difference(rollout, trainer)
    r = torch.tensor([1e-4, -2e-3, 0.5], dtype=torch.float64)
    kl = float((r.expm1() - r).sum() / 4)
    assert tokens == 4
    assert list(map(float, shares)) == pytest.approx(
        [0.5021 / 4, 0.5, 0.25, 0.5, 0.75, kl], rel=0.01
    )


def test_every_pair_is_compared_and_the_rounding_of_logits_shows(capsys):
    lines = [dict(zip(COLUMNS, line, strict=True)) for line in table([])]
    assert "SmolLM2-135M: left out" in capsys.readouterr().out
    for law in measure_mismatch.LOGITS:
        rows = [line for line in lines if line["logits"] == law]
        cells = {(x["rollout"], x["batch"], x["trainer"]): x for x in rows}
        rollouts = {rollout for rollout, batch, trainer in cells if trainer == "float64"}
        assert rollouts >= {
            "bf16",
            "log_softmax",
            "chunked",
            "fp32 logits",
            "score",
            "flash_sample",
        }
        assert set(cells) == {(name, 12, "float64") for name in rollouts} | {
            (rollout, batch, trainer)
            for rollout, trainers in PAIRS.items()
            for trainer in set(trainers) & rollouts
            for batch in (1, 8)
        }
        assert all(line["tokens"] == 12 for line in rows)
        error = {name: float(cells[name, 12, "float64"]["max"]) for name in rollouts}
        fine, coarse = ("fp32 logits", "score", "flash_sample"), ("log_softmax", "chunked", "bf16")
        assert max(error[name] for name in fine) < 1e-5 < min(error[name] for name in coarse)
        assert max(error.values()) < 0.2


def test_a_model_is_looked_at_before_each_token_it_draws(monkeypatch):
    problem = Problem(1, 16, 100, device="cpu")
    head, states = inputs.make_weight(problem, 0).float(), torch.randn(2, 72, 16)
    model = SimpleNamespace(
        head=head,
        texts=lambda T, filters, length: torch.zeros(2, 8 + length, dtype=torch.int64),
        model=SimpleNamespace(model=lambda tokens: SimpleNamespace(last_hidden_state=states)),
    )
    monkeypatch.setattr(measure_mismatch, "Model", lambda wheel: model)
    monkeypatch.setattr(measure_mismatch, "LOGITS", ())
    calls = []
    monkeypatch.setattr(measure_mismatch, "rows", lambda *args: calls.append(args) or [])
    assert not list(table(["a.whl"]))
    ((name, hidden, weight),) = calls
    assert name == "SmolLM2-135M" and weight.equal(head.bfloat16())
    assert hidden.equal(states[:, 7:71].reshape(-1, 16).bfloat16())
