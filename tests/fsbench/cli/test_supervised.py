"""A sampler that ends its process, or never ends, costs its own cells only."""

from __future__ import annotations

import pandas as pd
import pytest
from tiny_run import TINY

from fsbench.records.store import read_records

PLUGIN = """
import os, signal, sys, time
from fsbench.provider import Capabilities, Kind, Provider

class Speechless(Exception):
    def __str__(self):
        raise ValueError("not a word")

class Odd(BaseException):
    pass

def build(problem, weight):
    steps = 0

    def launch(hidden, seed, offset):
        nonlocal steps
        steps += 1
        if problem.B == 3 and steps == 4:  # in its second round
            {misbehaviour}
        return (hidden @ weight.T).argmax(1)

    launch.config = {config}
    return launch

PROVIDER = Provider(
    name="mine", label={label}, kind=Kind.GREEDY, build=build,
    capabilities=Capabilities(devices=("cpu",), dtypes=("fp32",), zero_temperature=True),
"""


@pytest.fixture
def measured(fsbench, tmp_path):
    """Runs a sampler that misbehaves at B = 3 between two others: (exit code, table, output)."""

    def run(misbehaviour="pass", config="''", label="'Mine'", more=(), supports="None"):
        path = tmp_path / "mine.py"
        text = PLUGIN.format(misbehaviour=misbehaviour, config=config, label=label)
        path.write_text(text + f"    supports=lambda problem: {supports},\n)\n")
        plugin = ("--provider-path", path, "--provider", "mine")
        names = ("--provider", "greedy", *plugin, "--provider", "matmul_only")
        code, out, err = fsbench("run", *TINY, *names, "--out", "x", *more)
        assert "Traceback" not in out + err
        table = pd.read_csv(tmp_path / "x" / "results.csv", keep_default_na=False)
        return code, table.set_index(["provider", "b"]), out

    return run


@pytest.mark.parametrize(
    ("misbehaviour", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its process was ended by SIGSEGV"),
        ("os._exit(0)", "its process exited with code 0"),
        ("sys.exit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise Odd('today')", "Odd: today"),
        ("raise Speechless", "Speechless: (no text: str() raised ValueError)"),
        ("raise ValueError('\\udcff')", "ValueError: \\udcff"),
    ],
)
def test_a_cell_that_ends_its_process_has_a_reason_and_the_rest_goes_on(
    measured, fsbench, tmp_path, misbehaviour, reason
):
    code, table, _ = measured(misbehaviour)
    assert code == 3
    failed = table.loc[("mine", 3)]
    assert (failed.status, failed.reason, int(failed.n_samples)) == ("error", reason, 2)
    others = table.drop(("mine", 3))
    assert set(others.status) == {"ok"} and set(others.n_samples.astype(int)) == {4}
    # It is tried again, which measures the rest of what it has, and costs nothing else.
    before = {r.cell: r.rounds for r in read_records(tmp_path / "x") if r.status == "ok"}
    assert fsbench("run", "--resume", "x")[0] in (0, 3)
    after = {r.cell: r.rounds for r in read_records(tmp_path / "x")}
    assert {one: after[one] for one in before} == before


@pytest.mark.full
def test_a_cell_that_hangs_is_ended(measured):
    code, table, _ = measured("time.sleep(10000)", more=("--timeout", "30"))
    assert code == 3
    assert table.loc[("mine", 3)].status == "timeout" and "30 s" in table.loc[("mine", 3)].reason
    assert set(table.drop(("mine", 3)).status) == {"ok"}


def test_a_run_that_measured_nothing_does_not_end_well(fsbench, tmp_path):
    path = tmp_path / "mine.py"
    text = PLUGIN.format(misbehaviour="pass", config="''", label="'Mine'") + ")"
    path.write_text(text.replace("steps = 0", "steps = os._exit(0)"))
    options = ["--provider-path", path, "--provider", "mine", "--out", "x"]
    assert fsbench("run", *TINY, *options)[0] == 3
    assert {record.reason for record in read_records(tmp_path / "x")} == {
        "its process exited with code 0"
    }


@pytest.mark.parametrize("supports", ["os._exit(0)", "sys.exit(0)"])
def test_being_asked_what_it_supports_may_end_the_process(measured, supports):
    code, table, _ = measured(supports=f"{supports} if problem.B == 3 else None")
    assert code == 3
    assert table.loc["mine", 3].status == "error"
    assert set(table.drop(("mine", 3)).status) == {"ok"}


def test_one_that_ends_the_process_whatever_it_is_asked_cannot_be_used(measured):
    _, table, _ = measured(supports="os._exit(0)")
    assert set(table.loc["mine"].status) == {"unavailable"}
    assert set(table.drop("mine", level=0).status) == {"ok"}


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


def test_a_sampler_is_verified_once_whatever_ends_the_process(fsbench, tmp_path):
    """Its own file counts how often it is asked for what only the battery asks for."""
    path = tmp_path / "mine.py"
    text = PLUGIN.format(misbehaviour="os._exit(1)", config="''", label="'Mine'") + ")"
    count = f"open({str(tmp_path / 'asked')!r}, 'a').write(f'{{problem.V}} ')"
    path.write_text(text.replace("    steps = 0\n", f"    steps = 0\n    {count}\n"))
    options = [option for option in TINY if option != "--no-check"]
    names = ["--provider-path", path, "--provider", "mine"]
    assert fsbench("run", *options, *names, "--batch", "3,1,2", "--out", "x")[0] == 3
    asked = (tmp_path / "asked").read_text().split()
    battery = [V for V in asked if V != "50"]
    assert asked.count("50") == 3 and len(battery) > 0
    assert {r.status for r in read_records(tmp_path / "x")} == {"ok", "error"}
    (tmp_path / "asked").unlink()
    path.write_text(path.read_text().replace("os._exit(1)", "pass"))
    assert fsbench("run", *options, *names, "--batch", "1", "--out", "y")[0] == 0
    assert [V for V in (tmp_path / "asked").read_text().split() if V != "50"] == battery
