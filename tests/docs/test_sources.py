"""Sources below tables: the newest record of a name, its environment, warnings about its cells."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from pages import blocks, tables
from pages.blocks import RESULTS, Shown, source
from pages.write import BLOCK, pages
from tree import newest

from fsbench.records.breakdown import FILE


def test_a_source_names_gpu_date_and_commit() -> None:
    paper = newest("paper")
    env = json.loads((paper / "env.json").read_text())
    date, commit = env["utc"][:10], env["git_sha"][:7]
    assert source(f"h200/{paper.name}").startswith(f"*NVIDIA H200, {date}, commit {commit}. ")
    both = source(f"h200/{paper.name}", "h200/score-liger-20261126")
    assert f"commits {commit}, 0c0eba7" in both
    assert source("cpu/simple-20261121").startswith("*AMD EPYC")


def test_a_heading_names_no_gpu_that_its_table_lacks() -> None:
    wrong, compared = [], 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            line = re.search(r"^\*((?:NVIDIA [^,]*, )+)", block[0], re.MULTILINE)
            above = [each for each in text[: block.start()].split("\n\n") if each.strip()]
            heading = [each for each in above[-2:] if each.startswith("**")][-1:]
            if line and heading:
                compared += 1
                wrong += [
                    (page.name, gpu, heading)
                    for gpu in re.findall(r"\b(H100|H200)s?\b", heading[0])
                    if gpu not in line[1]
                ]
    assert compared > 20
    assert not wrong


def test_a_record_without_a_date_is_the_newest_that_has_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("h200/a-20260101/x", "h200/a-20260102/y", "h200/a-b-20260103/x", "h100/v/x"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(blocks, "RESULTS", tmp_path)
    for name, path in {
        "h200/a": "h200/a-20260102",
        "a": "h200/a-20260102",
        "h200/a/x": "h200/a-20260101/x",
        "h200/a-20260101": "h200/a-20260101",
        "a-b": "h200/a-b-20260103",
        "h100/v/x": "h100/v/x",
    }.items():
        assert blocks.newest(name) == path
    with pytest.raises(FileNotFoundError, match="no record results/h100/a"):
        blocks.newest("h100/a")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no record results/h100/v/\*.jsonl"):
        tables.files_of({"files": ["h100/v/*.jsonl"]})


def test_a_table_has_warnings_about_the_cells_that_it_shows() -> None:
    cells = {
        "d": [8, 8, 8, 16],
        "v": [9] * 4,
        "b": [1, 2, 1, 1],
        "provider": ["ours", "ours", "ours_fast", "other"],
    }
    results = pd.DataFrame(cells)

    def shown(rows: pd.DataFrame, text: str = "") -> list[int]:
        return list(Shown.from_rows(rows, text).rows_in(results).index)

    wide = results.drop(columns="provider")
    assert shown(wide, "{ours:.2f}") == [0, 1]
    assert shown(wide, "{sustained_us_ours_fast:.0f} / {other}") == [2, 3]
    assert shown(wide, "no sampler") == shown(wide.drop(columns="b")) == [0, 1, 2, 3]
    assert shown(wide[:1]) == [0, 2] and shown(wide[:1], "{ours_fast}") == [2]
    assert shown(results[:2]) == [0, 1]


def test_a_record_has_kernel_times_where_a_page_reads_them() -> None:
    """Elsewhere breakdown.csv is left out: a continued run derives it from the samples again."""
    read = {
        RESULTS / path
        for view in tables.declared()["view"]
        for path in tables.files_of(tables.declared()["view"][view])
        if path.endswith(f"/{FILE}")
    }
    assert read and set(RESULTS.rglob(FILE)) == read


@pytest.mark.parametrize(
    "table", sorted(RESULTS.glob("h?00/README.md")), ids=lambda p: p.parent.name
)
def test_a_table_of_records_names_what_is_there(table: Path) -> None:
    """Names in the first column may have *; of a path the first part counts."""
    rows = re.findall(r"^\| (`[^|]*) \|", table.read_text(encoding="utf-8"), re.MULTILINE)
    names = {name.split("/")[0] for row in rows for name in row.split("`")[1::2]} - {""}
    paths = {name: set(table.parent.glob(name)) for name in names}
    assert names and not [name for name in names if not paths[name]]
    not_records = {table, table.parent / "record.json"}
    assert set(table.parent.iterdir()) == set().union(not_records, *paths.values())
