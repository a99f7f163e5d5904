"""GPU activity records through CUPTI: the time of the kernels themselves.

Each iteration is a window on CUPTI's clock, opened and closed while the device is idle:

    before(); flush; synchronize; t0; step(); synchronize; t1

An activity (kernel, copy, memset) belongs to the iteration whose [t0, t1] holds its start, so the
flush and `before` are outside. Per iteration: span = last end - first start, which includes gaps
between kernels but not the launch of the first; busy = union of the intervals; sum = their sum.

CUPTI has one owner per process. This module registers its callbacks once, enables the activity
kinds around each measurement, and never calls cupti.finalize(), which acts on the whole process
and does not get along with CUDA graphs that are still alive.
"""

from __future__ import annotations

import ctypes
import statistics
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from typing import Any, NamedTuple

import torch

from fsbench.errors import FsbenchError, TimerUnavailable
from fsbench.timers.gpu.l2 import L2Flush
from fsbench.timers.measurement import Measurement

try:
    from cupti import cupti

    _CUPTI_PROBLEM = ""
except ImportError as error:
    cupti, _CUPTI_PROBLEM = None, str(error)

_INSTALL = "pip install -e '.[gpu]' in a checkout of fsbench, or choose --timer events"
_BUFFER_BYTES = 8 * 1024 * 1024  # as in NVIDIA's samples; about 40,000 kernel records
_NAME_LENGTH = 80


class Record(NamedTuple):
    """One activity, in nanoseconds on the clock of cupti.get_timestamp()."""

    name: str
    start: int
    end: int


def measurement_from_records(
    records: Sequence[Record], windows: Sequence[tuple[int, int]]
) -> Measurement:
    """Assign activities to the iterations' windows [t0, t1] (ns, ascending) and add them up.

    Records outside every window are ignored. An iteration without a record, or a record without
    timestamps (CUPTI reports 0 where it could not take them), raises FsbenchError: samples are
    never guessed. The number of activities may differ between iterations; its median is reported.
    """
    lost = next((r for r in records if r.start == 0 or r.end < r.start), None)
    if lost:
        raise FsbenchError(f"timer cupti: no timestamps for {shorten(lost.name)}; measure again")
    ordered = sorted(records, key=lambda record: record.start)
    starts = [record.start for record in ordered]
    span_us, busy_us, sum_us, counts = [], [], [], []
    kernels: defaultdict[str, float] = defaultdict(float)
    for iteration, (opened, closed) in enumerate(windows):
        inside = ordered[bisect_left(starts, opened) : bisect_right(starts, closed)]
        if not inside:
            raise FsbenchError(
                f"timer cupti: no GPU activity in iteration {iteration} of {len(windows)} "
                f"({len(records)} records in all); did the step launch anything on this GPU?"
            )
        span_us.append((max(record.end for record in inside) - inside[0].start) / 1e3)
        busy_us.append(_union_ns(inside) / 1e3)
        sum_us.append(sum(record.end - record.start for record in inside) / 1e3)
        counts.append(len(inside))
        for record in inside:
            kernels[shorten(record.name)] += (record.end - record.start) / 1e3 / len(windows)
    return Measurement(span_us, busy_us, sum_us, statistics.median_low(counts), dict(kernels))


def _union_ns(ordered: Sequence[Record]) -> int:
    """Time covered by at least one record; `ordered` by start."""
    covered, until = 0, ordered[0].start
    for record in ordered:
        covered += max(0, record.end - max(record.start, until))
        until = max(until, record.end)
    return covered


def shorten(name: str) -> str:
    """At most 80 characters of a kernel's name; a checksum keeps long names apart.

    Names of templates may differ anywhere: those of torch's sin and cos in the middle only.
    """
    if len(name) <= _NAME_LENGTH:
        return name
    return f"{name[: _NAME_LENGTH - 11]}...{zlib.crc32(name.encode()):08x}"


@cache
def _owner() -> tuple[Any, list[Record]]:
    """CUPTI's module with our callbacks registered, and the list that records are put in.

    Raises TimerUnavailable if there is no CUPTI for Python here, or an old one.
    """
    try:
        version = metadata.version("cupti-python")
        if cupti is None:
            raise ImportError(_CUPTI_PROBLEM)
    except ImportError as error:  # PackageNotFoundError is one
        raise TimerUnavailable(f"timer cupti: {error}; {_INSTALL}") from error
    if int(version.split(".")[0]) < 13:
        raise TimerUnavailable(f"timer cupti: needs cupti-python >= 13, got {version}; {_INSTALL}")
    records: list[Record] = []
    names = {
        int(cupti.ActivityKind.MEMCPY): "memcpy",
        int(cupti.ActivityKind.MEMSET): "memset",
    }

    def buffer_requested() -> tuple[int, int]:
        return _BUFFER_BYTES, 0  # 0: as many records as fit

    def buffer_completed(activities: list[Any]) -> None:
        # The activities are views of a buffer that CUPTI takes back: copy what is needed.
        for activity in activities:
            name = names.get(activity.kind) or activity.name
            records.append(Record(name, activity.start, activity.end))

    cupti.activity_register_callbacks(buffer_requested, buffer_completed)
    return cupti, records


class CuptiTimer:
    """Span, busy and sum of the GPU's activities, from CUPTI's records (see the module)."""

    name = "cupti"

    def __init__(self, device: str, l2: str) -> None:
        if not torch.cuda.is_available():
            raise TimerUnavailable("timer cupti: torch sees no CUDA device; see `fsbench doctor`")
        try:
            self._cupti, self._records = _owner()
            activity_kinds = self._cupti.ActivityKind
            self._kinds = (
                activity_kinds.CONCURRENT_KERNEL,
                activity_kinds.MEMCPY,
                activity_kinds.MEMSET,
            )
            self._enable()
            self._disable()
        except TimerUnavailable:
            raise
        except Exception as error:  # a missing libcupti, an old driver, another profiler, ...
            raise TimerUnavailable(
                f"timer cupti: {type(error).__name__}: {error}; close other profilers, check "
                "the driver with `fsbench doctor`, or choose --timer events"
            ) from error
        self.l2 = l2
        self._device = device
        self._flush = L2Flush(l2, device)

    def _enable(self) -> None:
        for kind in self._kinds:
            self._cupti.activity_enable(kind)

    def _disable(self) -> None:
        for kind in self._kinds:
            self._cupti.activity_disable(kind)

    def measure(
        self, step: Callable[[], object], iterations: int, before: Callable[[], None]
    ) -> Measurement:
        """Measure steps, see `Timer.measure`. Raise FsbenchError if CUPTI lost a record."""
        now = self._cupti.get_timestamp
        windows = []
        self._records.clear()
        self._dropped()  # the count restarts at each query: clear earlier records
        with torch.cuda.device(self._device):
            self._enable()
            try:
                for _ in range(iterations):
                    before()
                    self._flush()
                    torch.cuda.synchronize()
                    opened = now()
                    step()
                    torch.cuda.synchronize()
                    windows.append((opened, now()))
                self._cupti.activity_flush_all(0)  # the device is idle, so records are complete
            finally:
                self._disable()
        if dropped := self._dropped():
            raise FsbenchError(
                f"timer cupti: CUPTI dropped {dropped} records; measure fewer iterations at a time"
            )
        return measurement_from_records(self._records, windows)

    def _dropped(self) -> int:
        """Records lost for want of buffer space since the last query (context 0: all queues)."""
        count = ctypes.c_size_t()
        self._cupti.activity_get_num_dropped_records(0, 0, ctypes.addressof(count))
        return count.value
