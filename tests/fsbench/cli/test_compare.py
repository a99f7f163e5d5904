"""`fsbench compare` on results folders as `fsbench run` leaves them, and on the committed ones."""

import re

import pytest
from cells import cell
from tree import newest
from typer.testing import CliRunner

from fsbench import paper
from fsbench.cli import app
from fsbench.errors import InvalidArgument, ResultsError
from fsbench.records.cell import Round
from fsbench.records.store import Store

FUSED = paper.source()["fused"]["provider"]


def _cell(provider, b, **changes):
    return cell(provider=provider, label=provider, b=b, d=4096, v=151936, **changes)


def _run(folder, times, oom=(), sm_mhz=1980, **environment):
    """A results folder: times maps (provider, B) to the time of each of its steps."""
    store = Store.create(folder, {"gpu": "NVIDIA H200", "git_sha": "0123456789", **environment})
    for (provider, b), time in times.items():
        measured = Round([time] * 8, clocks={"sm_mhz": sm_mhz})
        store.append_round(_cell(provider, b, fused=provider == FUSED), 0, measured)
    for provider, b in oom:
        store.append_status(_cell(provider, b, fused=False), "oom", "no memory")
    store.close()
    return folder


def _compare(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def two_runs(tmp_path):
    a = {("one", 1): 100.0, ("one", 2): 100.0, ("two", 1): 100.0, ("two", 2): 100.0}
    b = {("one", 1): 103.0, ("one", 2): 96.0, ("two", 1): 101.0, ("three", 1): 1.0}
    return _run(tmp_path / "a", a, driver="580"), _run(tmp_path / "b", b, sm_mhz=1755, driver="590")


def test_two_runs_side_by_side(two_runs):
    result = _compare(*two_runs)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[:2] == [
        f"{name}: {folder}, None, commit 0123456"
        for name, folder in zip("AB", two_runs, strict=True)
    ]
    assert "driver: 580 in A, 590 in B" in lines
    assert "median sm_mhz: 1980.0 in A, 1755.0 in B" in lines
    assert "one 1 100.0 103.0 1.030 [1.030, 1.030] SLOW" in lines
    assert "one 2 100.0 96.0 0.960 [0.960, 0.960] FAST" in lines
    assert "two 1 100.0 101.0 1.010 [1.010, 1.010] SAME" in lines
    for line in ("only in A, 1 cells: two at B = 2; D", "only in B, 1 cells: three at B = 1; D"):
        assert any(each.startswith(line) for each in lines)
    assert lines[-1].startswith("3 cells in both: 1 FAST, 1 SLOW, 1 SAME, 0 AMBIGUOUS.")
    assert "within 2 % of 1" in lines[-1]


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (["--fail-on", "slow"], 1, "one, B = 1"),
        (["--fail-on", "slow:2.9%"], 1, "one, B = 1"),
        (["--fail-on", "slow:3.1"], 0, None),
        (["--within", "4%", "--fail-on", "slow"], 0, None),
        (["--within", "4%", "--fail-on", "slow:0.5%"], 1, "two, B = 1"),
    ],
)
def test_the_exit_code_of_two_runs(two_runs, options, code, named):
    result = _compare(*two_runs, *options)
    assert result.exit_code == code
    failures = [line for line in result.stdout.splitlines() if line.startswith("--fail-on ")]
    assert bool(failures) == bool(code)
    assert named is None or any(named in line for line in failures)


def test_a_cell_that_is_lost_fails_too(tmp_path):
    a = _run(tmp_path / "a", {("one", 1): 10.0, ("one", 2): 10.0})
    b = _run(tmp_path / "b", {("one", 1): 10.0}, oom=[("one", 2)])
    result = _compare(a, b)
    assert result.exit_code == 0
    assert "one, B = 2, D = 4096, V = 151936: not measured in B: oom, no memory" in result.stdout
    result = _compare(a, b, "--fail-on", "slow:50%")
    assert result.exit_code == 1
    assert "--fail-on slow:50%: one, B = 2" in result.stdout
    result = _compare(b, a, "--fail-on", "slow")
    assert result.exit_code == 0
    assert "one, B = 2, D = 4096, V = 151936: not measured in A: oom, no memory" in result.stdout


