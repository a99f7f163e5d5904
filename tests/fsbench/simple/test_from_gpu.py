"""The path from a GPU, with CPU tensors in the GPU's place: streams and events do nothing."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from fsbench.inputs import head_with_logits, make_hidden, make_weight
from fsbench.problem import Problem
from fsbench.simple import bus, native
from fsbench.verify.pathwise import check_on_problem

pytestmark = [
    pytest.mark.skipif(bool(native.missing()), reason=str(native.missing())),
    pytest.mark.usefixtures("one_thread"),
]


class _Event:
    def __init__(self, **_):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 0.5


@pytest.fixture
def without_cuda(monkeypatch):
    """torch.cuda's streams and events, and pinned memory, as nothing."""
    empty, zeros = torch.empty, torch.zeros
    stream = SimpleNamespace(synchronize=lambda: None, wait_event=lambda event: None)

    def plain(make):
        def made(*sizes, pin_memory=False, device=None, **options):
            return make(*sizes, **options)

        return made

    monkeypatch.setattr(torch, "empty", plain(empty))
    monkeypatch.setattr(torch, "zeros", plain(zeros))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", _Event)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", ["offload", "shvs"])
def test_tokens_are_those_of_the_path_on_a_cpu(name, dtype, without_cuda):
    provider = importlib.import_module(f"fsbench.baselines.simple_{name}").PROVIDER
    here = Problem(48, 64, 3001, dtype, 0.9, "cpu")
    hidden, weight = make_hidden(here, 0), make_weight(here, 0)
    there = Problem(48, 64, 3001, dtype, 0.9, "cuda")
    launch = provider.build(there, weight)
    check = check_on_problem(provider, here, launch, hidden, weight)
    assert check.passed, check
    counters = torch.tensor([3]), torch.tensor([4])
    wanted = provider.build(here, weight)(hidden, *counters)
    assert torch.equal(launch(hidden, *counters), wanted)


def test_overlap_has_every_time_and_asks_for_tails(without_cuda):
    hidden, weight = torch.randn(5, 64).bfloat16(), torch.randn(3001, 64).bfloat16() / 8
    rows = bus.overlap(hidden, weight, 700, 1, [3], 2, steps=4, rounds=2)
    assert [(row["b"], row["design"]) for row in rows] == [(3, "offloaded"), (3, "SHVS")]
    for row in rows:
        assert row["exposed_serial_us"] == pytest.approx(row["serial_us"] - row["nothing_us"])
        assert row["hidden_us"] == pytest.approx(row["serial_us"] - row["overlapped_us"])
    assert rows[0]["asked_share"] == 0 < rows[1]["asked_share"] < 1


def test_rows_of_hot_tokens_ask_for_no_tail(without_cuda):
    logits = torch.randn(4, 3001)
    logits[:, :700] += 20.0
    hidden, weight = head_with_logits(logits, torch.bfloat16)
    offloaded, shvs = bus.overlap(hidden, weight, 700, 1, [6], 2, steps=4, rounds=2)
    assert offloaded["asked_share"] == shvs["asked_share"] == 0


def test_copies_are_counted_in_bytes(without_cuda):
    rows = bus.copies(3001, 700, [2])
    assert [row["bytes"] for row in rows] == [2 * 3001 * 2, 2 * 700 * 2, 2 * 8]
    assert all(row["time_us"] == 500 for row in rows)
