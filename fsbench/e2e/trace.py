"""Attribute a decode step's time to its parts, from a trace of torch.profiler (Chrome's JSON).

A kernel belongs to the ranges (torch.profiler.record_function) in which the host launched it. A
correlation id links it to the launching call, which has a thread and a time. So a kernel that runs
later or on another stream is counted in the right range, and a CUDA graph's kernels belong to the
range of the replay.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fsbench.e2e.records import Profile
from fsbench.errors import ResultsError
from fsbench.integrations.draw import DRAW_MARK, MATMUL_MARK

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST = ("cuda_runtime", "cuda_driver")

Event = dict[str, Any]


def read_profile(path: Path) -> Profile:
    """Return the step_profile of a trace file."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    return step_profile(trace["traceEvents"])


def step_profile(events: Iterable[Event]) -> Profile:
    """Return the mean step between the first and the last range DRAW_MARK.

    A step lasts from the start of such a range to the start of the next; on a GPU from the first
    kernel of one to the first kernel of the next. Ranges MATMUL_MARK may be inside, or before the
    first step. Times of draw and matmul are means over their ranges.

    Raises:
        ResultsError: fewer than two ranges DRAW_MARK.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    draws, matmuls = (
        sorted(
            (e for e in spans if e.get("cat") == "user_annotation" and e["name"] == name),
            key=lambda e: float(e["ts"]),
        )
        for name in (DRAW_MARK, MATMUL_MARK)
    )
    if len(draws) < 2:
        raise ResultsError(f"trace: expected two ranges {DRAW_MARK!r} or more; got {len(draws)}")
    device = sorted((e for e in spans if e.get("cat") in _DEVICE), key=lambda e: float(e["ts"]))
    return _on_gpu(spans, device, draws, matmuls) if device else _on_cpu(draws, matmuls)


def _on_cpu(draws: list[Event], matmuls: list[Event]) -> Profile:
    steps = len(draws) - 1
    step_us = (draws[-1]["ts"] - draws[0]["ts"]) / steps
    draw_us = sum(e["dur"] for e in draws) / len(draws)
    matmul_us = sum(e["dur"] for e in matmuls) / len(matmuls) if matmuls else None
    return Profile(steps, draw_us, matmul_us, step_us - draw_us, step_us)


def _on_gpu(
    spans: list[Event], device: list[Event], draws: list[Event], matmuls: list[Event]
) -> Profile:
    calls = {
        e["args"]["correlation"]: e
        for e in spans
        if e.get("cat") in _HOST and "correlation" in e.get("args", {})
    }

    # If the trace lacks the call (a driver API that the profiler does not follow): the operator.
    operators = {
        e["args"]["External id"]: e
        for e in spans
        if e.get("cat") in ("cpu_op", "user_annotation") and "External id" in e.get("args", {})
    }

    def launching_range(event: Event, ranges: list[Event]) -> Event | None:
        """Return the range in which a kernel was launched, or None."""
        args = event.get("args", {})
        call = calls.get(args.get("correlation")) or operators.get(args.get("External id"))
        if call is None:
            return None
        return next(
            (
                r
                for r in ranges
                if r["tid"] == call["tid"] and r["ts"] <= call["ts"] < r["ts"] + r["dur"]
            ),
            None,
        )

    launched = [(e, launching_range(e, draws), launching_range(e, matmuls)) for e in device]
    begins = [min((e["ts"] for e, d, _ in launched if d is r), default=None) for r in draws]
    starts = [ts for ts in begins if ts is not None]
    if len(starts) < 2:
        raise ResultsError(f"trace: expected kernels in two draws or more; got {len(starts)}")
    first, last, steps = min(starts), max(starts), len(starts) - 1
    kernels: Counter[str] = Counter()
    draw_us = rest_us = 0.0
    inside = []
    for event, in_draw, in_matmul in launched:
        if in_matmul and not in_draw:
            continue
        start, stop = event["ts"], event["ts"] + event["dur"]
        inside.append((max(start, first), min(stop, last)))
        if not first <= start < last:
            continue
        if in_draw:
            draw_us += event["dur"]
            kernels[event["name"][:80]] += event["dur"]
        else:
            rest_us += event["dur"]
    seen = {id(m) for _, _, m in launched if m is not None}
    matmul_us = sum(e["dur"] for e, _, m in launched if m is not None)
    return Profile(
        steps,
        draw_us / steps,
        matmul_us / len(seen) if seen else None,
        rest_us / steps,
        _union(inside) / steps,
        {name: total / steps for name, total in kernels.most_common(8)},
    )


def _union(intervals: list[tuple[float, float]]) -> float:
    """Return the length of a union of intervals that are sorted by start; some may be empty."""
    total, end = 0.0, float("-inf")
    for start, stop in intervals:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
