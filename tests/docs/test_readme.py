"""The README is true: its tables are the committed ones, its numbers follow from the results."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from tree import H200, ROOT

from fsbench.analysis.tables import configurations, markdown
from fsbench.problem import models
from fsbench.records.store import read_environment, read_records
from fsbench.records.summary import frame

README = (ROOT / "README.md").read_text(encoding="utf-8")

UNLIKE = {
    "flash_sampling",
    "flash_sampling_greedy",
    "flash_sampling_hopper",
    "flash_sampling_token",
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
    text = (H200 / name).read_text().split("## FlashSampling (Hopper)")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
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
    runs = [
        times(f"{name}-20261121") for name in ("paper", "lean", "lean-d8192", "lean-d8192-large")
    ]
    paper, lean = runs[:2]
    hopper, portable = (
        paper[name] / paper["matmul_only"] for name in ("flash_sampling_hopper", "flash_sampling")
    )
    at = hopper.index.get_level_values("b")
    assert hopper[at <= 128].max() < 1
    assert sorted(hopper[at == 256].round(2)) == [1.01, 1.02]
    assert portable[8192, 256].round(2) == 1.05 and portable[4096, 256].round(2) == 1.07
    assert (portable / hopper)[at <= 64].round(2).between(0.99, 1.01).all()
    noise = lean["flash_sampling_hopper"] / lean["flash_sampling_greedy"]
    at = noise.index.get_level_values("b")
    assert noise[4096, 256].round(2) == 1.03 and noise[at <= 64].max() < 1.005
    for run in runs:
        for name in set(run.index.get_level_values("provider")) - UNLIKE:
            assert (run[name] / run["flash_sampling_hopper"]).min() > 1, name
    token = (lean["flash_sampling_token"] / lean["flash_sampling"]).round(2)
    assert (token[4096, 128], token[4096, 256]) == (1.17, 1.32)
    matmul = lean["matmul_only", 4096, 256]
    assert f"adds {lean['gumbel_argmax', 4096, 256] - matmul:.0f} us to the matmul" in README
    assert f"its lean form {lean['flashinfer_gumbel_lean', 4096, 256] - matmul:.0f}" in README
    added = paper["flashinfer_gumbel", 4096, 256] - paper["matmul_only", 4096, 256]
    assert f"FI2 adds {added:.0f}" in README
    memory = pd.read_csv(H200 / "lean-20261121" / "results.csv").groupby("provider")
    peaks = memory["peak_extra_bytes"].max()
    assert peaks["flash_sampling_hopper"] < 0.5e6
    assert round(peaks["gumbel_argmax"] / 1e6) == 78


def test_sentences_about_other_shapes():
    measured = pd.concat(
        pd.read_csv(H200 / f"{run}-20261121" / "results.csv") for run in ("models", "models-rest")
    )
    heads = measured.groupby(["d", "v"])
    assert {tuple(sorted(set(head["b"]))) for _, head in heads} == {(1, 64, 256)}
    assert set(heads.groups) == {(model.D, model.V) for model in models().values()}
    assert f"each of the {len(models())} models" in README
    cell = measured.set_index(["provider", "d", "v", "b"])["median_us"]
    ratio = cell["flash_sampling_hopper"] / cell["matmul_only"]
    assert (ratio.min().round(2), ratio.max().round(2)) == (0.86, 1.05)
    for rival in ("gumbel_argmax", "flashinfer_gumbel_lean"):
        assert (cell[rival] / cell["flash_sampling_hopper"]).min() > 1
    odd = pd.read_csv(H200 / "odd-20261121" / "results.csv").set_index(["provider", "b"])[
        "median_us"
    ]
    slower = (odd["flash_sampling_hopper"] / odd["gumbel_argmax"]).round(2)
    assert slower[slower > 1].to_dict() == {129: 1.03, 144: 1.02, 200: 1.10, 224: 1.02, 1024: 1.06}
    assert slower[512] == 0.94


def test_sentences_about_several_gpus():
    cell = pd.read_csv(H200 / "tp-20261122" / "scaling_h200_d8192_v128256.csv")
    cell = cell.set_index(["provider", "b"])
    for B in (16, 64, 256):
        four = [
            cell.tp4_median_us[name, B]
            for name in (
                "flash_sampling_hopper", "gumbel_argmax", "flashinfer_gumbel", "matmul_only",
            )
        ]  # fmt: skip
        fewer = [cell[f"tp{n}_median_us"]["flash_sampling_hopper", B] for n in (1, 2)]
        times = " | ".join(f"{time:.1f}" for time in (*fewer, *four))
        assert f"| {B} | {times} |" in README
    assert "at 96 to 97 and 89 to 92 % of ideal scaling" in README
    for n, least, most in ((2, 0.96, 0.97), (4, 0.89, 0.92)):
        ideal = cell[f"tp{n}_ideal"]["flash_sampling_hopper"].round(2)
        assert (ideal.min(), ideal.max()) == (least, most)


def test_sentences_about_verification():
    """Of a check that was run again the last line counts."""
    checks = [
        check
        for path in sorted((H200 / "verify").glob("*.jsonl"))
        for check in map(json.loads, path.read_text().splitlines())
        if "verdict" in check
    ]
    latest = {(check["provider"], check["name"]): check for check in checks}
    assert "FAILED" not in {check["verdict"] for check in latest.values()}
    for sampler in ("flash_sampling", "flash_sampling_hopper"):
        mine = {name: check for (provider, name), check in latest.items() if provider == sampler}
        assert len(mine) == 21 and {check["verdict"] for check in mine.values()} == {"ok"}
        assert mine["variation"]["draws"] >= 1e8 and mine["variation"]["bound"] < 0.001


def test_results_name_the_machine_and_the_commit():
    for env in H200.glob("*/env.json"):
        record = read_environment(env.parent)
        assert record["gpu"] == "NVIDIA H200" and record["git_sha"]
