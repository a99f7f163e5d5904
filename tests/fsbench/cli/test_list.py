"""`fsbench list`: everything that can be named, with the reason where it cannot be used."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields

import pytest
from plug_in import plug_in
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.cli.listing import CLAIMS, PLACES
from fsbench.discover import discover
from fsbench.machine import hardware
from fsbench.measure.presets import PRESETS
from fsbench.problem import models
from fsbench.provider import Capabilities
from fsbench.records import iomodel


def _list(*arguments, columns: int = 80) -> str:
    result = CliRunner().invoke(
        app,
        ["list", *map(str, arguments)],
        catch_exceptions=False,
        env={"COLUMNS": str(columns)},
    )
    assert result.exit_code == 0
    return result.stdout


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "gpus", lambda: [])


def _line(text: str, name: str) -> str:
    """Return the text after a name in its line, spaces collapsed."""
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
    return " ".join(line.split()[1:])


def test_json_has_the_facts_of_a_provider(no_gpu):
    facts = json.loads(_list("--json"))
    for key, names in (("models", models()), ("presets", PRESETS), ("providers", discover())):
        assert [row["name"] for row in facts[key]] == list(names)
    assert (facts["gpus_known"], facts["gpus_here"]) == (sorted(iomodel.gpus()), [])
    for row, entry in zip(facts["providers"], discover().values(), strict=True):
        able = entry.provider.capabilities
        assert (row["label"], row["kind"]) == (entry.provider.label, entry.provider.kind)
        assert row["cuda"] == entry.unavailable_reason("cuda")
        assert row["cpu"] == (entry.unavailable_reason("cpu") or "yes")
        assert row["presets"] == list(entry.provider.presets)
        assert row["capabilities"] == json.loads(json.dumps(asdict(able)))


def test_memory_in_addition_to_the_weight_is_listed(no_gpu):
    text = _list()
    assert "Memory in addition to a weight of D = 4,096, V = 151,936, bf16:\n" in text
    assert "  +50% (0.62 GB)  flash_sampling_screened\n" in text
    assert ")  flash_sampling_token" not in text
    rows = {row["name"]: row for row in json.loads(_list("--json"))["providers"]}
    assert rows["greedy_screened"]["kept_bytes"] == 151_936 * (4096 + 12)
    assert rows["greedy"]["kept_bytes"] == 0


def test_the_table_says_where_each_runs_or_why_not(no_gpu):
    text = _list()
    assert _line(text, "multinomial") == "exact CPU"
    assert _line(text, "matmul_only") == "lower_bound CPU"
    assert _line(text, "weight_stream") == "lower_bound - no GPU on this machine"
    assert _line(text, "qwen3-8b") == "151936 4096"
    for name in [*discover(), *models(), *PRESETS, *iomodel.gpus()]:
        assert name in text
    assert "GPUs here: none" in text


def test_each_sampler_has_its_legend_and_a_description_within_80_columns(no_gpu, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(plug_in())
    text = _list("--provider-path", path)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for entry in discover().values():
        assert f"{entry.provider.label}: {entry.description()}" in words
        assert len(entry.description()) > 20
    assert "mine: A sampler that is not shipped." in words


def test_with_a_gpu(monkeypatch):
    gpu = hardware.Gpu(0, "NVIDIA H200", "GPU-0", None, "580")
    monkeypatch.setattr(hardware, "gpus", lambda: [gpu])
    text = _list()
    assert _line(text, "multinomial") == "exact GPU, CPU"
    assert _line(text, "weight_stream") == "lower_bound GPU"
    assert "GPUs here: NVIDIA H200" in text


def test_the_capabilities_are_those_that_each_claims(no_gpu, tmp_path):
    path = tmp_path / "boaster.py"
    path.write_text(
        "from fsbench.provider import *\n"
        "able = Capabilities(mask=True)\n"
        "PROVIDER = Provider('boaster', 'Boaster', Kind.EXACT, print, capabilities=able)\n"
    )
    text = _list("--capabilities", "--provider-path", path)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for name, entry in discover().items():
        able = entry.provider.capabilities
        (shown,) = re.findall(rf"^{name}\n((?:    .*\n)+)", text, re.MULTILINE)
        listed = " ".join(shown.split()).split(", ")
        places = [place for place, device in PLACES.items() if device in able.devices]
        expected = [*places, *able.dtypes]
        for field in CLAIMS:
            if value := getattr(able, field):
                values = value if isinstance(value, bool | str) else " ".join(value)
                expected.append(field if value is True else f"{field} ({values})")
        assert listed == expected
    assert "boaster: broken, InvalidArgument: boaster: expected `sample`" in words
    assert text.splitlines()[-len(CLAIMS) :] == [f"{n:20}{CLAIMS[n]}" for n in CLAIMS]


def test_every_capability_is_listed():
    unlisted = {"devices", "dtypes"}  # without a name
    unlisted |= {"known_deviation", "exact_to_gap", "excess_beyond_gap", "seed_stride"}  # numbers
    unlisted |= {"filter_order", "ties"}  # of `filters`
    assert set(CLAIMS) == {field.name for field in fields(Capabilities)} - unlisted


def test_a_broken_plug_in_is_listed_with_the_reason(no_gpu, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('no [bold]luck')")
    assert _line(_list("--provider-path", path), "broken") == (
        "broken - RuntimeError: no [bold]luck"
    )
    rows = json.loads(_list("--provider-path", path, "--json"))["providers"]
    (row,) = (row for row in rows if row["name"] == "broken")
    assert (row["kind"], row["label"]) == (None, None)
    assert row["cuda"] == row["cpu"] == "RuntimeError: no [bold]luck"
