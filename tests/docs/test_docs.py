"""The documentation is true: its example runs, its tables are complete, its links resolve."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import typer
from docs_pages import DOCS, PAGES, first_cells, fsbench, section, text
from tree import ROOT

from fsbench import inputs, provider, reference
from fsbench.cli import app
from fsbench.e2e.models import decoders, default_samplers
from fsbench.e2e.summary import COLUMNS
from fsbench.machine.environment import environment
from fsbench.measure.presets import PRESETS
from fsbench.problem import Problem, models
from fsbench.records import breakdown, summary
from fsbench.records.cell import COLUMNS as COLUMNS_OF_CELLS
from fsbench.records.cell import STATUSES, Energy, Round
from fsbench.records.stats import median_interval


def commands() -> dict[str, typer.core.TyperCommand]:
    """Every command by what one types after `fsbench`, but for hidden ones, the old spellings."""
    found = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if command.hidden:
            continue
        found[name] = command
        for part, own in getattr(command, "commands", {}).items():
            found[f"{name} {part}"] = own
    return found


def test_every_command_is_documented() -> None:
    written = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    missing = [name for name in commands() if f"fsbench {name}" not in written]
    assert not missing


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_options_named_in_the_docs_exist(page: Path) -> None:
    known = {
        option
        for command in commands().values()
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    text = page.read_text(encoding="utf-8")
    ours = re.sub(r"`(?:compute-sanitizer|python tools/)[^`\n]*`", "", text)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", ours))
    assert named <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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


def test_every_file_named_in_the_docs_exists() -> None:
    for page in DOCS:
        for name in re.findall(
            r"`((?:fsbench|kernels|baselines|tests)/[\w/]+\.\w+)`", text(page.name)
        ):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_every_column_of_e2e_csv_is_documented() -> None:
    table = text("end-to-end.md").split("\n### e2e.csv\n", 1)[1]
    assert tuple(first_cells(table)) == COLUMNS


def test_every_model_and_engine_of_e2e_is_documented() -> None:
    options = section("end-to-end.md", "Run it")
    for name in [*decoders(), *default_samplers()]:
        assert f"`{name}`" in options, name


def test_every_column_of_results_csv_is_documented() -> None:
    assert first_cells(section("results-format.md", "results.csv")) == list(summary.COLUMNS)


def test_every_field_of_points_jsonl_is_documented() -> None:
    wanted = {"schema", "cell", "round", "measured", "form", "energy", "lacks", "status", "reason"}
    wanted |= {*COLUMNS_OF_CELLS, *(each.name for kind in (Round, Energy) for each in fields(kind))}
    assert set(first_cells(section("results-format.md", "points.jsonl"))) == wanted


def test_every_column_of_breakdown_csv_is_documented() -> None:
    page = section("results-format.md", "breakdown.csv")
    columns = list(breakdown.kernel_rows([]).columns)
    own = first_cells(page)
    assert own == columns[-len(own) :]
    assert set(columns) <= set(re.findall(r"`(\w+)`", page))


def test_the_classes_of_kernels_are_those_of_the_page_on_methodology() -> None:
    table = section("methodology.md", "Matmul, sampling and the rest")
    rows = re.findall(r"^\| (matmul|sampling|other) \| (.*) \|$", table, re.MULTILINE)
    names = [(part, name) for part, cell in rows[:-1] for name in re.findall(r"`(\w+)`", cell)]
    assert len(names) > 20
    told = {(name, str(breakdown.part_of(name))) for _, name in names}
    assert told == {(name, "unknown" if name == "unknown" else part) for part, name in names} - {
        ("breakdown", "other")
    }
    alternatives = {
        word.strip("^$()")
        for _, rule in breakdown._RULES
        for word in re.split(r"[|()]", rule)
        if re.fullmatch(r"\^?[a-z]{3,}\$?", word)
    }
    assert alternatives - {"tem", "bmm", "poi", "red", "per"} <= {name for _, name in names}


def test_every_field_of_env_json_is_documented() -> None:
    wanted = {"schema", "options", "resumed", *environment("cpu", [])}
    assert set(first_cells(section("results-format.md", "env.json"))) == wanted


def test_every_status_and_exit_code_is_documented() -> None:
    assert first_cells(section("results-format.md", "Statuses")) == list(STATUSES)
    table = section("results-format.md", "Exit codes")
    assert re.findall(r"^\| (\d) \|", table, re.MULTILINE) == list("01234")


def test_every_field_of_a_provider_is_documented() -> None:
    named = set(first_cells(section("adding-a-sampler.md", "The contract")))
    for kind in (provider.Provider, provider.Capabilities):
        assert {field.name for field in fields(kind)} <= named


def test_every_shipped_sampler_is_in_the_fairness_table() -> None:
    table = first_cells(section("methodology.md", "Fairness: two classes of baselines"))
    table += re.findall(r"^- `(\w+)`:", section("methodology.md", "Lower bounds"), re.MULTILINE)
    shipped = {
        path.stem
        for folder in ("kernels", "baselines")
        for path in (ROOT / folder).glob("[!_]*.py")
    }
    assert set(table) == shipped


def test_counts_in_methodology() -> None:
    assert median_interval(range(1, 101)) == (40.0, 61.0)
    paper = PRESETS["paper"]
    assert (paper.warmup, paper.iters, paper.rounds) == (25, 100, 5)
    fewer = {name for name, p in PRESETS.items() if p.iters < paper.iters}
    assert fewer == {"quick", "truncated", "smoke", "cpu"}


def test_words_and_lanes_are_those_of_the_table_in_noise() -> None:
    table = section("noise.md", "Token to word and lane")
    lines = re.findall(r"^\| (\d) \| (.+) \|$", table, re.MULTILINE)
    shown = [[int(token) for token in cells.split(" | ")] for _, cells in lines]
    word, lane = reference.word_and_lane(torch.arange(16))
    tokens = torch.empty(4, 4, dtype=torch.int64)
    tokens[word, lane] = torch.arange(16)
    assert tokens.tolist() == shown


def test_fp32_uniforms_round_to_one_for_128_codes() -> None:
    codes = np.arange(2**32 - 1024, 2**32, dtype=np.uint32)
    ones = codes.astype(np.float32) * np.float32(2.0**-32) == 1
    assert ones.sum() == 128
    assert f"{1 - (1 - 2.0**-25) ** 151936:.2%}" == "0.45%"


def test_tail_table_in_noise() -> None:
    """P(a tail token beats the dominant one), from the 2^32 codes, relative to the exact one."""
    V = 151936
    t = np.linspace(1e-9, 1 - 1e-9, 1_000_001)
    dominant = -np.log(-np.log(t))  # its Gumbel, at the quantiles t
    shown = re.search(r"^\| this contract \| 22.87 \| (.+) \|$", text("noise.md"), re.MULTILINE)
    assert shown
    for gap, share in zip(range(14, 26, 2), shown[1].split(" | "), strict=True):
        u = -np.expm1(-np.exp(-(dominant + gap)))  # a tail Gumbel is above it for smaller u
        p = np.ceil(u * 2.0**32 - 0.5).clip(0) / 2.0**32
        drawn = -np.expm1((V - 1) * np.log1p(-p)).mean()
        tail = (V - 1) * np.exp(-gap)
        assert f"{drawn * (1 + tail) / tail:.2f}" == share


def test_matmul_error_holds_for_an_accumulator_that_truncates() -> None:
    """Noise page: tensor cores that cut off, emulated at the largest D of the named models."""
    D = max(model.D for model in models().values())
    assert D == 16384
    for law in ("normal:1", "zipf:1", "peaked:20"):
        problem = Problem(2, D, 256, "bf16", device="cpu", logits=law)
        weight, hidden = inputs.make_weight(problem, 0), inputs.make_hidden(problem, 0)
        products = hidden.double()[:, None, :] * weight.double()[None]
        groups = products.reshape(2, 256, D // 16, 16).sum(-1).numpy()
        accumulator = np.zeros((2, 256))
        for step in range(D // 16):
            exact = accumulator + groups[..., step]
            rounded = exact.astype(np.float32)
            over = np.abs(rounded.astype(float)) > np.abs(exact)
            accumulator = np.where(over, np.nextafter(rounded, np.float32(0)), rounded).astype(
                float
            )
        error = np.abs(accumulator - products.sum(-1).numpy()).max()
        assert error < reference.matmul_error(hidden, weight)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example of adding-a-sampler.md, saved under the name that the page gives it."""
    page = text("adding-a-sampler.md")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    name = re.search(r"Save it as `(\w+\.py)`", page)
    assert code and name
    path = tmp_path_factory.mktemp("plugin") / name[1]
    path.write_text(code[1], encoding="utf-8")
    return path