def test_bad_folders_are_named(two_runs, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ResultsError, match=r"empty: expected a results folder"):
        _compare(tmp_path / "empty", "--paper", "h200")
    with pytest.raises(ResultsError, match=r"expected one run; got 2: .*/a, .*/b$"):
        _compare(two_runs[0], tmp_path)
    (two_runs[1] / "env.json").unlink()
    with pytest.raises(ResultsError, match=r"it has no env.json"):
        _compare(*two_runs)


def test_runs_without_a_common_cell_are_an_error(two_runs, tmp_path):
    other = _run(tmp_path / "other", {("one", 3): 1.0})
    with pytest.raises(ResultsError, match=r"A has .*B 1, 2; one, two; B has .*B 3; one$"):
        _compare(two_runs[0], other)


def test_options_that_do_not_fit_each_other_are_named(two_runs):
    for runs in (two_runs[:1], [*two_runs, two_runs[0]]):
        with pytest.raises(
            InvalidArgument, match=rf"expected two runs, or --paper; got {len(runs)}"
        ):
            _compare(*runs)
    with pytest.raises(InvalidArgument, match="--fail-on: expected worse or worse:3% here"):
        _compare(two_runs[0], "--paper", "h200", "--fail-on", "slow:3%")


@pytest.fixture
def beside_the_paper(tmp_path):
    """At B = 1 as published for the H200, but for FI1, which is 10 % faster; FI2 is missing."""
    providers = {name: entry["provider"] for name, entry in paper.source()["baselines"].items()}
    times = {
        (FUSED, 1): 100.0,
        (providers["Multinomial"], 1): 135.0,
        (providers["FI1"], 1): 125.1,
    }
    return _run(tmp_path / "run", times)


def test_a_run_beside_the_paper(beside_the_paper):
    result = _compare(beside_the_paper, "--paper", "h200")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0].startswith(f"Paper: {paper.source()['title']}")
    assert "are not stated" in lines[1]  # what the paper does not say of its measurements
    assert f"FlashSampling: {FUSED} (our own Triton kernel" in result.stdout
    assert "Table 4, H200; ours: NVIDIA H200, D = 4,096, V = 151,936" in lines
    assert "Multinomial 1 1.35 [1.35, 1.35] 1.35 1.000 agrees" in lines
    assert "FI1 1 1.25 [1.25, 1.25] 1.39 0.900 worse" in lines
    assert "not in these results: FI2" in lines
    assert "2 cells: 1 agree within 5 %, 0 better, 1 worse." in result.stdout
    assert "differ by up to 11.1 % in ours / paper" in result.stdout


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([], 0),
        (["--fail-on", "worse"], 1),
        (["--fail-on", "worse:9%"], 1),
        (["--fail-on", "worse:11%"], 0),
        (["--within", "11%", "--fail-on", "worse"], 0),
    ],
)
def test_the_exit_code_beside_the_paper(beside_the_paper, options, code):
    result = _compare(beside_the_paper, "--paper", "h200", *options)
    assert result.exit_code == code
    failures = re.findall(r"^--fail-on \S+: (.*)$", result.stdout, re.MULTILINE)
    assert failures == (["Table 4, B = 1, vs FI1: 0.900 of the paper's"] if code else [])


def test_committed_results_beside_the_paper():
    result = _compare(newest("paper"), "--paper", "h200", "--fail-on", "worse")
    assert result.exit_code == 0
    assert "54 cells: 22 agree within 5 %, 32 better, 0 worse." in result.stdout


def test_committed_runs_of_one_commit_are_the_same():
    result = _compare(newest("called"), newest("lean"), "--fail-on", "slow")
    assert result.exit_code == 0
    assert "72 cells in both: 0 FAST, 0 SLOW, 65 SAME, 7 AMBIGUOUS" in result.stdout


def test_a_run_without_the_fused_sampler_is_refused(tmp_path):
    provider = paper.source()["baselines"]["FI1"]["provider"]
    run = _run(tmp_path / "run", {(provider, 1): 139.0})
    with pytest.raises(ResultsError, match=f"expected bf16, .*, {FUSED} and one of"):
        _compare(run, "--paper", "h200")
