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
    lines = [line for line in speedups.splitlines() if line.startswith("|")]
    assert len(lines) == 11
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
    assert ratio[at <= 64].max() < 1
    assert (ratio[at == 128].round(2).min(), ratio[at == 128].round(2).max()) == (1.06, 1.11)
    assert (ratio[at == 256].round(2).min(), ratio[at == 256].round(2).max()) == (1.15, 1.23)
    matmul = lean["matmul_only", 4096, 256]
    assert f"adds {lean['gumbel_argmax', 4096, 256] - matmul:.0f} us to the matmul" in README
    assert f"its lean form {lean['flashinfer_gumbel_lean', 4096, 256] - matmul:.0f}" in README
    models = times("models-20261121")
    against = models["flash_sampling"] / models["gumbel_argmax"]
    shown = [f"{against[d, 77]:.2f}" for d in (1152, 2880, 7168)]
    assert shown == ["1.27", "1.15", "1.10"] and all(number in README for number in shown)
    memory = pd.read_csv(H200 / "paper-20261121" / "results.csv").set_index("provider")
    assert memory.loc["flash_sampling", "peak_extra_bytes"].max() < 0.181e6


def test_every_committed_verification_passed():
    checks = json.loads((H200 / "verify-20261121.json").read_text())
    assert all(check["passed"] for check in checks)
    exact = [check["provider"] for check in checks if "not exact" in check["detail"]]
    assert exact == ["flashinfer_top_k_top_p"]


def test_results_name_the_machine_and_the_commit():
    for env in H200.glob("*/env.json"):
        record = read_environment(env.parent)
        assert record["gpu"] == "NVIDIA H200" and record["git_sha"]
