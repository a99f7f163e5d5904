"""`fsbench iomodel`, and the option parsers it shares with `fsbench run`."""

import json

import pytest
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.cli.parsing import int_list, shapes
from fsbench.problem import Problem
from fsbench.records import iomodel


def _run(*arguments):
    return CliRunner().invoke(app, ["iomodel", *arguments], catch_exceptions=False)


def _rows(*arguments):
    return json.loads(_run(*arguments, "--json").stdout)


def test_default_is_the_papers_sweep():
    rows = _rows()
    assert [(row["b"], row["d"], row["v"]) for row in rows] == [
        (2**i, d, v) for d, v in ((4096, 151936), (8192, 128256)) for i in range(9)
    ]
    assert {row["gpu"] for row in rows} == {"h200"}


def test_row_holds_the_models_numbers():
    (row,) = _rows("--batch", "64", "--d", "4096", "--v", "151936", "--gpu", "NVIDIA H200")
    problem = Problem(64, 4096, 151936)
    work = iomodel.traffic(problem)
    assert row == {
        "model": "d4096_v151936",
        "b": 64,
        "d": 4096,
        "v": 151936,
        "dtype": "bf16",
        "baseline_bytes": work.baseline_bytes,
        "fused_bytes": work.fused_bytes,
        "flops": work.flops,
        "predicted_speedup": iomodel.predicted_speedup(problem),
        "approximate_speedup": 1 + 128 / 4096,
        "baseline_flop_per_byte": work.flops / work.baseline_bytes,
        "fused_flop_per_byte": work.flops / work.fused_bytes,
        "gpu": "h200",
        "floor_us": pytest.approx(work.fused_bytes / 4.8e6),
        "measured_floor_us": pytest.approx(work.fused_bytes / 4.68e6),
    }


def test_no_measured_floor_where_none_is_known():
    (row,) = _rows("--batch", "1", "--model", "phi-4", "--gpu", "b200")
    assert row["model"] == "phi-4"
    assert row["floor_us"] == pytest.approx(row["fused_bytes"] / 8e6)
    assert row["measured_floor_us"] is None


def test_lists_and_models_form_a_sweep():
    rows = _rows(
        *("--batch", "1,2", "--d", "64,128", "--v", "1000", "--model", "phi-4,glm-5"),
        *("--model", "kimi-k2.5"),
    )
    assert [(row["model"], row["b"]) for row in rows] == [
        (name, b)
        for name in ("phi-4", "glm-5", "kimi-k2.5", "d64_v1000", "d128_v1000")
        for b in (1, 2)
    ]


def test_table_shows_floors_and_names_both_roofs():
    out = _run("--batch", "256", "--model", "qwen3-8b").stdout
    (line,) = [line.split() for line in out.splitlines() if line.lstrip().startswith("256 ")]
    roof = iomodel.gpu("h200").measured  # above 200 FLOP per byte, its FLOP/s are the limit
    floor_us = f"{2 * 256 * 4096 * 151936 / roof.tflops / 1e6:.1f}"
    assert " ".join(line) == f"256 1402.3 1246.8 1.1248 1.1250 227.22 255.57 322.2 {floor_us}"
    assert "datasheet" in out and "…" not in out  # nothing is cut at 80 columns
    assert "h200 datasheet: 4.8 TB/s, 989 TFLOP/s bf16" in out
    assert f"h200 {roof.source}: {roof.tb_per_s} TB/s, {roof.tflops} TFLOP/s bf16" in out


def test_int_list():
    assert int_list("4,1, 2,1", "--batch") == [4, 1, 2]
    assert int_list("0,1", "--gpu", minimum=0) == [0, 1]


def test_shapes_merges_names_of_one_shape():
    assert shapes(["qwen3-8b", "qwen3-235b-a22b,qwen3-8b"], "4096,64", "151936") == [
        ("qwen3-8b, qwen3-235b-a22b", 4096, 151936),
        ("d64_v151936", 64, 151936),
    ]
