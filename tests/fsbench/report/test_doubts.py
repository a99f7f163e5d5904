"""Warnings about measurements, from rows made up for each."""

from __future__ import annotations

from typing import Any

import pandas as pd
from cells import cell

from fsbench.records.cell import CellRecord, Round
from fsbench.records.summary import frame
from fsbench.report.doubts import doubtful, doubts


def _row(provider: str, **changes: Any) -> dict[str, Any]:
    fine = dict(kind="exact", b=1, d=64, v=1000, status="ok", roofline_pct=90.0, throttle="")
    times = dict(median_us=100.0, ci_lo_us=99.0, ci_hi_us=101.0, sm_mhz=1900.0)
    return {"provider": provider, **fine, **times, **changes}


def _doubts(*rows: dict[str, Any]) -> list[str]:
    return [doubt.text for doubt in doubts(pd.DataFrame(rows))]


def test_doubts_are_data():
    """For the pages: the reason, the cells and the size of each."""
    rows = [_row("a"), _row("b", sm_mhz=1800.0), _row("a", b=2, throttle="hw_thermal_slowdown")]
    throttled, clocks = found = doubts(pd.DataFrame(rows))
    assert (throttled.reason, throttled.cells) == ("throttled", (("a", 2, 64, 1000),))
    assert (clocks.reason, clocks.mhz) == ("clocks", 100.0)
    assert clocks.cells == (("a", 1, 64, 1000), ("b", 1, 64, 1000))
    assert doubtful(found, 1, 64, 1000) == [clocks] and doubtful(found, 4, 64, 1000) == []


def test_a_good_run_raises_none():
    assert _doubts(_row("a"), _row("b", sm_mhz=1880.0)) == []


def test_faster_than_the_roof_names_the_cells_and_the_cure():
    (doubt,) = _doubts(_row("a", roofline_pct=104.0), _row("b", b=2, roofline_pct=101.0))
    assert doubt.startswith("a at B=1 D=64 V=1000 and 1 more cells ran faster than the datasheet")
    assert "--timer events" in doubt


def test_a_lower_bound_may_be_faster_than_the_roof():
    assert _doubts(_row("a"), _row("floor", kind="lower_bound", roofline_pct=250.0)) == []


def test_throttling():
    (doubt,) = _doubts(_row("a", throttle="sw_power_cap|hw_thermal_slowdown"))
    assert "throttled" in doubt
    # A power cap is how these GPUs run under load.
    assert _doubts(_row("a", throttle="sw_power_cap")) == []


def test_a_wide_interval():
    (doubt,) = _doubts(_row("a", ci_hi_us=104.1))
    assert "95 % interval wider than 5%: raise --iters" in doubt


def test_clocks_that_differ_at_one_point():
    rows = [_row("a"), _row("b", sm_mhz=1800.0), _row("c", b=2, sm_mhz=1500.0)]
    (doubt,) = _doubts(*rows)
    assert doubt.startswith("B=1 D=64 V=1000: SM clocks of the samplers differ by 100 MHz")


def test_cells_that_were_not_measured_and_unknown_roofs_are_no_matter():
    one = cell(gpu="", device="cpu")
    failed = CellRecord(one, status="error", reason="why")
    assert doubts(frame([])) == []
    assert doubts(frame([failed])) == []
    measured = CellRecord(one, {0: Round([1.0] * 10)})
    assert doubts(frame([measured, failed])) == []
