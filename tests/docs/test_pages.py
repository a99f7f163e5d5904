"""README.md and docs/ are what `make docs` writes, and what they name, link to and show works."""

from __future__ import annotations

import json
import re
from itertools import zip_longest
from pathlib import Path

import pandas as pd
import pytest
from pages import blocks, computed, tables
from pages.blocks import BLOCKS, EVERYTHING
from pages.tables import check_claim, declared, records_of, rows_of, shown_by
from pages.write import BLOCK, CLAIM, NUMBER, pages, regenerated
from tree import H200, ROOT, newest
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.discover import discover
from fsbench.records.store import read_environment, read_records
from fsbench.records.summary import frame, read_csv
from fsbench.report.measurement_warnings import measurement_warnings
from fsbench.report.tables import configurations, markdown
from fsbench.verify.battery import CHECKS

LINKING = [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *H200.glob("*.md")]


def fsbench(*arguments: object) -> str:
    """Output of a command; fails unless its exit code is 0."""
    done = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def section(name: str, heading: str) -> str:
    """The text of a page under a heading, up to the next heading of its level."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def first_cells(table: str) -> list[str]:
    """Every name in backticks in the first column of the tables in a text."""
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    return [name for cell in rows for name in re.findall(r"`([^`]+)`", cell)]


def by_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", pages(), ids=by_name)
def test_a_page_is_what_make_docs_writes(page: Path) -> None:
    """The message names the page and its first block, number or line that differs."""
    now, new = page.read_text(encoding="utf-8"), regenerated(page)
    if now == new:
        return
    start = next(i for i, (a, b) in enumerate(zip_longest(now, new)) if a != b)
    block = re.findall(r"<!-- begin: (.+?) -->|<!--n (.+?)-->", new[:start])[-1:]
    line = new.count("\n", 0, start)
    got, expected = (text.splitlines()[line : line + 1] for text in (now, new))
    where = f"{by_name(page)}:{line + 1}, in or after {''.join(*block) or 'no block'}"
    pytest.fail(f"{where}: expected {expected}; got {got}: run make docs", pytrace=False)


def texts() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in pages())


def test_everything_declared_is_on_a_page() -> None:
    text, specs = texts(), declared()
    assert {match[2].split()[0] for match in BLOCK.finditer(text)} == {*BLOCKS, *specs["table"]}
    assert {match[2] for match in NUMBER.finditer(text)} == set(specs["number"])
    assert set(CLAIM.findall(text)) == set(specs["claim"])
    views = {
        entry.get("in") for kind in ("table", "number", "claim") for entry in specs[kind].values()
    }
    views |= {other for view in specs["view"].values() for other in view.get("join", [])}
    views |= {view["like"] for view in specs["view"].values() if "like" in view}
    assert views - {None} == set(specs["view"])


SHOWN = {"at most": "most", "at least": "least", "all of": ("only", "sum", "count")}
"""Words before a number -> what the number has to be of its rows."""
WIDE = re.compile(r"\b(every|each|all|always|never|none|no other|whatever)\b", re.IGNORECASE)
NOT_A_CLAIM = re.compile(
    r"[Aa]ll of <!--n|each of two|all other|each token|at every B|each Gumbel|with all controls|"
    r"All checks|each other|One Gumbel|each row|all launches|for all|all rows|all ranks"
)


def sentences() -> list[str]:
    """The sentences of pages that have a number filled in, tables cell by cell."""
    parts = re.split(r"(?<=[.;:])\s|\n|\|", BLOCK.sub("", texts()))
    return [part for part in parts if NUMBER.search(part)]


def test_words_before_a_number_are_what_it_shows() -> None:
    wrong = []
    for sentence in sentences():
        for words, name in re.findall(r"(\w+ \w+) <!--n ([\w.-]+)-->", sentence):
            kind = declared()["number"][name]["show"].split()[0]
            if words.lower() in SHOWN and kind not in SHOWN[words.lower()]:
                wrong.append(f"{words} [number.{name}], which shows its {kind}: {sentence}")
    assert not wrong


UP_TO = (
    r"[Uu]p to B = ([\d,]*\d)(?:(?!<!--|[.;,:|]|\band\b).)*<!--([nc]) ([\w.-]+)-->",
    r"<!--([nc]) ([\w.-]+)-->(?:(?!<!--[nc]|[.;|]\s).)*?(?:B up to|up to B =) ([\d,]*\d)",
)


def test_up_to_a_batch_size_is_up_to_it_in_the_rows() -> None:
    """Where a page says "up to B = 64", the rows of the number or claim end at B = 64."""
    text, checked, wrong = BLOCK.sub("", texts()), 0, []
    for match in (each for pattern in UP_TO for each in re.finditer(pattern, text)):
        size, kind, name = sorted(match.groups(), key=lambda x: (not x[0].isdigit(), len(x)))
        last = rows_of({"n": "number", "c": "claim"}[kind], name).b.max()
        checked += 1
        if last != int(size.replace(",", "")):
            wrong.append(f"{match[0]}: the rows end at B = {last}")
    assert not wrong and checked > 15


def test_a_sentence_about_every_row_has_a_claim() -> None:
    """Next to a number, "every", "each", "all" and "none" are conditions to recompute."""
    wrong = [
        sentence
        for sentence in sentences()
        if WIDE.search(NUMBER.sub("", NOT_A_CLAIM.sub("", sentence))) and not CLAIM.search(sentence)
    ]
    assert not wrong, "put <!--c NAME--> after the words and declare [claim] NAME in tables.toml"


@pytest.mark.parametrize("name", declared()["claim"])
def test_a_claim_holds_and_its_opposite_does_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_claim(name)
    claim = declared()["claim"][name]
    monkeypatch.setitem(declared()["claim"], name, {**claim, "all": f"not ({claim['all']})"})
    with pytest.raises(ValueError, match=rf"\[claim.{name}\]: expected not"):
        check_claim(name)


def test_no_saved_time_is_shown_whose_standard_deviation_exceeds_two_points() -> None:
    spreads = [float(each) for each in re.findall(r"± (\d+\.\d)", texts())]
    assert len(spreads) > 100 and max(spreads) <= 2


def test_records_are_of_commits_without_changes() -> None:
    changed = [
        path.relative_to(ROOT)
        for path in (ROOT / "results").rglob("*env.json")
        if json.loads(path.read_text(encoding="utf-8")).get("git_dirty")
    ]
    assert not changed


def test_a_table_of_measurements_names_gpu_date_and_commit() -> None:
    text = texts()
    for match in BLOCK.finditer(text):
        entry = declared()["table"].get(match[2])
        if entry is not None and entry.get("source", True):
            assert re.search(r"^\*.+, 20\d\d-.+, commits? [0-9a-f]{7}", match[0], re.M), match[2]


def runs_of(block: str, text: str) -> set[str]:
    """Runs of fsbench below results/ that a block of a page has numbers of."""
    view = declared()["table"].get(block, {}).get("in")
    records = {*re.findall(r"\]\((?:\.\./)*results/([^)]+)\)", text)}
    records |= {*(records_of(view) if view else ())}
    return {each for each in records if (ROOT / "results" / each / "results.csv").exists()}


def test_below_numbers_of_a_run_are_the_warnings_of_its_report() -> None:
    """Clocks that differ, wide intervals: a reader must see them where the numbers are."""
    lacking, shown = [], 0
    for page in pages():
        for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
            is_table = match[2] in declared()["table"]
            cells = EVERYTHING
            if is_table:
                cells = shown_by(match[2], rows_of("table", match[2]))
            for run in runs_of(match[2], match[0]):
                results = read_csv(ROOT / "results" / run)
                if match[2].startswith("speedups"):
                    results = results[results.d == int(match[2].split()[-1])]
                for warning in measurement_warnings(cells.rows_in(results)):
                    shown += warning.doubt in match[0]
                    if warning.doubt not in match[0]:
                        lacking.append(f"{by_name(page)}, {match[2]}: {run}: {warning.doubt}")
    assert not lacking, "\n".join(lacking)
    assert shown > 20


def test_speedups_of_the_authors_kernel_are_ratios_within_runs() -> None:
    """Table 4 at B = 64 over FI2, from the raw times."""
    run = "h100/paper-20261128"
    raw = read_csv(ROOT / "results" / run).query("d == 4096 and b == 64").set_index("provider")
    rows = computed.beside_the_paper(run)
    (cell,) = rows.query("d == 4096 and b == 64 and method == 'FI2'").itertuples()
    ratio = raw.median_us["flashinfer_gumbel"] / raw.median_us["flashsampling_authors"]
    assert cell.theirs == pytest.approx(ratio)


def test_tables_name_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of a small record: labels and their order, cells without a number, old columns."""
    (tmp_path / "r.csv").write_text("b,what,us\n2,y,3\n1,x,1\n1,y,2\n2,x,\n1,z,9\n", "utf-8")
    view = {"files": ["r.csv"], "where": "us > 0 or us != us"}
    entry = {
        "in": "v",
        "across": "b",
        "names": {"what": {"y": "Y", "x": "X"}},
        "columns": {"": "{what}", "?new": "{missing}"},
        "cells": {"B = {b}": "{us:.1f}"},
        "missing": "-",
        "source": False,
    }
    number = {"in": "v", "value": "b + us", "show": "most .1f"}
    later = {"in": "v", "value": "new", "show": "most .1f", "missing": "not recorded"}
    specs = {
        "view": {"v": view},
        "table": {"t": entry, "u": {"like": "t", "where": "lacking > 1"}},
        "number": {"n": number, "m": later},
    }
    monkeypatch.setattr(blocks, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "declared", lambda: specs)
    tables.view.cache_clear()
    rows = [
        "|  | B = 1 | B = 2 |",
        "| :--- | ---: | ---: |",
        "| Y | 2.0 | 3.0 |",
        "| X | 1.0 | - |",
    ]
    assert tables.made_table("t").splitlines() == rows
    assert (tables.made_number("n"), tables.made_number("m")) == ("10.0", "not recorded")
    with pytest.raises(ValueError, match=r"\[table.u\]: 'lacking > 1'.*the columns are b, what"):
        tables.made_table("u")
    tables.view.cache_clear()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


