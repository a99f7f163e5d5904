"""The tool that times draft and verify steps, on a CPU and small heads."""

from __future__ import annotations

import measure_drafts
import pytest
import torch
from measure_drafts import COLUMNS, DRAFTS, all_steps, table

from fsbench import inputs
from fsbench.kernels import flash_sample
from fsbench.problem import Problem

D, V, REDUCED = 64, 300, 128
B = 2


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(measure_drafts, "DEVICE", "cpu")
    monkeypatch.setattr(measure_drafts, "SHAPES", ((D, V),))
    monkeypatch.setattr(measure_drafts, "BATCHES", (1, B))
    monkeypatch.setattr(measure_drafts, "REDUCED", REDUCED)
    monkeypatch.setattr(measure_drafts, "ROUNDS", 2)
    monkeypatch.setattr(measure_drafts, "ITERATIONS", 1)
    monkeypatch.setattr(measure_drafts.inputs, "make_weight", fp32(inputs.make_weight))
    monkeypatch.setattr(measure_drafts.inputs, "make_hidden", fp32(inputs.make_hidden))


def fp32(make):
    """The interpreter has no screen of bf16."""
    return lambda *of: make(*of).float()


def test_every_step_is_a_row_beside_the_matmul_of_as_many_rows():
    lines = [dict(zip(COLUMNS, line, strict=True)) for line in table()]
    rows = B * (DRAFTS + 1)
    assert [line["b"] for line in lines] == 14 * [1] + 14 * [B] + 5 * [rows]
    assert len({(line["b"], line["what"]) for line in lines}) == len(lines)
    assert all(float(line["time_us"]) > 0 and float(line["ratio"]) > 0 for line in lines)
    alone = [line["ratio"] for line in lines if line["what"] == measure_drafts.BASE]
    assert alone == 3 * ["1.0000"]


def test_steps_draw_what_their_names_say():
    problem = Problem(B, D, V, device="cpu", logits="normal:3")
    hidden = measure_drafts.inputs.make_hidden(problem, 0)
    weight = measure_drafts.inputs.make_weight(problem, 0)
    seed, offset = torch.ones(2, 1, dtype=torch.int64)
    given = {"seed": seed, "offset": offset}
    steps = all_steps(weight)
    of = {what: sample(hidden, head, **given) for what, (sample, head) in steps[B].items()}
    tokens = {what: getattr(drawn, "tokens", drawn) for what, drawn in of.items()}
    greedy = tokens[measure_drafts.BASE]
    for what in ("matmul, one pass", "bf16, greedy", "screened, greedy"):
        assert tokens[what].equal(greedy)
    drawn = flash_sample(hidden, weight, noise="token", **given).tokens
    assert tokens["bf16, sampled"].equal(drawn) and tokens["screened, sampled"].equal(drawn)
    for how in ("greedy", "sampled"):
        assert tokens[f"reduced, {how}"].equal(tokens[f"reduced, screened, {how}"])

    many = hidden.repeat_interleave(DRAFTS + 1, 0)
    verify, head = steps[len(many)]["verify"]
    found = verify(many, head, **given)
    of_request = torch.arange(B)
    first = flash_sample(hidden, head, noise="token", seed=of_request, offset=of_request)
    assert found.shape == (B, DRAFTS + 1) and found[:, 0].equal(first.tokens)
