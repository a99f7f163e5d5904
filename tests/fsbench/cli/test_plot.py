"""`fsbench plot` on results folders as `fsbench run` leaves them."""

import pytest
from cells import cell
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.errors import InvalidArgument, ResultsError
from fsbench.records.cell import Round
from fsbench.records.store import Store
from fsbench.records.summary import export_csv
from fsbench.report.figures.style import SETTINGS

PROVIDERS = {"fast": ("exact", True), "slow": ("exact", False), "floor": ("lower_bound", False)}
FIGURES = ("bandwidth", "headline", "runtime", "speedup")


def _cell(provider, b, gpu="NVIDIA H200", **changes):
    kind, fused = PROVIDERS[provider]
    sampler = dict(provider=provider, label=provider, kind=kind, fused=fused, gpu=gpu, b=b, d=64)
    return cell(**{**sampler, "device": "cuda" if gpu else "cpu", **changes})


def _results(folder, providers=tuple(PROVIDERS), times=(10.0, 20.0, 5.0), export=True, **changes):
    store = Store.create(folder, {"gpu": changes.get("gpu", "NVIDIA H200"), "device": "cuda"})
    for provider, time in zip(providers, times, strict=False):
        for b in (1, 2):
            store.append_round(_cell(provider, b, **changes), 0, Round([time] * 8))
    store.close()
    if export:
        export_csv(folder, store.records)
    return folder


def _plot(*arguments):
    return CliRunner().invoke(app, ["plot", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(autouse=True)
def _coarse_pictures(monkeypatch):
    """Draw fewer pixels, which is faster."""
    monkeypatch.setitem(SETTINGS, "savefig.dpi", 30)


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_draws_what_was_measured_of_each_configuration_and_prints_it(tmp_path):
    _results(tmp_path / "a")
    out = tmp_path / "figures"
    figures = ("--figure", "bandwidth, runtime", "--format", "png, svg")
    result = _plot(tmp_path / "a", "--out", out, *figures)
    shown = ("bandwidth", "runtime")
    names = [f"{name}_h200_d64_v1000.{suffix}" for name in shown for suffix in ("png", "svg")]
    assert _names(out) == names
    wrote = [line for line in result.stdout.splitlines() if line.startswith("wrote")]
    assert sorted(wrote) == [f"wrote {out / name}" for name in names]
    assert result.stdout.endswith(f"\n{len(names)} figures in {out}\n")
    repeated = _plot(tmp_path / "a", "--out", out, "--figure", "runtime")
    assert f"kept {out / 'runtime_h200_d64_v1000.png'}\n" in repeated.stdout
    (out / "runtime_h200_d64_v1000.png").write_bytes(b"another")
    repeated = _plot(tmp_path / "a", "--out", out, "--figure", "runtime")
    assert f"replaced {out / 'runtime_h200_d64_v1000.png'}\n" in repeated.stdout
    named = "breakdown,costs,scaling,runtime"
    result = _plot(tmp_path / "a", "--figure", named)
    for name in ("breakdown", "costs"):
        assert f"no {name} figure for h200_d64_v1000: not measured" in result.stdout
    assert "no scaling figure: one number of GPUs was measured" in result.stdout
    assert _names(tmp_path / "a" / "plots") == ["runtime_h200_d64_v1000.png"]


@pytest.mark.full
def test_merges_folders_and_tells_machines_apart(tmp_path):
    _results(tmp_path / "results" / "h200" / "1")
    _results(tmp_path / "results" / "h200" / "2", d=128)
    cpu = dict(gpu="", timer="cpu", graph=False, l2="n/a", dtype="fp32")
    _results(tmp_path / "results" / "cpu" / "1", **cpu)
    result = _plot(tmp_path / "results", "--out", tmp_path / "out")
    assert "no " not in result.stdout  # figures that do not apply are not mentioned
    stems = ("cpu_d64_v1000", "h200_d128_v1000", "h200_d64_v1000")
    names = [f"{name}_{stem}.png" for name in FIGURES for stem in stems]
    assert _names(tmp_path / "out") == [*names, "winner_h200.png"]


def test_a_killed_run_without_csv_is_read_and_left_alone_and_a_missing_figure_is_explained(
    tmp_path,
):
    _results(tmp_path / "a", providers=("slow", "floor"), export=False)
    named = "runtime,speedup,bandwidth"
    result = _plot(tmp_path / "a", "--out", tmp_path / "out", "--figure", named)
    assert "no speedup figure for h200_d64_v1000: no fused and unfused" in result.stdout
    assert len(_names(tmp_path / "out")) == 2
    assert _names(tmp_path / "a") == ["env.json", "points.jsonl"]


@pytest.mark.parametrize("options", [("--format", "png,jpg"), ("--figure", "runtme")])
def test_unknown_names_are_refused_before_anything_is_written(tmp_path, options):
    with pytest.raises(InvalidArgument, match=f"{options[0]}: expected one of"):
        _plot(_results(tmp_path / "a"), "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_no_cell_that_is_ok(tmp_path):
    store = Store.create(tmp_path / "a", {"gpu": "", "device": "cpu"})
    store.append_status(_cell("fast", 1), "oom", "out of memory")
    for b in (1, 2):
        store.append_status(_cell("slow", b), "error", "why")
    store.close()
    export_csv(tmp_path / "a", store.records)
    with pytest.raises(ResultsError, match="at least one cell with status ok; got 2 error, 1 oom"):
        _plot(tmp_path / "a", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