@pytest.fixture()
def broken_plugins(tmp_path: Path) -> Iterator[list[Path]]:
    sources = {"raises": "raise OSError('no luck')", "empty": "", "exits": "raise SystemExit(7)"}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    yield sorted(tmp_path.glob("*.py"))


def test_example_is_listed(plugin: Path) -> None:
    assert plugin.stem in fsbench("list", "--provider-path", plugin)


@pytest.mark.full
def test_example_is_verified(plugin: Path) -> None:
    output = fsbench("verify", "--provider", plugin.stem, "--provider-path", plugin,
                     "--device", "cpu", "--dtype", "fp32", "--json")  # fmt: skip
    assert '"passed": true' in output and '"passed": false' not in output


def test_example_is_timed(plugin: Path, tmp_path: Path) -> None:
    """The command of the page, without the rivals."""
    out = tmp_path / "results"
    fsbench("run", "--preset", "smoke", "--provider", plugin.stem, "--provider-path", plugin,
            "--device", "cpu", "--timer", "cpu", "--out", out)  # fmt: skip
    table = pd.read_csv(out / "results.csv")
    assert list(table["status"]) == ["ok"] * len(PRESETS["smoke"].batches)
    assert (table["median_us"] > 0).all()
    written = section("results-format.md", "Speedup tables")
    for stem in ("points.jsonl", "env.json", "results.csv", "speedup_cpu_d256_v8192.md"):
        assert (out / stem).exists()
    speedups = pd.read_csv(out / "speedup_cpu_d256_v8192.csv")
    assert {name.split(".")[0] for name in speedups} <= {
        name.split(".")[0] for name in first_cells(written)
    }


def test_broken_plugins_do_what_the_page_says(broken_plugins: list[Path]) -> None:
    paths = [part for path in broken_plugins for part in ("--provider-path", path)]
    output = fsbench("list", *paths, "--json")
    for reason in ("OSError: no luck", "defines no PROVIDER", "SystemExit: 7"):
        assert reason in output


def test_every_field_of_a_record_of_verification_is_documented() -> None:
    from fsbench.verify.check import Check

    line = {"schema", "environment", "setting", "provider", "skipped", "verdict"}
    wanted = line | {field.name for field in fields(Check)}
    table = section("results-format.md", "Records of verification")
    assert set(first_cells(table)) - {"env.json"} >= wanted


def test_every_check_is_in_the_page_on_exactness() -> None:
    from fsbench.verify.battery import CHECKS

    named = set(first_cells(section("exactness.md", "The checks")))
    assert {name.split()[0] if name.startswith("tail") else name for name in named} - {
        "16", "18", "20"} == set(CHECKS)  # fmt: skip
