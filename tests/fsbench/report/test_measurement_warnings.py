"""Warnings about measurements, from rows made up for each."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd
import pytest
from cells import cell

from fsbench.records.cell import CellRecord, Round
from fsbench.records.summary import frame
from fsbench.report.measurement_warnings import measurement_warnings


def _row(provider: str, **changes: Any) -> dict[str, Any]:
    fine = dict(kind="exact", b=1, d=64, v=1000, status="ok", roofline_pct=90.0, throttle="")
    times = dict(median_us=100.0, ci_lo_us=99.0, ci_hi_us=101.0, sm_mhz=1900.0)
    return {"provider": provider, **fine, **times, **changes}


@pytest.mark.parametrize(
    "rows",
    [
        [_row("a"), _row("b", sm_mhz=1880.0)],
        [_row("a"), _row("floor", kind="lower_bound", roofline_pct=250.0)],
        [_row("screened", roofline_pct=160.0)],  # reads a smaller copy of the weight
        [_row("a", throttle="sw_power_cap")],  # how these GPUs run under load
    ],
    ids=["a good run", "a bound above the roof", "a screened head above it", "a power cap"],
)
def test_no_warning(rows):
    assert measurement_warnings(pd.DataFrame(rows)) == []


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (
            [_row("a", roofline_pct=104.0), _row("b", b=2, roofline_pct=101.0)],
            "^Faster than the datasheet .*: a at B = 1; b at B = 2 .D = 64, V = 1000.: .* events",
        ),
        ([_row("a", throttle="sw_power_cap|hw_thermal_slowdown")], "throttled: a at .*: cool it"),
        ([_row("a", ci_hi_us=104.1)], "95 % interval wider than 5 %: a at .*: raise --iters"),
        (
            [_row(name, b=b, ci_hi_us=110.0) for name in "ab" for b in (4, 2)]
            + [_row("c", ci_hi_us=110.0), _row("d")],
            "5 %: a, b at B = 2, 4; c at B = 1 .D = 64",
        ),
        (
            [_row("a"), _row("b", sm_mhz=1800.0), _row("c", b=2, sm_mhz=1500.0)],
            "^SM clocks of the samplers differ: 100 MHz at B = 1 .D = 64, V = 1000.: ratios",
        ),
        (
            [
                _row(name, b=b, d=d, sm_mhz=mhz, throttle="sw_power_cap" if mhz < 1900 else "")
                for b, d, slow in ((4, 64, 1800.0), (2, 64, 1800.0), (8, 64, 1750.0), (1, 32, 0.0))
                for name, mhz in (("a", 1900.0), ("b", slow))
            ],
            "differ, some limited by power: 1900 MHz at B = 1 .D = 32, V = 1000.; "
            "100 MHz at B = 2, 4, 150 MHz at B = 8 .D = 64, V = 1000.: ratios",
        ),
    ],
    ids=["roof", "throttled", "interval", "many cells", "clocks", "clocks of several heads"],
)
def test_a_warning_names_the_cells_and_the_cure(rows, text):
    (warning,) = measurement_warnings(pd.DataFrame(rows))
    assert re.search(text, str(warning)), str(warning)


def test_cells_that_were_not_measured_and_unknown_roofs_raise_no_warning():
    one = cell(gpu="", device="cpu")
    failed = CellRecord(one, status="error", reason="why")
    measured = CellRecord(one, {0: Round([1.0] * 10)})
    for records in ([], [failed], [measured, failed]):
        assert measurement_warnings(frame(records)) == []
