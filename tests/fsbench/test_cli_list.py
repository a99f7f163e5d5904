"""`fsbench list`: everything that can be named, with the reason where it cannot be used."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from fsbench import hardware, iomodel
from fsbench.cli import app
from fsbench.discover import discover
from fsbench.presets import PRESETS
from fsbench.problem import models


def _list(*arguments) -> str:
    result = CliRunner().invoke(app, ["list", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "gpus", lambda: [])


def _line(text: str, name: str) -> str:
    """What stands beside a name, spaces collapsed."""
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
    return " ".join(line.split()[1:])


def test_json_has_every_name(no_gpu):
    facts = json.loads(_list("--json"))
    assert [row["name"] for row in facts["providers"]] == list(discover())
    assert [row["name"] for row in facts["models"]] == list(models())
    assert [row["name"] for row in facts["presets"]] == list(PRESETS)
    assert facts["gpus_known"] == sorted(iomodel.gpus())
    assert facts["gpus_here"] == []


def test_json_has_the_facts_of_a_provider(no_gpu):
    rows = {row["name"]: row for row in json.loads(_list("--json"))["providers"]}
    for name, entry in discover().items():
        row, able = rows[name], entry.provider.capabilities
        assert (row["label"], row["kind"]) == (entry.provider.label, entry.provider.kind)
        assert row["cuda"] == entry.unavailable_reason("cuda")
        assert row["cpu"] == (entry.unavailable_reason("cpu") or "yes")
        assert row["presets"] == list(entry.provider.presets)
        assert row["capabilities"] == {
            "devices": list(able.devices),
            "dtypes": list(able.dtypes),
            "noise": able.noise,
            "zero_temperature": able.zero_temperature,
            "fused": able.fused,
            "graph_safe": able.graph_safe,
        }


def test_the_table_says_where_each_runs_or_why_not(no_gpu):
    text = _list()
    assert _line(text, "multinomial") == "exact CPU"
    assert _line(text, "matmul_only") == "lower_bound CPU"
    assert _line(text, "weight_stream") == "lower_bound - no GPU on this machine"
    assert _line(text, "qwen3-8b") == "151936 4096"
    for name in [*discover(), *models(), *PRESETS, *iomodel.gpus()]:
        assert name in text
    assert "GPUs here: none" in text


def test_with_a_gpu(monkeypatch):
    gpu = hardware.Gpu(0, "NVIDIA H200", "GPU-0", None, "580")
    monkeypatch.setattr(hardware, "gpus", lambda: [gpu])
    text = _list()
    assert _line(text, "multinomial") == "exact GPU, CPU"
    assert _line(text, "weight_stream") == "lower_bound GPU"
    assert "GPUs here: NVIDIA H200" in text


def test_capabilities_on_request(no_gpu):
    assert "T = 0" not in _list()
    assert _line(_list("--capabilities"), "greedy") == "greedy bf16, fp16, fp32, T = 0, graphs"


@pytest.mark.parametrize("arguments", [[], ["--capabilities"]])
def test_it_fits_80_columns_and_no_provider_takes_two_lines(no_gpu, arguments):
    lines = [line.rstrip() for line in _list(*arguments).splitlines()]
    assert max(map(len, lines)) <= 80
    if not arguments:
        providers = lines[2 : lines.index("")]
        assert [line.split()[0] for line in providers] == list(discover())


def test_a_broken_plug_in_is_listed_with_the_reason(no_gpu, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('no [bold]luck')")
    assert _line(_list("--provider-path", path), "broken") == (
        "broken - RuntimeError: no [bold]luck"
    )
    row = json.loads(_list("--provider-path", path, "--json"))["providers"][0]
    assert (row["name"], row["kind"], row["label"]) == ("broken", None, None)
    assert row["cuda"] == row["cpu"] == "RuntimeError: no [bold]luck"
