"""Requests that arrive by themselves: the process, the client, the record and its table."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from fsbench.e2e.arrivals import (
    arrival_times,
    open_loop,
    open_loop_markdown,
    open_loop_summary,
    served,
)
from fsbench.e2e.records import Served
from fsbench.e2e.vllm_engine import family, pin, shares
from fsbench.errors import EngineFailed

CASE = {"engine": "vllm", "model": "qwen3-8b", "tp": 1, "requests": "default", "b": 16}


def test_arrivals_are_a_poisson_process_of_their_seed():
    times = arrival_times(50.0, 20_000, seed=3)
    gaps = np.diff([0.0, *times])
    assert times == arrival_times(50.0, 20_000, seed=3) != arrival_times(50.0, 20_000, seed=4)
    assert gaps.min() > 0
    # An exponential law has mean = deviation = 1 / rate; 5 standard errors are 3.5 %.
    assert gaps.mean() == pytest.approx(0.02, rel=0.035)
    assert gaps.std() == pytest.approx(0.02, rel=0.07)
    assert (gaps > 0.04).mean() == pytest.approx(np.exp(-2), abs=0.012)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.035
    assert arrival_times(100.0, 5, 3) == pytest.approx([each / 2 for each in times[:5]])


def test_requests_are_sent_when_they_are_due_whether_or_not_others_are_done():
    """The first one's tokens come only when the last one was sent."""
    order, last_sent = [], asyncio.Event()

    async def ask(number):
        order.append(number)
        if number == 3:
            last_sent.set()
        await last_sent.wait()
        yield 1
        yield 2

    times = [0.0, 0.002, 0.002, 0.004]
    found = asyncio.run(open_loop(ask, times, 3))
    assert order[0] == 0 and sorted(order) == [0, 1, 2, 3]
    assert min(found.late_us) >= 0
    assert all(a + due * 1e6 >= 4000 for a, due in zip(found.ttft_us, times, strict=True))


def test_times_count_from_when_a_request_was_due():
    found = served([1.0, 2.0], [(1.5, [2.0, 2.25, 2.5]), (2.0, [4.0, 4.5, 5.0])], 3)
    assert found.late_us == [5e5, 0]
    assert found.ttft_us == [1e6, 2e6] and found.latency_us == [1.5e6, 3e6]
    assert found.tpot_us == [0.25e6, 0.5e6]
    assert (found.seconds, found.output_tokens) == (5.0, 3)


@pytest.mark.parametrize("arrived", [[], [1.0, 1.1], [1.0, 1.1, 1.2, 1.3]])
def test_a_request_that_lost_tokens_is_an_error(arrived):
    with pytest.raises(EngineFailed, match="expected 3 tokens"):
        served([0.0, 0.0], [(0.0, [1.0, 1.1, 1.2]), (0.0, arrived)], 3)


def test_percentiles_are_over_all_requests_of_all_runs():
    lines = [{"case": {**CASE, "sampler": "ours"}, "counts": {}}]
    for sampler, factor in (("base", 2.0), ("ours", 1.0)):
        case = {**CASE, "sampler": sampler, "label": sampler.upper()}
        for run in range(2):
            us = [factor * 1000.0 * (each + 50 * run) for each in range(1, 51)]
            late = [0.0] * 50
            record = Served(late, us, [each / 10 for each in us], us, 10.0 * (1 + run), 128)
            lines.append(
                {"case": case, "run": run, "rate": 4.0, "seed": run, "served": vars(record)}
            )
    frame = open_loop_summary(lines).set_index("sampler")
    ours, base = frame.loc["ours"], frame.loc["base"]
    assert (ours.runs, ours.requests_per_run, ours.rate) == (2, 50, 4.0)
    assert ours.ttft_p50_ms == pytest.approx(50.5) and ours.latency_p95_ms == pytest.approx(95.05)
    assert base.ttft_p99_ms == pytest.approx(2 * 99.01) and ours.tpot_p50_ms == pytest.approx(5.05)
    assert ours.served_rate == pytest.approx(3.75) and ours.late_p99_ms == 0
    text = open_loop_markdown(open_loop_summary(lines))
    assert "qwen3-8b in vllm, TP 1, default requests" in text
    assert "| 16 | 4 | OURS | 3.75 | 50.50 / 99.01 |" in text
    assert open_loop_summary(lines[:1]).empty


def test_cores_are_shared_without_overlap():
    assert shares([0, 1, 2, 5, 6, 7, 8], 3) == [[0, 1], [2, 5], [6, 7]]
    assert shares([4], 2) == []
    found = shares(range(16), 3)
    assert all(set(a).isdisjoint(b) for a, b in pairwise(found))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinities here")
def test_a_family_gets_its_cores_threads_and_children_too():
    code = (
        "import subprocess, sys, threading\n"
        "wait = threading.Thread(target=sys.stdin.read); wait.start()\n"
        "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True); wait.join(); child.communicate()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as parent:
        child = int(parent.stdout.readline())
        assert family(parent.pid) == [parent.pid, child]
        given = pin(parent.pid)
        if len(os.sched_getaffinity(0)) < 2:
            assert given == []
        else:
            threads = [int(name) for name in os.listdir(f"/proc/{parent.pid}/task")]
            assert len(threads) == 2
            assert [os.sched_getaffinity(each) for each in threads] == [set(given[0])] * 2
            assert os.sched_getaffinity(child) == set(given[1])
            assert set(given[0]).isdisjoint(given[1])
        parent.communicate()
