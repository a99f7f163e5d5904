"""Attribution of a profile's kernels: traces made by hand, and one of torch.profiler."""

from __future__ import annotations

import pytest
import torch

from fsbench.e2e.trace import read_profile, step_profile
from fsbench.errors import ResultsError
from fsbench.integrations.draw import DRAW_MARK, MATMUL_MARK

DRAW, HEAD = DRAW_MARK, MATMUL_MARK


def span(cat: str, name: str, ts: float, dur: float, tid: int = 1, call: int | None = None) -> dict:
    args = {} if call is None else {"correlation": call}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def kernel(name: str, call: int, launched: float, ts: float, dur: float, tid: int = 1) -> list:
    """Return a launch on a thread of the host, and the kernel that it starts."""
    return [
        span("cuda_runtime", "cudaLaunchKernel", launched, 1, tid, call),
        span("kernel", name, ts, dur, 99, call),
    ]


def steps(n: int, period: float = 1000.0) -> list[dict]:
    """Return steps of 500 us of layers, 200 of head, 50 of sampling; the GPU is 3 ms behind."""
    events = []
    for k in range(n):
        host, gpu = k * period, 3000 + k * period
        events += [
            span("user_annotation", DRAW, host + 100, 50),
            span("user_annotation", HEAD, host + 105, 20),
            *kernel("graph", 10 * k, host + 10, gpu, 500),
            *kernel("gemm", 10 * k + 1, host + 110, gpu + 500, 200),
            *kernel("gumbel", 10 * k + 2, host + 140, gpu + 700, 50),
        ]
    return events


def test_kernels_belong_to_the_range_that_launched_them():
    result = step_profile(steps(5))
    assert result.steps == 4
    assert (result.draw_us, result.matmul_us) == (250, 200)
    assert (result.rest_us, result.busy_us) == (500, 750)
    assert result.kernels == {"gemm": 200, "gumbel": 50}


def test_overlapping_kernels_are_busy_once():
    events = steps(3)
    for k in range(3):
        events += kernel("copy", 1000 + k, k * 1000 + 20, 3000 + k * 1000 + 400, 200)
    result = step_profile(events)
    assert (result.rest_us, result.busy_us) == (700, 750)


def test_another_thread_is_another_range():
    events = [e for e in steps(3) if e["name"] != "gumbel"]
    events += kernel("copy", 5000, 1110, 4300, 7, tid=2)  # in the second draw's time
    result = step_profile(events)
    assert result.draw_us == 200
    assert result.rest_us == 500 + 7 / 2


def test_a_matmul_outside_of_the_steps_is_no_part_of_them():
    events = steps(4)
    events = [e for e in events if e["name"] != HEAD]
    events += [span("user_annotation", HEAD, -500, 100), *kernel("lone", 7777, -450, 2000, 180)]
    result = step_profile(events)
    assert (result.draw_us, result.matmul_us, result.rest_us) == (250, 180, 500)


def test_without_a_matmul_it_is_unknown():
    events = [e for e in steps(3) if e["name"] != HEAD]
    assert step_profile(events).matmul_us is None


def test_without_the_launching_call_the_operator_counts():
    """A profiler may leave out the driver API by which Triton launches."""
    events = [e for e in steps(3) if e["name"] != "gumbel"]
    events = [e for e in events if (e["args"].get("correlation") or 0) % 10 != 2]
    for k in range(3):
        operator = span("cpu_op", "fsbench::flash_sample", k * 1000 + 130, 15)
        triton = span("kernel", "triton", 3000 + k * 1000 + 700, 40, 99, 900 + k)
        for event in (operator, triton):
            event["args"]["External id"] = 70 + k
        events += [operator, triton]
    result = step_profile(events)
    assert (result.draw_us, result.kernels["triton"]) == (240, 40)


def test_too_few_steps_are_an_error():
    with pytest.raises(ResultsError, match="expected two ranges 'fsbench: draw' or more; got 1"):
        step_profile(steps(1))
    events = [e for e in steps(2) if e["args"].get("correlation", 0) < 10]
    with pytest.raises(ResultsError, match="expected kernels in two draws or more; got 1"):
        step_profile(events)


def test_a_profile_of_torch_on_a_cpu(tmp_path):
    from torch.profiler import profile, record_function

    matrix = torch.randn(300, 300)
    with profile() as recorded:
        for _ in range(4):
            matrix @ matrix @ matrix @ matrix
            with record_function(DRAW), record_function(HEAD):
                matrix @ matrix
    path = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(path))
    result = read_profile(path)
    assert result.steps == 3
    assert 0 < result.matmul_us <= result.draw_us
    assert result.busy_us == pytest.approx(result.draw_us + result.rest_us)
