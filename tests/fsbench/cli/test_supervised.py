"""A sampler that ends its process, or never ends, costs only its cells."""

from __future__ import annotations

import pandas as pd
import pytest
from tiers import first_quick
from tiny_run import TINY

from fsbench.records.store import read_records


@pytest.fixture
def measured(fsbench, plugin, tmp_path):
    """Runs a sampler that misbehaves at B = 3, 4, .. between two others.

    Returns (exit code, table, output). misbehavior: a line of Python for each of these B.
    """

    def run(*misbehavior, more=(), **parts):
        lines = dict(enumerate(misbehavior or ["pass"], start=3))
        # In the second round of a cell.
        launch = f"exec({lines!r}.get(problem.B, 'pass') if step == 4 else 'pass')"
        batch = ",".join(map(str, (1, *lines)))
        plugin_options = plugin(launch=launch, **parts)
        names = ("--provider", "greedy", *plugin_options, "--provider", "matmul_only")
        code, out, err = fsbench("run", *TINY, "--batch", batch, *names, "--out", "x", *more)
        assert "Traceback" not in out + err
        table = pd.read_csv(tmp_path / "x" / "results.csv", keep_default_na=False)
        return code, table.set_index(["provider", "b"]), out

    return run


ENDS: list[dict[str, str]] = [
    {"os.kill(os.getpid(), signal.SIGSEGV)": "its process was ended by SIGSEGV"},
    {"os._exit(0)": "its process exited with code 0"},
    {"raise type('Odd', (BaseException,), {})('today')": "Odd: today"},
    {
        "raise type('E', (Exception,), {'__str__': None})": "E: (no text: str() raised TypeError)",
        "raise ValueError('\\udcff')": "ValueError: \\udcff",
    },
    {"sys.exit(0)": "SystemExit: 0"},
    {"raise KeyboardInterrupt": "KeyboardInterrupt"},
]
"""Line -> the reason of its cell. Only lines that leave the process alive share a run."""


def assert_only_these_fail(table, status, reasons):
    """Cells of B = 3, 4, .. have this status and these reasons; all others are measured."""
    cells = [("mine", B) for B, _ in enumerate(reasons, start=3)]
    failed = table.loc[cells]
    assert failed.reason.tolist() == list(reasons)
    assert set(failed.status) == {status}
    others = table.drop(cells)
    assert set(others.status) == {"ok"} and set(others.n_samples.astype(int)) == {4}


@pytest.mark.parametrize("ends", first_quick(ENDS, 4), ids=lambda ends: " ".join(ends.values()))
def test_cells_that_end_have_a_reason_and_the_rest_goes_on(measured, fsbench, tmp_path, ends):
    code, table, _ = measured(*ends)
    assert code == 3
    assert_only_these_fail(table, "error", ends.values())
    assert set(table[table.status == "error"].n_samples.astype(int)) == {2}
    # It is tried again, which measures the rest of what it has, and costs nothing else.
    before = {r.cell: r.rounds for r in read_records(tmp_path / "x") if r.status == "ok"}
    assert fsbench("run", "--resume", "x")[0] in (0, 3)
    after = {r.cell: r.rounds for r in read_records(tmp_path / "x")}
    assert {one: after[one] for one in before} == before


THREAD = (
    "__import__('threading').Thread(target=lambda: [0 for _ in iter(int, 1) if 0], daemon=True)"
)
HARM = {
    f"{THREAD}.start()": "it leaves threads running after its calls",
    "weight.resize_(weight.shape[0] + 9, weight.shape[1])": "it resizes weight",
    "weight.t_()": "it resizes weight",
    "time.perf_counter = lambda: 0.0": "it changes time.perf_counter",
    "signal.setitimer(signal.ITIMER_REAL, 3600)": "it changes the interval timer of SIGALRM",
    "__import__('torch').set_default_dtype(__import__('torch').float64)":
        "it changes torch's default_dtype",
}  # fmt: skip


def test_what_a_sampler_does_to_its_process_harms_no_other(measured):
    code, table, _ = measured(*HARM)
    assert code == 1
    assert_only_these_fail(table, "check_failed", HARM.values())


@pytest.mark.full
def test_a_cell_that_hangs_is_ended(measured):
    code, table, _ = measured("time.sleep(10000)", more=("--timeout", "30"))
    assert code == 3
    assert table.loc[("mine", 3)].status == "timeout" and "30 s" in table.loc[("mine", 3)].reason
    assert set(table.drop(("mine", 3)).status) == {"ok"}


def test_a_run_that_measured_nothing_does_not_end_well(fsbench, plugin, tmp_path):
    assert fsbench("run", *TINY, *plugin(build="os._exit(0)"), "--out", "x")[0] == 3
    assert {record.reason for record in read_records(tmp_path / "x")} == {
        "its process exited with code 0"
    }


def test_being_asked_what_it_supports_may_end_the_process(measured):
    code, table, _ = measured(supports="os._exit(0) if problem.B == 3 else None")
    assert code == 3
    assert table.loc["mine", 3].status == "error"
    assert set(table.drop(("mine", 3)).status) == {"ok"}


def test_a_config_that_is_no_text_is_a_reason(measured):
    code, table, _ = measured(config="5")
    assert code == 3
    wrong = "InvalidType: launch.config: expected a string; got 5"
    assert set(table.loc["mine"].reason) == {wrong}
    assert set(table.loc["greedy"].status) == {"ok"}


def test_text_that_is_not_unicode_is_escaped(measured):
    code, table, _ = measured(config="'\\udcff'")
    assert code == 0
    assert set(table.loc["mine"].config) == {"\\udcff"}


def test_a_sampler_is_verified_once_whatever_ends_the_process(fsbench, plugin, tmp_path):
    """Its own file counts how often it is asked for what only the battery asks for."""
    log = tmp_path / "asked"

    def requested(launch, code, *more):
        count = f"open({str(log)!r}, 'a').write(f'{{problem.V}} ')"
        options = [option for option in TINY if option != "--no-check"]
        assert fsbench("run", *options, *plugin(build=count, launch=launch), *more)[0] == code
        sizes = log.read_text().split()
        log.unlink()
        return sizes

    ends = "if problem.B == 3 and step == 4: os._exit(1)"
    sizes = requested(ends, 3, "--batch", "3,1,2", "--out", "x")
    battery = [V for V in sizes if V != "50"]
    assert sizes.count("50") == 3 and battery
    assert {r.status for r in read_records(tmp_path / "x")} == {"ok", "error"}
    assert [V for V in requested("pass", 0, "--batch", "1", "--out", "y") if V != "50"] == battery
