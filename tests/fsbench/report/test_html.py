"""The report: its numbers, that it is self-contained, and that it works in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from cells import results_row
from tree import newest
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.report.html import index_page, pages

CHROMIUM = shutil.which("chromium")
ENVIRONMENT = {"utc": "2026-01-02", "gpu": "NVIDIA H200", "git_sha": "0123456789", "driver": None}


def row(provider, b, median, fused=False, kind="exact", **changes):
    shown = dict(
        folder="somewhere/run-7", label=f"<{provider}>", ci_lo_us=median - 1, ci_hi_us=median + 1
    )
    return results_row(provider, b, median, fused=fused, kind=kind, **{**shown, **changes})


def page_of(rows) -> str:
    ((name, text, _),) = pages(pd.DataFrame(rows), {Path("somewhere/run-7"): ENVIRONMENT})
    assert name == "h200"
    return text


@pytest.fixture
def rows():
    lost = dict(status="oom", median_us=None, ci_lo_us=None, ci_hi_us=None)
    return [
        *(row("ours", b, t, fused=True) for b, t in ((1, 100.0), (8, 120.0))),
        *(row("theirs", b, t) for b, t in ((1, 150.0), (8, 90.0))),
        row("broken", 1, 99.0),
        row("broken", 8, 0.0, **lost),
        *(row("floor", b, 80.0, kind="lower_bound") for b in (1, 8)),
    ]


def test_numbers_intervals_and_what_was_not_measured(rows):
    text = page_of(rows)
    assert '<td title="95%: 99.0 to 101.0">100.0</td>' in text
    assert '<td title="1.48 to 1.53">1.50</td>' in text  # 150 / 100, from both intervals
    assert "<td>oom</td>" in text
    assert "&lt;ours&gt;" in text and "<ours>" not in text
    assert '<td class="bound">&lt;floor&gt; (lower bound)</td>' in text
    assert "<td>run-7</td><td>2026-01-02</td><td>NVIDIA H200</td><td>0123456</td>" in text


def test_a_page_is_self_contained_and_reproducible(rows):
    text = page_of(rows)
    assert text == page_of(rows)
    assert text.count("data:image/svg+xml;base64,") == text.count("<img") == 1
    assert not re.search(r"(src|href)=\"(?!data:|index.html)", text) and "url(" not in text


def test_a_page_for_each_gpu_with_its_own_runs(rows):
    others = [row("ours", 1, 7777.0, gpu="NVIDIA H100 80GB HBM3", folder="elsewhere/run-8")]
    others.append(row("ours", 1, 8888.0, gpu="", device="cpu", folder="elsewhere/run-9"))
    runs = {Path(folder): ENVIRONMENT for folder in ("somewhere/run-7", "elsewhere/run-8")}
    made = list(pages(pd.DataFrame(rows + others), runs))
    texts = {name: text for name, text, _ in made}
    assert set(texts) == {"h200", "h100", "cpu"}
    assert "run-8" in texts["h100"] and "7777" in texts["h100"] and "run-7" not in texts["h100"]
    assert "run-8" not in texts["h200"] and "Exact sampling on a CPU" in texts["cpu"]
    index = index_page(card for *_, card in made)
    assert re.findall('href="(.*?)"', index) == ["cpu.html", "h100.html", "h200.html"]
    assert index.count("<img") == 3
    assert "No point has a fused sampler that is faster" in index
    rows = [each for each in rows if each["provider"] != "broken"]
    assert "fastest at 1 of 2 points" in page_of(rows) and "saves 33% to 33%" in page_of(rows)


def test_sections_are_named_by_what_they_show(rows):
    more = [{**each, "temperature": 0.5, "graph": False} for each in rows]
    more += [{**each, "top_k": 50, "kind": "truncated"} for each in rows]
    headings = re.findall("<summary><h2>(.*?)</h2>", page_of(rows + more))
    head = "qwen3-8b, qwen3-235b-a22b, 4,096 × 151,936"
    assert headings[:-1] == [
        f"Sampling: {head}, T = 0.5, eager",
        f"Sampling: {head}",
        f"Sampling with top-k 50: {head}",
    ]
    assert headings[-1] == "Runs (1)"


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.full
def test_of_the_committed_results(tmp_path):
    done = report(newest("lean"), newest("lean-d8192"), "--out", tmp_path / "a")
    assert done.stdout == f"wrote {tmp_path}/a/index.html\nwrote {tmp_path}/a/h200.html\n"
    text = (tmp_path / "a/h200.html").read_text()
    assert "Speedup of FlashSampling (Triton)" in text and "Warnings (" not in text
    assert text.count("<img") == 3  # the winners, and one of each shape
    report(newest("paper"), "--out", tmp_path / "b")
    assert "Warnings (" in (tmp_path / "b/h200.html").read_text()


CLICK = """<script>addEventListener("load", () => {
  const table = [...document.querySelectorAll("table")].find(
    each => each.parentElement.previousElementSibling?.textContent.startsWith("Median time"));
  const order = () => [...table.tBodies[0].rows].map(row => row.cells[2].textContent).join(" ");
  const [, , heading] = table.tHead.rows[0].cells;
  heading.firstChild.click();
  const up = order();
  heading.firstChild.click();
  document.body.dataset.order = `${up} | ${order()}`;
  document.body.dataset.wide = document.documentElement.scrollWidth > innerWidth;
});</script></body>"""


@pytest.mark.full
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
def test_in_a_browser(rows, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page_of(rows).replace("</body>", CLICK))
    options = [
        "--window-size=390,800",
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=5000",
    ]
    done = subprocess.run(
        [CHROMIUM, *options, f"--user-data-dir={tmp_path}", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 'data-errors="0" data-figures="1"' in done.stdout
    assert 'data-wide="false"' in done.stdout  # a phone scrolls tables, not the page
    # Sorted by B = 8 as numbers, ascending and descending; a cell without a number is last.
    assert 'data-order="80.0 90.0 120.0 oom | 120.0 90.0 80.0 oom"' in done.stdout
