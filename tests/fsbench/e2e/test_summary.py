"""Numbers, tables and figures of `fsbench e2e`, from samples made by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.e2e.records import Case, Decoded, Profile, StepStore, read
from fsbench.e2e.summary import COLUMNS, step_quantiles, summary
from fsbench.e2e.tables import markdown, write_tables
from fsbench.errors import ResultsError
from fsbench.report.figures import end_to_end, engine_shares
from fsbench.report.figures.end_to_end import draw, write_figures


def case(sampler: str, b: int = 4, **other) -> Case:
    named = {
        "engine": "vllm", "model": "qwen3-8b", "d": 4096, "v": 151936, "dtype": "bfloat16",
        "tp": 1, "b": b, "sampler": sampler, "label": sampler.upper(), "fused": sampler == "fused",
        "baseline": sampler == "base", "device": "cuda", "gpu": "NVIDIA H200",
    }  # fmt: skip
    return Case(**{**named, **other})


def decoded(tpot_us: float, steps: list[float] | None = None) -> Decoded:
    return Decoded(128, 64, 9000.0, tpot_us, steps or [tpot_us] * 10)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Baseline: a step of 4000 us, 600 for drawing (LM head: 450). `fused` saves 5 %."""
    store = StepStore(tmp_path / "run", {"gpu": "NVIDIA H200"})
    for b in (1, 4):
        for run, (base, fused) in enumerate([(4000, 3800), (4100, 3854), (3900, 3744)]):
            store.append(case("base", b), run=run, decoded=decoded(base))
            store.append(case("fused", b), run=run, decoded=decoded(fused))
        store.append(case("base", b), profile=Profile(20, 600, 450, 3300, 3900))
        store.append(case("fused", b), profile=Profile(20, 350, None, 3300, 3650))
    store.append(case("absent", 0), status="unavailable", reason="package absent is not installed")
    store.append(case("fused", 0), counts={"served": 7, "left": {}})
    store.close()
    return store.folder


def test_numbers(folder):
    frame = summary(read(folder)).set_index(["b", "sampler"])
    base, fused = frame.loc[(4, "base")], frame.loc[(4, "fused")]
    assert (base.tpot_ms, base.tpot_min_ms, base.tpot_max_ms) == (4.0, 3.9, 4.1)
    assert base.tokens_per_s == pytest.approx(4 / 4e-3)
    assert base.isna().reduction_pct
    assert fused.reduction_pct == pytest.approx(5.0)  # runs: 5, 6, 4
    assert fused.reduction_sd_pct == pytest.approx(1.0)
    assert base.gap_us == pytest.approx(100)
    assert base.amdahl_pct == pytest.approx(100 * 150 / 4000)
    assert fused.possible_pct == pytest.approx(100 * 250 / 4000)
    assert fused.reached == pytest.approx(5 / 6.25)
    absent = frame.loc[(0, "absent")]
    assert (absent.status, absent.runs) == ("unavailable", 0)
    assert list(summary(read(folder)).columns) == list(COLUMNS)


def test_the_gpus_own_time_is_the_median_of_profiles_compared_in_pairs(tmp_path):
    store = StepStore(tmp_path / "run", {})
    for run, (base, fused) in enumerate([(4000, 3600), (4200, 3738), (5000, 4600), (4000, 0)]):
        store.append(case("base"), run=run, decoded=decoded(9000))
        store.append(case("base"), run=run, profile=Profile(20, 600 + run, 450, 3300, base))
        store.append(case("fused"), run=run, decoded=decoded(9000))
        if fused:
            store.append(case("fused"), run=run, profile=Profile(20, 300 + run, None, 3300, fused))
    store.close()
    frame = summary(read(store.folder)).set_index("sampler")
    base, fused = frame.loc["base"], frame.loc["fused"]
    assert (base.profiles, base.gpu_tpot_ms) == (4, 4.1) and base.isna().gpu_reduction_pct
    assert (fused.profiles, fused.gpu_tpot_ms) == (3, 3.738)
    assert fused.gpu_reduction_pct == pytest.approx(10)  # 10, 11 and 8, the fourth has no pair
    assert fused.gpu_reduction_sd_pct == pytest.approx(1.528, abs=1e-3)
    assert fused.reduction_pct == 0 and fused.draw_us == 301 and fused.gap_us == 9000 - 3738
    assert "| 10.0 ± 1.5 |" in markdown(summary(read(store.folder)))


