"""Labels of results with characters that are special in some format."""

from __future__ import annotations

import csv
import re

import pytest
from cells import cell
from tiers import full
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.cli.result_frames import read_results
from fsbench.records.cell import Round
from fsbench.records.store import Store, read_records
from fsbench.records.summary import export_csv
from fsbench.report import tables
from fsbench.report.figures import configuration
from fsbench.report.figures.style import styles

LABELS = (
    "costs $5 and $6",
    "$\\frac{$",
    "two\nlines\r\n",
    "=1+1",
    "@SUM(A1)",
    "a|b",
    "[/bold] [red]",
    "<script>x</script>",
    "_private",
    "{x} %s \\N{BEL}",
    "ʯ\u202e",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Results of a fused sampler with each label against one without, on two LM heads."""
    monkeypatch.chdir(tmp_path)
    store = Store.create(tmp_path / "run", {"gpu": "NVIDIA H200", "device": "cuda"})
    fused_names = ("flash_sampling", "multinomial_compiled", "matmul_only", "weight_stream")
    names = dict(zip(fused_names, fused_names, strict=True))
    names |= {f"s{number}": label for number, label in enumerate(LABELS)}
    for number, (name, label) in enumerate(names.items()):
        kind = "exact" if name not in fused_names[2:] else "lower_bound"
        fused = name == fused_names[0] or name in ("s1", "s7")
        for d, v in ((4096, 151936), (8192, 128256)):
            columns = dict(provider=name, label=label, kind=kind, fused=fused, b=1, d=d, v=v)
            store.append_round(cell(**columns), 0, Round([10.0 + number] * 8))
    store.close()
    return tmp_path / "run"


@pytest.mark.parametrize(
    "command",
    [
        full("plot run --figure speedup,winner --format svg"),
        "compare run run",
        "compare run --paper h200",
        "recommend --model qwen3-8b --results run --batch 1",
        "iomodel --measured run",
        "hotvocab pipeline --run run --batch 1",
        "hotvocab pipeline --sampler [/bold]$=:1",
    ],
)
def test_no_command_stumbles(folder, command):
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.exception


def test_csv_has_no_formula_and_reads_back(folder):
    export_csv(folder, read_records(folder))
    with open(folder / "results.csv", newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [cell for cell in cells if re.match(r"[=+@]|-\D", cell)]
    assert "'=1+1" in cells
    labels = set(tables.normalized(read_results([folder])).label)
    assert {"=1+1", "@SUM(A1)", "two lines", "costs $5 and $6", "private", "ʯ?"} <= labels


def test_markdown_keeps_its_columns(folder):
    (result, _) = tables.configurations(read_results([folder]))
    text = tables.markdown(result)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} <= {
        6 + len(LABELS),
        4 + len(LABELS),
    }
    assert "<script>" not in text and "a\\|b" in text and "two lines" in text


def test_figures_print_the_signs_as_they_are(folder):
    frame = read_results([folder])
    (result, _) = tables.configurations(frame)
    figure = configuration.runtime(result, styles(frame))
    texts = {text.get_text(): text for text in figure.axes[0].get_legend().get_texts()}
    assert {"costs $5 and $6", "$\\frac{$", "private", "two lines"} <= texts.keys()
    assert not texts["costs $5 and $6"].get_parse_math()


@pytest.mark.full
def test_the_report_escapes_them(folder):
    assert CliRunner().invoke(app, ["report", "run"]).exit_code == 0
    text = (folder.parent / "report/h200.html").read_text()
    assert "<script>x" not in text and "&lt;script&gt;x" in text
