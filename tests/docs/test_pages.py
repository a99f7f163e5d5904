"""README.md and docs/ are what `make docs` writes, and what they name, link to and show works."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from pages import picture
from pages.blocks import BLOCKS, said, source
from pages.code import shown_commands
from pages.write import MARKED, pages, regenerated
from tree import H200, ROOT
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.discover import discover
from fsbench.measure.presets import PRESETS
from fsbench.records.store import read_environment, read_records
from fsbench.records.summary import frame
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
    return page.name


@pytest.mark.parametrize("page", pages(), ids=by_name)
def test_a_page_is_what_make_docs_writes(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == regenerated(page)


def test_the_picture_is_what_make_docs_writes() -> None:
    assert picture.PATH.read_text(encoding="utf-8") == picture.svg()


def test_every_block_is_on_a_page() -> None:
    texts = [page.read_text(encoding="utf-8") for page in pages()]
    assert {found[2].split()[0] for text in texts for found in MARKED.finditer(text)} == set(BLOCKS)


def test_a_source_names_gpu_date_and_commit() -> None:
    assert source("h200/paper-20261123").startswith("*NVIDIA H200, 2026-11-23, commit 2b757e5. ")
    assert "commit 5771289 with uncommitted changes" in source("h200/tuning/flash_sampling.csv")
    assert "commits 2b757e5, f927007" in source("h200/lean-20261123", "h200/truncated-20261123")
    assert source("cpu/simple-20261121").startswith("*AMD EPYC")


NOT_MEASURED = {
    *("decisions", "two-runs", "cpu-findings", "equal-tokens"),  # beside or linked to a source
    *("methods", "filter-orders", "e2e-models"),  # names
    *("slacks", "words-and-lanes", "tail-of-the-contract"),  # follow by computing
    *("candidates", "candidates-by-noise", "akunu-variation"),  # computed on a CPU, no times
    *("acceptance-synthetic", "acceptance-model", "acceptance-findings"),  # likewise
}


def test_a_measured_table_names_gpu_date_and_commit() -> None:
    of_code = {name for name, make in BLOCKS.items() if make.__module__ == "pages.code"}
    for page in pages():
        for found in MARKED.finditer(page.read_text(encoding="utf-8")):
            if found[2].split()[0] not in NOT_MEASURED | of_code:
                source = r"^\*.+, 20\d\d-.+, commits? [0-9a-f]{7}"
                assert re.search(source, found[0], re.M), found[2]


def test_words_that_the_records_do_not_bear_are_not_written() -> None:
    assert said("faster", 1.1 > 1) == "faster"
    with pytest.raises(ValueError, match="the records do not say: faster"):
        said("faster", 0.9 > 1)


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


@pytest.mark.parametrize("page", pages(), ids=by_name)
def test_options_on_a_page_exist(page: Path) -> None:
    known = {
        option
        for _, command in shown_commands()
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    ours = re.sub(r"`(?:compute-sanitizer|python tools/)[^`\n]*`", "", page.read_text("utf-8"))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", ours)) <= known | {
        "--help",
        "--install-completion",
    }


def test_the_readme_recommends() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^fsbench (recommend [^#\n]*)", readme, re.MULTILINE)
    assert fsbench(*line.split(), "--results", ROOT / "results")


def test_every_sampler_is_in_the_fairness_table() -> None:
    table = section("methodology.md", "Fairness: two classes of baselines")
    named = first_cells(table.split("<!-- begin", 1)[0])
    named += re.findall(r"^- `(\w+)`:", section("methodology.md", "Lower bounds"), re.MULTILINE)
    assert sorted(named) == sorted(discover())


def test_every_check_is_in_the_page_on_exactness() -> None:
    named = set(first_cells(section("exactness.md", "The checks")))
    assert {name.split()[0] if name.startswith("tail") else name for name in named} - {
        "16", "18", "20"} == set(CHECKS)  # fmt: skip


def test_records_name_the_machine_and_the_commit() -> None:
    for env in H200.glob("*/env.json"):
        record = read_environment(env.parent)
        assert record["gpu"] == "NVIDIA H200" and record["git_sha"]


def test_committed_tables_follow_from_the_raw_samples() -> None:
    run = H200 / "paper-20261123"
    table = frame(read_records(run))
    assert (table["status"] == "ok").all()
    for configuration in configurations(table):
        committed = (run / f"speedup_{configuration.stem}.md").read_text()
        assert markdown(configuration) == committed


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example of adding-a-sampler.md, saved under the name that the page gives it."""
    page = (ROOT / "docs" / "adding-a-sampler.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    name = re.search(r"Save it as `(\w+\.py)`", page)
    assert code and name
    path = tmp_path_factory.mktemp("plugin") / name[1]
    path.write_text(code[1], encoding="utf-8")
    return path


def test_example_is_listed(plugin: Path) -> None:
    assert plugin.stem in fsbench("list", "--provider-path", plugin)


@pytest.mark.full
def test_example_is_verified(plugin: Path) -> None:
    output = fsbench("verify", "--provider", plugin.stem, "--provider-path", plugin,
                     "--device", "cpu", "--dtype", "fp32", "--json")  # fmt: skip
    assert '"passed": true' in output and '"passed": false' not in output


def test_example_is_timed(plugin: Path, tmp_path: Path) -> None:
    """The command of the page, without the rivals; it leaves what the page on the format says."""
    out = tmp_path / "results"
    fsbench("run", "--preset", "smoke", "--provider", plugin.stem, "--provider-path", plugin,
            "--device", "cpu", "--timer", "cpu", "--out", out)  # fmt: skip
    table = pd.read_csv(out / "results.csv")
    assert list(table["status"]) == ["ok"] * len(PRESETS["smoke"].batches)
    assert (table["median_us"] > 0).all()
    assert (out / "speedup_cpu_d256_v8192.md").exists()
    speedups = pd.read_csv(out / "speedup_cpu_d256_v8192.csv")
    described = first_cells(section("results-format.md", "Speedup tables"))
    assert {name.split(".")[0] for name in speedups} <= {name.split(".")[0] for name in described}
    keys = {key for line in (out / "points.jsonl").open() for key in json.loads(line)}
    assert keys <= set(first_cells(section("results-format.md", "points.jsonl")))
    env = json.loads((out / "env.json").read_text())
    assert set(env) <= set(first_cells(section("results-format.md", "env.json")))