def test_on_a_cpu_nothing_is_a_percentage_of_a_step_that_was_not_measured(tmp_path):
    """A fused sampler runs its reference there, and a profile takes longer than the step."""
    store = StepStore(tmp_path / "run", {})
    for name, us in (("base", 500), ("fused", 9000), ("other", 400)):
        cpu = case(name, device="cpu", gpu="")
        store.append(cpu, run=0, decoded=decoded(us))
        store.append(cpu, profile=Profile(3, 1200, 100, 800, 2000))
    store.close()
    frame = summary(read(store.folder)).set_index("sampler")
    assert frame.loc["other"].reduction_pct == pytest.approx(20)
    assert frame.loc["fused"].isna().reduction_pct
    assert frame[["amdahl_pct", "possible_pct", "reached"]].isna().all(axis=None)
    text = markdown(summary(read(store.folder)))
    assert "sampling in no time" not in text and "profile:" not in text
    assert "On a CPU FUSED runs its reference" in text


def test_quantiles_count_tokens_not_steps():
    runs = [
        {"step_us": [10.0] * 98 + [50.0, 90.0], "step_tokens": None},
        {"step_us": [1000.0], "step_tokens": [1]},
    ]
    assert step_quantiles(runs, 4, (0.5, 0.985, 0.999)) == (10.0, 50.0, 1000.0)


def test_a_stalled_step_is_in_the_time_per_token_and_not_in_the_median_step(tmp_path):
    store = StepStore(tmp_path / "run", {})
    for run, base in enumerate((4000, 4000, 4000)):
        fused = [3800] * 9 + [13800 if run else 3800]
        store.append(case("base"), run=run, decoded=decoded(base))
        store.append(case("fused"), run=run, decoded=decoded(sum(fused) / 10, fused))
    store.close()
    fused = summary(read(store.folder)).set_index("sampler").loc["fused"]
    assert fused.reduction_pct == pytest.approx(-20) and fused.reduction_sd_pct > 2
    assert (fused.itl_ms, fused.itl_reduction_sd_pct) == (3.8, 0)
    assert fused.itl_reduction_pct == pytest.approx(5)


def test_tables(folder):
    frame = write_tables(folder)
    page = (folder / "e2e.md").read_text()
    assert page == markdown(frame)
    for line in (
        "## qwen3-8b in vllm, 1 x NVIDIA H200",
        "ABSENT: unavailable, package absent is not installed.",
        "| B | BASE | FUSED |",
        "| 4 | 4.000 [3.900, 4.100] | 3.800 [3.744, 3.854] |",
        "| B | FUSED | sampling in no time | the paper's fork, B200 |",
        "| 4 | 5.0 ± 1.0 (profile: 6.2) | 3.8 | 8.1 ± 0.1 |",
        "| 4 | BASE | 4000 | 600 | 450 | 3300 | 3900 |  | 100 | 4.100 / 4.100 |",
        "| 4 | FUSED | 3800 | 350 |  | 3300 | 3650 | 6.4 | 150 | 3.854 / 3.854 |",
    ):
        assert line in page.splitlines(), line
    assert (folder / "e2e.csv").read_text().splitlines()[0] == ",".join(COLUMNS)


@pytest.mark.parametrize(
    "other", [{"engine": "hf"}, {"model": "tiny"}, {"tp": 2}, {"requests": "top-p"}]
)
def test_the_paper_is_compared_with_what_it_measured_only(tmp_path, other):
    store = StepStore(tmp_path / "run", {})
    for sampler, us in (("base", 4000), ("fused", 3800)):
        store.append(case(sampler, **other), run=0, decoded=decoded(us))
    store.close()
    page = markdown(summary(read(store.folder)))
    assert "| 4 | 5.0 |" in page and "paper" not in page


def test_one_pair_of_runs_has_no_standard_deviation(tmp_path):
    store = StepStore(tmp_path / "run", {})
    for sampler, us in (("base", 4000), ("fused", 3800)):
        store.append(case(sampler), run=0, decoded=decoded(us))
        store.append(case(sampler), profile=Profile(3, 1200, 100, 800, us))
    store.close()
    fused = summary(read(store.folder)).set_index("sampler").loc["fused"]
    assert fused.reduction_pct == fused.gpu_reduction_pct == pytest.approx(5)
    assert fused[["reduction_sd_pct", "gpu_reduction_sd_pct"]].isna().all()
    assert write_tables(store.folder).reduction_sd_pct.dtype == float  # figures take it as it is


