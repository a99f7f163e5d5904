"""The tool that times score and its gradient, on a CPU and a small head."""

from __future__ import annotations

import measure_score
import pytest
import torch
from measure_score import COLUMNS, extra_bytes, table, ways

from fsbench.timers import make_timer
from fsbench.timers.measurement import Measurement

D, V, B = 16, 200, 5


@pytest.fixture
def steps():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, D, generator=generator).requires_grad_() for n in (B, V))
    targets = torch.randint(0, V, (B, measure_score.TARGETS), generator=generator)
    return hidden, weight, ways(hidden, weight, targets)


def test_every_way_is_a_row(monkeypatch):
    monkeypatch.setattr(measure_score, "DEVICE", "cpu")
    monkeypatch.setattr(measure_score, "SHAPES", {(D, V): (1, B)})
    lines = [dict(zip(COLUMNS, line, strict=True)) for line in table()]
    assert [line["b"] for line in lines] == 8 * [1] + 8 * [B]
    assert len({line["what"] for line in lines}) == 8
    assert all(float(line["time_us"]) > 0 and line["busy_us"] == "" for line in lines)


def test_the_time_that_kernels_run_stands_beside_the_span(monkeypatch):
    def measure(step, iterations, before):
        return Measurement([9.0, 7.0, 8.0], busy_us=[3.0, 1.0, 2.0])

    timer = make_timer("cpu", "cpu")
    monkeypatch.setattr(timer, "measure", measure)
    monkeypatch.setattr(measure_score, "make_timer", lambda *_: timer)
    monkeypatch.setattr(measure_score, "DEVICE", "cpu")
    monkeypatch.setattr(measure_score, "SHAPES", {(D, V): (1,)})
    for line in table():
        assert line[4:] == ["8.0", "2.0", "0.0"]


def test_both_trainings_have_the_same_gradients(steps):
    hidden, weight, of = steps
    gradients = []
    for what in ("trained", "chunked"):
        measure_score.forget((hidden, weight))
        of[what]()
        gradients.append((hidden.grad.clone(), weight.grad.clone()))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(-ours, theirs, atol=1e-5, rtol=1e-4)


def test_what_is_not_trained_leaves_no_gradient(steps):
    hidden, weight, of = steps
    for what in set(of) - {"trained", "chunked"}:
        of[what]()
    assert hidden.grad is None and weight.grad is None
    assert extra_bytes(of["score"], (hidden, weight)) == 0