@pytest.mark.parametrize("page", LINKING, ids=by_name)
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), target


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


OPTION = r"(?<![\w!-])--[a-z][a-z0-9-]*"


@pytest.mark.parametrize("page", pages(), ids=by_name)
def test_options_on_a_page_exist(page: Path) -> None:
    commands_page = (ROOT / "docs/reference/commands.md").read_text("utf-8")  # made of the code
    options = set(re.findall(OPTION, " ".join(re.findall(r"^\* `(-.*?)`", commands_page, re.M))))
    foreign = r"`(?:compute-sanitizer|python tools/)[^`\n]*`|pip install [^`\n]*|vllm serve [^`\n]*"
    commands = re.sub(foreign, "", page.read_text("utf-8"))
    assert set(re.findall(OPTION, commands)) <= options


def test_the_readme_recommends() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^fsbench (recommend [^#\n]*)", readme, re.MULTILINE)
    assert fsbench(*line.split(), "--results", newest("score"))


def test_every_sampler_is_in_the_fairness_table() -> None:
    table = section("design/methodology.md", "Fairness: two classes of baselines")
    named = first_cells(table.split("<!-- begin", 1)[0])
    named += re.findall(
        r"^- `(\w+)`:", section("design/methodology.md", "Lower bounds"), re.MULTILINE
    )
    assert sorted(named) == sorted(discover())


def test_every_check_is_in_the_page_on_exactness() -> None:
    named = set(first_cells(section("design/exactness.md", "The checks")))
    assert {name.split()[0] if name.startswith("tail") else name for name in named} - {
        "16", "18", "20"} == set(CHECKS)  # fmt: skip


def test_records_name_the_machine_and_the_commit() -> None:
    for env in H200.glob("*/env.json"):
        record = read_environment(env.parent)
        assert record["gpu"] == "NVIDIA H200" and record["git_sha"]


def test_the_tables_of_speedups_follow_from_the_raw_samples() -> None:
    page = (ROOT / "docs" / "results" / "index.md").read_text(encoding="utf-8")
    table = frame(read_records(newest("paper")))
    assert (table["status"] == "ok").all()
    for configuration in configurations(table):
        (section,) = re.findall(r"## FlashSampling \(Hopper\)\s+([^#]*)", markdown(configuration))
        assert section.strip() in page


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example of adding-a-sampler.md, saved under the name that the page gives it."""
    page = (ROOT / "docs" / "guide" / "adding-a-sampler.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    name = re.search(r"Save it as `(\w+\.py)`", page)
    assert code and name
    path = tmp_path_factory.mktemp("plugin") / name[1]
    path.write_text(code[1], encoding="utf-8")
    return path


@pytest.mark.full
def test_example_is_verified(plugin: Path) -> None:
    output = fsbench("verify", "--provider", plugin.stem, "--provider-path", plugin,
                     "--device", "cpu", "--dtype", "fp32", "--json")  # fmt: skip
    assert '"passed": true' in output and '"passed": false' not in output


def test_example_is_timed(plugin: Path, tmp_path: Path) -> None:
    """The command of the page, without the rivals; it leaves what the page on the format says."""
    out = tmp_path / "results"
    fsbench("run", "--preset", "smoke", "--provider", plugin.stem, "--provider-path", plugin,
            "--device", "cpu", "--timer", "cpu", "--batch", 1, "--out", out)  # fmt: skip
    table = pd.read_csv(out / "results.csv")
    assert list(table["status"]) == ["ok"]
    assert (table["median_us"] > 0).all()
    assert (out / "speedup_cpu_d256_v8192.md").exists()
    speedups = pd.read_csv(out / "speedup_cpu_d256_v8192.csv")
    described = first_cells(section("reference/results-format.md", "Speedup tables"))
    assert {name.split(".")[0] for name in speedups} <= {name.split(".")[0] for name in described}
    keys = {key for line in (out / "points.jsonl").open() for key in json.loads(line)}
    assert keys <= set(first_cells(section("reference/results-format.md", "points.jsonl")))
    env = json.loads((out / "env.json").read_text())
    assert set(env) <= set(first_cells(section("reference/results-format.md", "env.json")))
