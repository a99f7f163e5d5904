"""Progress lines of `fsbench run`, and the sentence at its end."""

from __future__ import annotations

import io
import re

import pandas as pd
import pytest
from cells import cell, results_row
from rich.console import Console

from fsbench.cli import progress, run_output
from fsbench.cli.progress import Progress, duration, time_of_step
from fsbench.records.cell import CellRecord, Round
from fsbench.report.tables import configurations


def test_durations_and_times_are_short():
    seconds = {8.123: "8.1s", 42.2: "42s", 200: "3m20s", 3599.6: "1h00m", 7500: "2h05m"}
    assert {each: duration(each) for each in seconds} == seconds
    steps = {0.5: "0.5 us", 54.61: "54.6 us", 999.6: "1 ms", 54_613.6: "54.6 ms", 2e6: "2 s"}
    assert {each: time_of_step(each) for each in steps} == steps


@pytest.fixture
def piped():
    """A console that is no terminal, and what is printed to it."""
    return Console(file=io.StringIO(), force_terminal=False, width=80, markup=False)


def test_a_finished_cell_is_one_line(piped, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress(piped) as shown:
        shown.report(9, 33, "")  # nine were measured before a run was stopped
        now[0] += 25
        shown.report(11.5, 33, "")
        shown.finished(CellRecord(cell(provider="simple_shvs", b=1), {0: Round([54_613.6])}))
        now[0] += 5
        shown.report(12, 33, "")
        shown.finished(CellRecord(cell(provider="other", b=1), status="oom"))
    first, second = piped.file.getvalue().splitlines()
    shape = r"B=1 D=\d+ V=\d+"
    assert re.fullmatch(rf"\[11/33\] simple_shvs  {shape}  54.6 ms   about 3m35s left", first)
    assert re.fullmatch(rf"\[12/33\] other  {shape}  oom   about 3m30s left", second)


def test_nothing_is_left_after_the_last_cell(piped, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress(piped) as shown:
        shown.report(0, 6, "")
        now[0] += 8
        shown.report(6, 6, "")
        shown.finished(CellRecord(cell(provider="last", b=1), {0: Round([54_613.6])}))
    assert re.fullmatch(r"\[6/6\] last  B=1 D=\d+ V=\d+  54.6 ms *\n", piped.file.getvalue())


def test_a_pipe_gets_a_line_now_and_then(piped, monkeypatch):
    with Progress(piped) as shown:
        shown.report(1, 9, "B=1: slow, verifying")
        monkeypatch.setattr(progress, "HEARTBEAT_S", 0.0)
        while not piped.file.getvalue():
            pass
    assert piped.file.getvalue().startswith("[1/9] B=1: slow, verifying\n")


def _configuration(times, noise=0.01):
    rows = [
        results_row(name, b, us, noise, label=name.title(), kind=kind, fused=fused)
        for (name, kind, fused), by_b in times.items()
        for b, us in by_b.items()
    ]
    (result,) = configurations(pd.DataFrame(rows))
    return result


FUSED, OTHER = ("fused", "exact", True), ("other", "exact", False)
BOUND = ("bound", "lower_bound", False)
CONCLUSIONS = {
    "Fused is 1.30 ± 0.03 times as fast as Other, 0.94 ± 0.02 of the time of Bound (B = 1 to 8).": {
        FUSED: {1: 94, 8: 188}, OTHER: {1: 122.2, 8: 244.4}, BOUND: {1: 100, 8: 200},
    },
    "Other is 2.00 ± 0.04 times as fast as Fused (B = 1).": {FUSED: {1: 200}, OTHER: {1: 100}},
    "Fused and Other differ by less than the noise (1.01 ± 0.02 times) (B = 1).": {
        FUSED: {1: 100}, OTHER: {1: 101},
    },
    "Fused takes 2.00 ± 0.04 of the time of Bound (B = 2).": {FUSED: {2: 2}, BOUND: {2: 1}},
    "": {BOUND: {1: 3}},
}  # fmt: skip


@pytest.mark.parametrize("sentence", CONCLUSIONS)
def test_a_sentence_compares_the_fastest_with_the_best_alternative(sentence):
    assert run_output.conclusion(_configuration(CONCLUSIONS[sentence])) == sentence


def test_rows_are_sorted_by_time_and_show_their_noise(capsys):
    times = {OTHER: {1: 300, 8: 10}, FUSED: {1: 100, 8: 10}, BOUND: {1: 50, 8: 9}}
    run_output.print_summary(_configuration(times, noise=0.02).rows.assign(lacks="", reason=""))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = rows[next(i for i, row in enumerate(rows) if row[:1] == ["B"]) :]
    assert table[0] == ["B", "1", "8", "±%"]
    assert [(row[0], row[-1]) for row in table[2:5]] == [
        ("Bound", "2.0"),
        ("Fused", "2.0"),
        ("Other", "2.0"),
    ]
