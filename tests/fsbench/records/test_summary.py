"""results.csv against numbers computed by hand."""

from __future__ import annotations

import io

import pandas as pd
import pytest
from cells import cell
from tree import RESULTS, newest

from fsbench.records.cell import CellRecord, Host, Loop, Round
from fsbench.records.store import Store, read_records
from fsbench.records.summary import export_csv, frame, read_csv, row

CELL = cell()


def test_samples_of_all_rounds_are_pooled():
    # Out of order: the state of the last round is that of round 1.
    rounds = {
        1: Round(
            [float(x) for x in range(51, 101)],
            busy_us=[7.0] * 50,
            sum_us=[8.0] * 50,
            n_kernels=3,
            clocks={"sm_mhz": 1900, "power_w": None, "throttle": ["sw_power_cap"]},
            config="late",
            peak_extra_bytes=123_456_789,
        ),
        0: Round(
            [float(x) for x in range(1, 51)],
            busy_us=[5.0] * 50,
            sum_us=[6.0] * 50,
            n_kernels=2,
            clocks={"sm_mhz": 1700, "power_w": 500.0, "throttle": []},
            config="early",
            peak_extra_bytes=1,
        ),
    }
    record = CellRecord(CELL, rounds)
    values = row(record)
    assert values["median_us"] == 50.5
    assert (values["ci_lo_us"], values["ci_hi_us"]) == (40, 61)
    assert (values["min_us"], values["n_samples"]) == (1, 100)
    assert values["p10_us"] == pytest.approx(10.9)
    assert values["p90_us"] == pytest.approx(90.1)
    assert (values["busy_us"], values["sum_us"], values["n_kernels"]) == (6, 7, 3)
    fused_bytes = 2 * (1000 * 100 + 100 * 2 + 2)
    assert values["gb_per_s"] == pytest.approx(fused_bytes / 50.5e-6 / 1e9)
    assert values["tflops"] == pytest.approx(2 * 2 * 100 * 1000 / 50.5e-6 / 1e12)
    assert values["roofline_pct"] == pytest.approx(100 * fused_bytes / 4.8e12 / 50.5e-6)
    assert (values["sm_mhz"], values["mem_mhz"], values["power_w"]) == (1800, None, 500)
    assert (values["throttle"], values["config"]) == ("sw_power_cap", "late")
    assert values["peak_extra_bytes"] == 123_456_789


def test_missing_measurements_are_empty():
    result = row(CellRecord(cell(gpu="", device="cpu"), {0: Round([1.0, 2.0])}))
    names = ("busy_us", "sum_us", "n_kernels", "sm_mhz", "roofline_pct", "peak_extra_bytes")
    names += ("j_per_token", "energy_w", "idle_w", "first_call_s", "matmul_us", "split_by")
    names += tuple(f"sustained_{name}" for name in ("us", "joules", "w"))
    names += ("host_us",)
    assert {name: result[name] for name in names} == dict.fromkeys(names)
    assert (result["warm"], result["lacks"]) == ("", "")


def test_a_cell_that_failed_keeps_its_reason_and_what_was_measured():
    nothing = row(CellRecord(CELL, status="oom", reason="why"))
    assert (nothing["status"], nothing["reason"]) == ("oom", "why")
    assert nothing["median_us"] is None
    part = row(CellRecord(CELL, {0: Round([3.0])}, "error", "in round 1"))
    assert (part["status"], part["median_us"]) == ("error", 3.0)


def _folder(path):
    store = Store.create(path, {})
    store.append_round(CELL, 0, Round([1.5], peak_extra_bytes=123_456_789, n_kernels=1))
    store.append_status(cell(b=4), "oom", 'a reason, with "quotes"')
    store.close()
    return path, store.records


def test_the_csv_is_exact_in_whole_numbers_and_survives_reading(tmp_path):
    export_csv(*_folder(tmp_path / "a"))
    text = (tmp_path / "a" / "results.csv").read_text()
    assert ",123456789," in text  # not 1.23457e+08
    table = read_csv(tmp_path / "a")
    assert list(table["b"]) == [2, 4] and set(table["folder"]) == {str(tmp_path / "a")}
    assert table["reason"][1] == 'a reason, with "quotes"'
    assert table["median_us"][0] == 1.5 and pd.isna(table["median_us"][1])


def test_energy_first_call_and_parts():
    kernels = {"nvjet": 30.0, "softmax": 8.0, "memset": 2.0}
    first = Round([1.0], kernels=kernels, first_call_s=2.5, warm=["triton", "process"])
    resumed = Round([1.0], kernels=kernels, first_call_s=0.1)
    record = CellRecord(CELL, {0: first, 1: resumed}, lacks={"greedy": "RuntimeError: no"})
    record.energy = Loop(joules=600.0, seconds=1.5, steps=1000, idle_w=90.0)
    result = row(record)
    assert result["j_per_token"] == 600 / 1000 / 2  # two rows
    assert (result["energy_w"], result["idle_w"]) == (400.0, 90.0)
    record.add({"sustained": {"steps": 10, "seconds": 0.005, "joules": 3.0, "idle_w": None}})
    assert [row(record)[f"sustained_{name}"] for name in ("us", "joules", "w")] == [500, 0.3, 600]
    record.add({"sustained": {"step_us": 500.0, "steps": 10, "step_joules": 0.3}})  # older
    assert [row(record)[f"sustained_{name}"] for name in ("us", "joules", "w")] == [500, 0.3, 600]
    record.sustained = Loop(9, 0.0045)
    assert [row(record)[f"sustained_{name}"] for name in ("joules", "w")] == [None, None]
    assert row(CellRecord(CELL, record.rounds, host=Host(21.5, 225)))["host_us"] == 21.5
    assert (result["first_call_s"], result["warm"]) == (2.5, "triton|process")
    assert [result[name] for name in ("matmul_us", "sampling_us", "other_us")] == [30.0, 8.0, 2.0]
    assert result["split_by"] == "names"
    assert result["lacks"] == "greedy: RuntimeError: no"


@pytest.mark.parametrize("name", ["lean-d8192-large", "truncated", "tp"])
def test_committed_results_follow_from_their_samples(name):
    """Of all ages: without filters, without penalties, with them."""
    _assert_derived(newest(name))


@pytest.mark.full
def test_all_committed_results_follow_from_their_samples():
    folders = [path.parent for path in RESULTS.rglob("points.jsonl*")]
    assert len(folders) > 20
    for folder in folders:
        if (folder / "results.csv").exists():
            _assert_derived(folder)


def _assert_derived(folder):
    text = frame(read_records(folder)).to_csv(index=False, float_format="%.6g")
    derived, committed = (
        pd.read_csv(source, dtype=str, keep_default_na=False)
        for source in (io.StringIO(text), folder / "results.csv")
    )
    pd.testing.assert_frame_equal(derived[list(committed.columns)], committed)
