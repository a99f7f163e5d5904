"""The published tables: complete, as printed, and consistent with each other and with the text."""

import hashlib
from importlib import resources

import pytest

from fsbench import paper
from fsbench.discover import discover
from fsbench.errors import InvalidArgument
from fsbench.paper import tables

DIGESTS = {
    1: "38b899047213",
    4: "4a0b842189f9",
    5: "37156905d10f",
    6: "6594af257ea5",
    7: "a4133e47251f",
    8: "4a67af0e2883",
    9: "96addc23911b",
}
"""Start of each file's SHA-256: they were compared with the paper, number by number."""


@pytest.mark.parametrize("number", DIGESTS)
def test_a_table_is_unchanged_and_complete(number):
    assert tables.table(number).notna().all(axis=None)
    text = (resources.files(paper) / f"table{number}.csv").read_bytes()
    assert hashlib.sha256(text).hexdigest().startswith(DIGESTS[number])


def test_every_table_has_its_source():
    assert {int(number) for number in paper.source()["table"]} == set(DIGESTS)


def test_reductions_of_table_8_are_those_of_the_times_of_table_7():
    """Up to rounding of both, and a median of ratios against a ratio of medians: the deviation."""
    both = tables.table(7).merge(tables.table(8), on=["b", "model", "tp"], validate="one_to_one")
    assert len(both) == 28
    computed = 100 * (1 - both["fused_ms"] / both["base_ms"])
    rounding = 0.05 + 100 * 0.01 / both["base_ms"]
    # Llama at B = 16 and Qwen3-8B at B = 64: 0.42 % apart with a deviation of 0.5 %, for instance.
    assert ((computed - both["reduction_pct"]).abs() <= rounding + both["sd_pct"]).all()


def test_predictions_of_table_9_are_2b_over_d_and_below_measurements():
    table = tables.table(9)
    exact = 100 * 2 * table["b"] / table["d"]
    assert (exact - table["predicted_pct"]).abs().max() <= 0.005 + 1e-9
    assert (table["measured_pct"] > table["predicted_pct"]).all()


def test_speedups_of_one_gpu_are_tables_4_and_5():
    speedups = tables.speedups("h200").set_index(["table", "b", "method"])
    assert len(speedups) == 54
    assert tuple(speedups.loc[(4, 64, "Multinomial")]) == (4096, 151936, 1.67)
    assert tuple(speedups.loc[(5, 256, "FI2")]) == (8192, 128256, 0.65)
    assert (
        tables.speedups("h100").set_index(["table", "b", "method"]).loc[(4, 1, "FI1"), "paper"]
        == 1.34
    )


def test_an_unknown_gpu_is_named():
    with pytest.raises(
        InvalidArgument, match=r"--paper: expected one of b200.*got 'h20'; did you mean 'h200'"
    ):
        tables.speedups("h20")


def test_samplers_of_the_papers_methods_exist():
    fused, baselines = paper.source()["fused"], paper.source()["baselines"]
    providers = {entry["provider"] for entry in (fused, *baselines.values())}
    assert len(providers) == 4 and providers <= set(discover())
    assert set(baselines) == set(tables.speedups("h200")["method"])
    assert {fused["method"], *baselines} == set(tables.table(6)["method"])