def test_figure(folder, tmp_path):
    frame = write_tables(folder)
    written = write_figures(frame, tmp_path)
    assert written == [tmp_path / "tpot_vllm.png", tmp_path / "share_vllm.png"]
    assert all(path.read_bytes()[1:4] == b"PNG" for path in written)
    upper, lower = draw(frame[frame.runs > 0]).axes
    lines = {each.get_label(): each.lines[0] for each in upper.containers}
    assert lines["BASE"].get_ydata().tolist() == [4.0, 4.0]
    assert lines["FUSED"].get_xdata().tolist() == [1, 4]
    (saved,) = lower.containers
    assert saved.lines[0].get_ydata().tolist() == pytest.approx([5.0, 5.0])
    bound = next(
        line
        for line in lower.lines
        if line.get_label() == "bound: sampling in no time,\nthe same matmul"
    )
    assert bound.get_ydata().tolist() == pytest.approx([3.75, 3.75])
    assert upper.get_title("left") == "qwen3-8b, TP 1"


def test_the_share_of_a_step_is_drawn_where_profiles_have_it(folder):
    frame = write_tables(folder)
    (panel,) = engine_shares.draw(frame[frame.runs > 0]).axes
    widths = [bar.get_width() for bars in panel.containers for bar in bars]
    # Of a GPU's 3900 and 3650 us. In the fused sampler the matmul has no part.
    parts = [100 * us / 3900 for us in (450, 150)] + [0, 100 * 350 / 3650]
    assert widths == pytest.approx(2 * parts)
    labels = [tick.get_text() for tick in panel.get_yticklabels()]
    assert labels == ["plain, B = 1", "plain, B = 4"]
    assert engine_shares.draw(frame.assign(draw_us=float("nan"))) is None


def test_figures_are_drawn_from_several_folders(tmp_path):
    folders = []
    for name in ("base", "fused"):
        store = StepStore(tmp_path / name, {})
        store.append(case(name), run=0, decoded=decoded(4000))
        store.close()
        folders.append(str(store.folder))
    plot = ["plot", *folders, "--out", str(tmp_path / "plots"), "--format", "svg"]
    assert CliRunner().invoke(app, plot, catch_exceptions=False).exit_code == 0
    drawn = (tmp_path / "plots" / "tpot_vllm.svg").read_text()
    assert "BASE" in drawn and "FUSED" in drawn
    other = ["plot", folders[0], "--figure", "runtime", "--out", str(tmp_path / "none")]
    assert "--figure: expected one that" in str(CliRunner().invoke(app, other).exception)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("name", "module"), [("tpot", engine_shares), ("share", end_to_end)])
def test_only_the_chosen_figure_is_drawn(folder, tmp_path, monkeypatch, name, module):
    monkeypatch.setattr(module, "draw", None)  # drawing the figure that was not chosen fails
    plot = ["plot", str(folder), "--figure", name, "--format", "svg", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, plot, catch_exceptions=False).exit_code == 0
    assert [path.name for path in tmp_path.glob("*.svg")] == [f"{name}_vllm.svg"]


def test_a_cut_line_is_left_out_and_a_damaged_one_named(folder):
    path = folder / "steps.jsonl"
    whole = read(folder)
    with path.open("a") as file:
        file.write('{"case": {"eng')
    assert read(folder) == whole
    path.write_text("not json\n" + path.read_text())
    with pytest.raises(ResultsError, match=r"steps\.jsonl:1: not a results line"):
        read(folder)


def test_packed_samples_are_read_and_not_continued(folder, tmp_path):
    path, whole = folder / "steps.jsonl", read(folder)
    path.with_name("steps.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert read(folder) == whole
    plot = ["plot", str(folder), "--figure", "tpot", "--format", "svg", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, plot, catch_exceptions=False).exit_code == 0
    with pytest.raises(ResultsError, match=r"steps\.jsonl\.gz: expected steps\.jsonl; unpack it"):
        StepStore(folder, {}, resume=True)
    with pytest.raises(ResultsError, match="it has results already"):
        StepStore(folder, {})


def test_results_are_never_mixed(folder, tmp_path):
    with pytest.raises(ResultsError, match="it has results already"):
        StepStore(folder, {})
    with pytest.raises(ResultsError, match="expected results of `fsbench e2e`"):
        read(tmp_path)
    facts = json.loads((folder / "env.json").read_text())
    (folder / "env.json").write_text(json.dumps({**facts, "schema": 2}))
    with pytest.raises(ResultsError, match="expected schema 1; got 2"):
        read(folder)
