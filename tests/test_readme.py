"""The README is true: its tables are the committed ones, its numbers follow from the results."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from fsbench.results import read_environment, read_records
from fsbench.summary import frame
from fsbench.tables import configurations, markdown

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
H200 = ROOT / "results" / "h200"

UNLIKE = {"flash_sampling", "flash_sampling_greedy", "flash_sampling_token"} | {
    "greedy",
    "matmul_only",
    "weight_stream",
}
"""Forms of the fused kernel, greedy decoding and lower bounds: no rivals."""


def times(run: str) -> pd.Series:
    table = pd.read_csv(H200 / run / "results.csv")
    return table.set_index(["provider", "d", "b"])["median_us"]


@pytest.mark.parametrize(
    "name",
    [
        "paper-20261121/speedup_h200_d4096_v151936.md",
        "paper-20261121/speedup_h200_d8192_v128256.md",
        "lean-20261121/speedup_h200_d4096_v151936.md",
    ],
)
def test_tables_are_quoted_verbatim(name):
    speedups = (H200 / name).read_text().split("## Median time")[0]
    # The first table: the fused kernel.
    lines = [line for line in speedups.splitlines() if line.startswith("|")][:11]
    assert "\n".join(lines) in README


def test_the_committed_tables_follow_from_the_raw_samples():
    run = H200 / "paper-20261121"
    table = frame(read_records(run))
    assert (table["status"] == "ok").all()
    for configuration in configurations(table):
        committed = (run / f"speedup_{configuration.stem}.md").read_text()
        assert markdown(configuration) == committed


def test_sentences_about_the_results():
    paper, lean = times("paper-20261121"), times("lean-20261121")
    ratio = paper["flash_sampling"] / paper["matmul_only"]
    at = ratio.index.get_level_values("b")
    assert ratio[at <= 128].max() < 1
    assert (ratio[at == 256].round(2).min(), ratio[at == 256].round(2).max()) == (1.05, 1.07)
    noise = lean["flash_sampling"] / lean["flash_sampling_greedy"]
    assert noise[at == 256].max() < 1.015
    for run in (paper, lean):
        for name in set(run.index.get_level_values("provider")) - UNLIKE:
            slower = run[name] / run["flash_sampling"]
            if name == "gumbel_argmax":
                assert round(slower[8192, 256], 2) == 0.99
                slower = slower.drop((8192, 256))
            assert slower.min() > 1, name
    token = (lean["flash_sampling_token"] / lean["flash_sampling"]).round(2)
    assert (token[:, 128].min(), token[:, 128].max()) == (1.23, 1.39)
    assert (token[:, 256].round(1).min(), token[:, 256].round(1).max()) == (1.6, 2.1)
    matmul = lean["matmul_only", 4096, 256]
    assert f"adds {lean['gumbel_argmax', 4096, 256] - matmul:.0f} us to the matmul" in README
    assert f"its lean form {lean['flashinfer_gumbel_lean', 4096, 256] - matmul:.0f}" in README
    added = paper["flashinfer_gumbel", 4096, 256] - paper["matmul_only", 4096, 256]
    assert f"FI2 adds {added:.0f}" in README
    memory = pd.read_csv(H200 / "lean-20261121" / "results.csv").set_index("provider")
    assert memory.loc["flash_sampling", "peak_extra_bytes"].max() < 0.5e6


def test_every_committed_verification_passed():
    checks = json.loads((H200 / "verify-20261121.json").read_text())
    assert all(check["passed"] for check in checks)
    exact = [check["provider"] for check in checks if "not exact" in check["detail"]]
    assert exact == ["flashinfer_top_k_top_p"]


def test_results_name_the_machine_and_the_commit():
    for env in H200.glob("*/env.json"):
        record = read_environment(env.parent)
        assert record["gpu"] == "NVIDIA H200" and record["git_sha"]
