"""The timers on a CPU: hand-made records, errors, and a double of cupti-python."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import subprocess
import sys
import time
from functools import cache, partial
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from fsbench.errors import FsbenchError, InvalidArgument, TimerUnavailable
from fsbench.timers import make_timer, timer_name
from fsbench.timers.gpu import cupti as cupti_module
from fsbench.timers.gpu.cupti import CuptiTimer, Record, measurement_from_records, shorten
from fsbench.timers.gpu.l2 import L2Flush
from fsbench.timers.host import CpuTimer, FakeTimer


def nothing() -> None:
    pass


# Records and windows -> Measurement. Times in ns, 1000 ns = 1 us.


@pytest.mark.parametrize(
    ("intervals", "span", "busy", "total"),
    [
        pytest.param([(100, 200), (300, 450)], 350, 250, 250, id="gap"),
        pytest.param([(100, 200), (200, 300)], 200, 200, 200, id="touching"),
        pytest.param([(100, 300), (200, 400)], 300, 300, 400, id="overlapping"),
        pytest.param([(100, 900), (200, 300), (400, 500)], 800, 800, 1_000, id="nested"),
        pytest.param([(100, 900), (200, 300), (950, 960)], 860, 810, 910, id="nested-then-gap"),
        pytest.param([(100, 100)], 0, 0, 0, id="empty"),
    ],
)
def test_span_busy_and_sum(intervals, span, busy, total):
    records = [Record("k", start, end) for start, end in reversed(intervals)]  # any order
    measured = measurement_from_records(records, [(50, 1_000)])
    assert measured.span_us == [span / 1e3]
    assert measured.busy_us == [busy / 1e3]
    assert measured.sum_us == [total / 1e3]
    assert measured.n_kernels == len(intervals)


def test_a_record_belongs_to_the_window_of_its_start():
    flush = [Record("flush", 10, 90), Record("flush", 510, 590)]
    edges = [Record("k", 100, 150), Record("k", 200, 450)]  # starts at t0, starts at t1
    second = [Record("k", 650, 700)]
    measured = measurement_from_records(flush + edges + second, [(100, 200), (600, 800)])
    assert measured.span_us == [0.35, 0.05]
    assert measured.kernels == {"k": pytest.approx((0.05 + 0.25 + 0.05) / 2)}


def test_kernels_are_means_per_iteration_and_the_count_is_a_median():
    records = [
        Record("gemm", 100, 200),
        Record("gemm", 1_100, 1_300),
        Record("argmax", 1_300, 1_400),
        Record("gemm", 2_100, 2_400),
        Record("argmax", 2_400, 2_500),
        Record("late", 2_600, 2_700),
    ]
    windows = [(0, 900), (1_000, 1_900), (2_000, 2_900)]
    measured = measurement_from_records(records, windows)
    assert measured.kernels == {
        "gemm": pytest.approx(0.2),
        "argmax": pytest.approx(0.2 / 3),
        "late": pytest.approx(0.1 / 3),
    }
    assert measured.n_kernels == 2  # of 1, 2 and 3


def test_an_iteration_without_a_record_is_an_error():
    with pytest.raises(FsbenchError, match="no GPU activity in iteration 1 of 2"):
        measurement_from_records([Record("k", 100, 200)], [(0, 300), (400, 700)])


@pytest.mark.parametrize("lost", [Record("k", 0, 0), Record("k", 150, 0)])
def test_a_record_without_timestamps_is_an_error(lost):
    with pytest.raises(FsbenchError, match="no timestamps for k"):
        measurement_from_records([Record("k", 100, 200), lost], [(0, 300)])


def test_long_names_are_cut_and_stay_distinct():
    name = "void cutlass::" + "x" * 200 + "::tail_of_the_name"
    short = shorten(name)
    assert len(short) == 80
    assert short.startswith("void cutlass::")
    middle = len(name) // 2
    assert shorten(name[:middle] + "~" + name[middle + 1 :]) != short
    assert shorten("y" * 80) == "y" * 80


# CUPTI's protocol, with a double of cupti-python that has a clock in ns and one GPU.


class FakeCupti:
    """Records the activities launched while enabled; hands them out when flushed."""

    ActivityKind = SimpleNamespace(CONCURRENT_KERNEL=10, MEMCPY=1, MEMSET=2)

    def __init__(self) -> None:
        self.now = 1_000
        self.enabled: set[int] = set()
        self.registered = 0
        self.pending: list[SimpleNamespace] = []
        self.dropped = 0

    def launch(self, name: str, duration: int, kind: int = 10) -> None:
        self.now += 5  # the launch
        if kind in self.enabled:
            record = {"kind": kind, "start": self.now, "end": self.now + duration}
            # As in cupti-python, only kernels have a name.
            self.pending.append(SimpleNamespace(**record, **({"name": name} if kind == 10 else {})))
        self.now += duration + 1

    def activity_register_callbacks(self, requested, completed) -> None:
        self.registered += 1
        size, records = requested()
        assert size > 0 and records == 0
        self.completed = completed

    def activity_enable(self, kind) -> None:
        self.enabled.add(kind)

    def activity_disable(self, kind) -> None:
        self.enabled.discard(kind)

    def activity_flush_all(self, flag) -> None:
        self.completed(self.pending)
        self.pending = []

    def activity_get_num_dropped_records(self, context, stream, address) -> None:
        ctypes.c_size_t.from_address(address).value = self.dropped
        self.dropped = 0

    def get_timestamp(self) -> int:
        self.now += 1
        return self.now


@pytest.fixture
def cupti(monkeypatch):
    """A machine that seems to have a GPU and cupti-python 13.0.1."""
    double = FakeCupti()
    version = metadata.version
    monkeypatch.setattr(cupti_module, "cupti", double)
    monkeypatch.setattr(
        metadata, "version", lambda name: "13.0.1" if name == "cupti-python" else version(name)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    # A separate cache: the real owner, if this process has one, must be kept.
    monkeypatch.setattr(cupti_module, "_owner", cache(cupti_module._owner.__wrapped__))
    return double


def test_cupti_measures_the_step_only(cupti):
    """Hundreds of times, also after a step that failed; and it is registered once."""

    def step(duration=300) -> None:
        cupti.launch("gemm", duration)
        cupti.launch("", 20, kind=cupti.ActivityKind.MEMSET)

    def broken() -> None:
        cupti.launch("half", 10)
        raise RuntimeError("out of memory")

    for number in range(1, 300):
        timer = make_timer("auto", "cuda", l2="warm")
        assert (timer.name, timer.l2) == ("cupti", "warm")
        if number % 100 == 0:
            with pytest.raises(RuntimeError, match="out of memory"):
                timer.measure(broken, 2, nothing)
        assert not cupti.enabled
        measured = timer.measure(partial(step, number), 2, lambda: cupti.launch("advance", 7))
        assert measured.span_us == pytest.approx([(number + 26) / 1e3] * 2)
        assert measured.sum_us == pytest.approx([(number + 20) / 1e3] * 2)
        assert measured.n_kernels == 2
        kernels = {"gemm": number / 1e3, "memset": 0.02}
        assert measured.kernels == pytest.approx(kernels)
    assert not cupti.enabled and cupti.registered == 1
    assert len(cupti_module._owner()[1]) == 6  # records do not pile up


def test_dropped_records_are_an_error_of_the_measurement_that_lost_them(cupti):
    timer = CuptiTimer("cuda", "warm")
    cupti.dropped = 5  # by somebody else, before
    timer.measure(lambda: cupti.launch("k", 40), 2, nothing)

    def overflowing() -> None:
        cupti.launch("k", 40)
        cupti.dropped += 1

    with pytest.raises(FsbenchError, match="dropped 2 records"):
        timer.measure(overflowing, 2, nothing)


def test_cupti_that_cannot_start_is_unavailable_with_the_reason_or_the_command(cupti, monkeypatch):
    def fails(message):
        with pytest.raises(TimerUnavailable, match=message):
            make_timer("cupti", "cuda", l2="warm")

    def raising(error):
        def refuse(argument):
            raise error(argument)

        return refuse

    with monkeypatch.context() as patched:
        patched.setattr(cupti, "activity_enable", raising(RuntimeError))
        fails("RuntimeError.*--timer events")
    cupti_module._owner.cache_clear()
    monkeypatch.setattr(metadata, "version", lambda name: "12.8.0")
    fails(">= 13, got 12.8.0; pip install")
    monkeypatch.setattr(metadata, "version", raising(metadata.PackageNotFoundError))
    fails(r"cupti-python; pip install -e '.\[gpu\]'")


# Choosing a timer.


def test_auto_depends_on_the_device_only():
    assert timer_name("auto", "cuda") == timer_name("auto", "cuda:1") == "cupti"
    assert timer_name("auto", "cpu") == "cpu"
    assert timer_name("events", "cuda") == "events"
    assert make_timer("auto", "cpu").name == "cpu"


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("cupti", "cpu", "timer cupti: needs a CUDA device"),
        ("events", "cpu", "timer events: needs a CUDA device"),
        ("cpu", "cuda", "timer cpu"),
        *(
            (name, "cuda", r"no CUDA device.*fsbench doctor")
            for name in ("auto", "cupti", "events")
        ),
    ],
)
def test_a_timer_does_not_become_another(monkeypatch, name, device, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TimerUnavailable, match=message):
        make_timer(name, device)


def test_unknown_names_are_the_callers_mistake():
    with pytest.raises(InvalidArgument, match=r"timer: .*did you mean 'cupti'"):
        make_timer("cupty", "cuda")
    with pytest.raises(InvalidArgument, match="l2: expected one of cold, cold-write, warm"):
        make_timer("fake", "cpu", l2="hot")


def test_choosing_a_timer_does_not_import_torch():
    code = (
        "import sys, fsbench.timers as t; t.make_timer('auto', 'cpu'); t.make_timer('fake', 'cpu');"
        "assert not {'torch', 'cupti'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The cpu and fake timers.


@pytest.mark.parametrize("timer", [CpuTimer(), FakeTimer()])
def test_before_runs_ahead_of_every_step(timer):
    calls: list[str] = []
    measured = timer.measure(lambda: calls.append("step"), 3, lambda: calls.append("before"))
    assert calls == ["before", "step"] * 3
    assert len(measured.span_us) == 3


def test_the_cpu_timer_times_the_step_only(monkeypatch):
    now = [5]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: sum(now))
    measured = CpuTimer().measure(lambda: now.append(20_000), 3, lambda: now.append(100_000))
    assert measured.span_us == [20.0] * 3
    assert (measured.busy_us, measured.sum_us, measured.n_kernels) == ([], [], None)


def test_fake_times_are_seeded_and_near_the_base():
    first, second_, other = (
        FakeTimer(50, 0.1, seed=seed).measure(nothing, 4, nothing) for seed in (1, 1, 2)
    )
    assert first == second_ != other
    assert all(50 <= us < 55 for us in first.span_us)
    assert len(set(first.span_us)) == 4
    assert first.busy_us == first.sum_us == first.span_us


def test_a_fake_step_may_decide_its_time_and_may_fail():
    elapsed = itertools.count(10, 10)
    timer = FakeTimer(lambda: next(elapsed), jitter=0)
    assert timer.measure(nothing, 3, nothing).span_us == [10, 20, 30]
    with pytest.raises(ZeroDivisionError):
        timer.measure(lambda: 1 / 0, 1, nothing)


# The flush, on a CPU tensor.


@pytest.fixture
def small_l2(monkeypatch):
    properties = SimpleNamespace(L2_cache_size=100_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_the_read_flush_covers_four_times_the_cache_and_leaves_it_clean(small_l2):
    flush = L2Flush("cold", "cpu")
    assert flush.buffer.nbytes >= 400_000
    flush.buffer.fill_(1)
    version = flush.buffer._version
    flush()
    assert flush.buffer._version == version  # not written
    assert torch.equal(flush._sums, flush.buffer.sum(1))  # all of it was read


def test_the_write_flush_writes_and_warm_does_nothing(small_l2):
    flush = L2Flush("cold-write", "cpu")
    assert flush.buffer.nbytes >= 400_000
    flush.buffer.fill_(1)
    flush()
    assert not flush.buffer.any()
    warm = L2Flush("warm", "cpu")
    warm()
    assert not hasattr(warm, "buffer")
