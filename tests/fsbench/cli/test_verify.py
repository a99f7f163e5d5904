"""`fsbench verify`: its verdicts, its table and its exit codes."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from fsbench import cli
from fsbench.machine.packages import package_version


@pytest.fixture
def fsbench(monkeypatch, capsys, effort):
    effort("gate", fit_draws=2**13)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fsbench", "verify", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    return call


@pytest.fixture
def mine(plugin):
    """Writes a sampler; returns the options of its file and of what it can do."""
    return lambda draw, **parts: [*plugin(draw=draw, **parts), "--dtype", "fp32"]


TWO = ("--provider", "greedy", "--provider", "multinomial", "--tier", "gate")


def test_the_record(fsbench, tmp_path):
    """The same lines are printed and appended; the first says where and how."""
    path = tmp_path / "verify.jsonl"
    path.write_text("before\n")
    code, out, _ = fsbench(*TWO, "--json", "--output", path)
    assert code == 0
    assert path.read_text() == "before\n" + out
    first, *rows = map(json.loads, out.splitlines())
    assert first["schema"] == 2 and first["environment"]["argv"][:2] == ["fsbench", "verify"]
    setting = {"tier": "gate", "dtype": "bf16", "weights": "", "temperatures": [1.3, 0.7]}
    assert first["setting"] == setting
    first, greedy, first_end, second, fit, second_end = rows
    for row, name in ((first, "greedy"), (second, "multinomial")):
        assert row["provider"] == name and row["source"] == f"fsbench.baselines.{name}"
        assert row["package"] == f"torch {package_version('torch')}"
        assert row["claims"]["devices"] == ["cuda", "cpu"] and "noise" not in row["claims"]
    assert [(row["provider"], row["name"], row["verdict"]) for row in (greedy, fit)] == [
        ("greedy", "greedy", "ok"),
        ("multinomial", "fit", "ok"),
    ]
    assert 2**13 <= fit["draws"] < 2**13 + 300 and 0 < fit["p_value"] <= 1
    assert fit["detects"].endswith("rms error of probabilities")
    for row, name in ((first_end, "greedy"), (second_end, "multinomial")):
        assert row["provider"] == name and row["conclusion"].startswith("passed: 1 check of ")


def test_the_record_is_written_check_by_check(fsbench, monkeypatch, tmp_path):
    """What was judged before a run is killed is not lost."""
    path = tmp_path / "verify.jsonl"
    monkeypatch.setattr(cli.judging, "_require_checkable", _killed_at("multinomial"))
    code, _, _ = fsbench(*TWO, "--output", path)
    assert code != 0
    assert json.loads(path.read_text().splitlines()[-1])["provider"] == "greedy"


def _killed_at(name):
    def check(sampler, dtype):
        if sampler.name == name:
            raise KeyboardInterrupt

    return check


def test_the_table(fsbench):
    code, out, _ = fsbench("--provider", "greedy", "--dtype", "fp16")
    assert code == 0
    assert "greedy: cpu, fp16, T = 1.3 and 0.7" in out
    assert out.splitlines()[-1].startswith("greedy passed: 3 checks of ")
    words = out.split()
    assert words.count("ok") == 3 and {"greedy", "edges", "invariance"} <= set(words)
    assert max(map(len, out.splitlines())) <= 80


def test_one_check_of_the_full_tier(fsbench):
    code, out, _ = fsbench(*TWO[:2], "--tier", "full", "--check", "invariance", "--json")
    assert code == 0
    assert [json.loads(line)["name"] for line in out.splitlines()[2:-1]] == ["invariance"]


@pytest.mark.parametrize(
    ("draw", "kind"),
    [("argmin(1)", "GREEDY"), ("argmax(1)", "EXACT"), ("no_such_method()", "GREEDY")],
)
def test_a_failed_check_exits_1(fsbench, mine, draw, kind):
    code, out, _ = fsbench(*mine(draw, kind=kind), "--tier", "gate")
    assert code == 1 and "FAILED" in out
    assert out.splitlines()[-1].startswith("mine rejected: ")


@pytest.mark.parametrize(("given", "seen"), [("", {1.3, 0.7}), ("--temperature 0.25", {0.25})])
def test_two_temperatures_are_tested_unless_one_is_given(fsbench, mine, tmp_path, given, seen):
    log = tmp_path / "asked"
    noted = f'open(r"{log}", "a").write(f"{{problem.temperature}} ")'
    arguments = mine("argmax(1)", kind="EXACT", zero=False, build=noted)
    fsbench(*arguments, *given.split(), "--check", "fit", "--check", "tiles")
    assert set(map(float, log.read_text().split())) == seen


def test_what_cannot_be_checked_is_said_and_is_no_failure(fsbench, monkeypatch, plugin):
    monkeypatch.setattr("fsbench.discover._PACKAGES", ("fsbench.baselines",))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    code, out, _ = fsbench(*plugin()[:2], "--dtype", "bf16", "--tier", "gate")
    assert code == 0
    assert "not checked: matmul_only: is a lower bound, not a sampler" in out
    assert "not checked: mine: takes fp32, not bf16" in out
    assert "not checked: weight_stream: runs on cuda only" in out
    assert "multinomial" in out


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ("--output no/such/folder", 2, "cannot write no/such/folder: No such file"),
        (3 * "--temperature 1 ", 2, "--temperature: expected one or two; got 3"),
        ("--check filters", 2, "--check: filters: masks and biases are checked by `masks`"),
        (
            "--provider greedy --check masks",
            2,
            "greedy: --check masks does not apply to it in the tier ci; these do: greedy, edges",
        ),
        ("--device cuda", 4, "--device cuda: torch sees no CUDA device"),
        ("--provider matmul_only", 2, "matmul_only: is a lower bound, not a sampler"),
        ("--provider weight_stream", 4, "weight_stream: runs on cuda only"),
    ],
)
def test_mistakes_are_one_line(fsbench, arguments, code, line):
    given, out, err = fsbench(*arguments.split())
    assert (given, out) == (code, "")
    assert err.startswith(f"error: {line}") and len(err.splitlines()) == 1


def test_a_named_sampler_that_takes_another_dtype_is_a_mistake(fsbench, plugin):
    code, _, err = fsbench(*plugin(), "--dtype", "bf16")
    assert (code, err) == (2, "error: mine: takes fp32, not bf16\n")
