"""`fsbench verify`: its verdicts, its table and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from tree import newest

from fsbench import cli, discover
from fsbench.machine.packages import package_version
from fsbench.records.lines import read_lines


@pytest.fixture
def fsbench(monkeypatch, capsys, effort):
    effort("gate", fit_draws=2**13)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def call(*arguments, command="verify"):
        monkeypatch.setattr(sys, "argv", ["fsbench", command, *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    return call


@pytest.fixture
def sampler(plugin):
    """Write a sampler; return the options that name its file and its dtype."""
    return lambda draw, **parts: [*plugin(draw=draw, **parts), "--dtype", "fp32"]


TWO = ("--provider", "greedy", "--provider", "multinomial", "--tier", "gate")


def test_the_record(fsbench, tmp_path):
    """The same lines are printed and appended; the first says where and how."""
    path = tmp_path / "verify.jsonl"
    code, out, err = fsbench(*TWO, "--json", "--output", path)
    assert code == 0 and "multinomial: 0 of 1 checks failed; " in err
    written = [{**json.loads(line)} for line in path.read_text().splitlines()]
    assert all(line.pop("running_crc32") for line in written)
    assert written == [json.loads(line) for line in out.splitlines()]
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


def test_a_slow_check_has_a_heartbeat(fsbench, sampler, monkeypatch):
    """Without a line for HEARTBEAT_S, one names the sampler and the check that runs."""
    monkeypatch.setattr("fsbench.cli.progress.HEARTBEAT_S", 0.1)
    slow = sampler("argmax(1)", launch="time.sleep(0.3 * (step == 1))")
    code, _, err = fsbench(*slow, "--check", "greedy", "--tier", "gate")
    assert code == 0 and "mine: checking greedy\n" in err, err


def test_the_record_is_written_check_by_check(fsbench, monkeypatch, tmp_path):
    """What was judged before a run is killed is not lost; a line cut short is removed."""
    path = tmp_path / "verify.jsonl"

    def killed(entry, device):
        if entry.name == "multinomial":
            raise KeyboardInterrupt
        return entry.provider

    with monkeypatch.context() as patched:
        patched.setattr("fsbench.discover.available", killed)
        code, _, _ = fsbench(*TWO, "--output", path)
    assert code != 0
    *_, last = whole = path.read_text().splitlines()
    assert json.loads(last)["conclusion"].startswith("passed: 1 check")
    path.write_text("\n".join([*whole, last[: len(last) // 2]]))
    assert fsbench(path)[0] == 0
    assert fsbench(*TWO, "--output", path)[0] == 0
    lines = path.read_text().splitlines()
    assert lines[: len(whole)] == whole and len(lines) > len(whole) + 2


@pytest.mark.full
def test_a_full_disk_is_one_line_and_the_record_can_be_continued(fsbench, tmp_path):
    """A limit on file sizes replaces a full disk: a write that crosses it is cut short."""
    path = tmp_path / "verify.jsonl"
    fsbench(*TWO[:2], "--tier", "gate", "--output", path)
    size = path.stat().st_size
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({2 * size - 60},) * 2)"
    code = f"{limit}\nfrom fsbench.cli import main\nmain()"
    arguments = ["verify", *TWO[:2], "--tier", "gate", "--output", str(path)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == f"error: cannot write {path}: File too large"
    assert size < path.stat().st_size <= 2 * size and path.read_bytes().endswith(b"\n")
    assert fsbench(path)[0] == 0
    assert fsbench(*TWO[:2], "--tier", "gate", "--output", path)[0] == 0
    assert len(list(read_lines(path))) == len(path.read_text().splitlines()) > 8


def test_the_table_of_a_run_is_that_of_its_record(fsbench, tmp_path):
    path = tmp_path / "verify.jsonl"
    one = ("--provider", "greedy", "--dtype", "fp16")
    code, out, _ = fsbench(*one, "--output", path)
    assert (code, out) == (0, fsbench(path)[1])
    assert "fp16, T = 1.3 and 0.7" in " ".join(out.split())
    assert out.splitlines()[-1].startswith("greedy passed: 3 checks of ")
    words = out.split()
    assert words.count("ok") == 3 and {"greedy", "edges", "invariance"} <= set(words)
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = fsbench(*TWO)
    assert out.count("verdict") == 1 and out.split().count("ok") == 2


def test_another_file_is_no_record(fsbench, tmp_path):
    (tmp_path / "points.jsonl").write_text('{"setting": {}}')
    code, out, err = fsbench(tmp_path / "points.jsonl")
    assert (code, out) == (2, "")
    assert err.endswith("points.jsonl: expected a record of fsbench verify; got another\n")


def test_one_check_of_the_full_tier(fsbench):
    code, out, _ = fsbench(*TWO[:2], "--tier", "full", "--check", "invariance", "--json")
    assert code == 0
    assert [json.loads(line)["name"] for line in out.splitlines()[2:-1]] == ["invariance"]


@pytest.mark.parametrize(
    ("draw", "kind", "severity"),
    [("argmin(1)", "GREEDY", 5), ("argmax(1)", "EXACT", 1), ("no_such_method()", "GREEDY", 5)],
)
def test_a_failed_check_exits_by_its_severity(fsbench, sampler, draw, kind, severity):
    code, out, _ = fsbench(*sampler(draw, kind=kind, zero=kind == "GREEDY"), "--tier", "gate")
    assert code == severity and "FAILED" in out
    *_, verdict, repeat = out.splitlines()
    assert verdict.startswith("mine rejected: ")
    assert repeat.startswith("again: fsbench verify --provider mine ")


def test_the_table_of_several_samplers_has_a_line_for_each_and_their_failed_checks(
    fsbench, monkeypatch
):
    """Names are whole in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = fsbench(newest("audit"))
    assert code == 1
    rows = [line.split() for line in out.splitlines()]
    assert ["flash_sampling_all_reduce", "clean"] in [row[:2] for row in rows]
    begin = next(i for i, row in enumerate(rows) if row[:2] == ["flashinfer_gumbel", "bias"])
    passed, _, checks, *_ = rows[begin][-5:]  # 9 of 15 checks ok
    assert int(passed) < int(checks)
    assert rows[begin + 1][:2] == ["fit", "FAILED"]


@pytest.mark.parametrize(
    ("options", "expected"), [("", {1.3, 0.7}), ("--temperature 0.25", {0.25})]
)
def test_two_temperatures_are_tested_unless_one_is_given(
    fsbench, sampler, tmp_path, options, expected
):
    log = tmp_path / "asked"
    noted = f'open(r"{log}", "a").write(f"{{problem.temperature}} ")'
    arguments = sampler("argmax(1)", kind="EXACT", zero=False, build=noted)
    fsbench(*arguments, *options.split(), "--check", "fit", "--check", "tiles")
    assert set(map(float, log.read_text().split())) == expected


def test_what_cannot_be_checked_is_said_and_is_no_failure(fsbench, monkeypatch, plugin):
    names = ("multinomial", "matmul_only", "weight_stream", "mine")
    samplers = discover.discover
    monkeypatch.setattr(discover, "discover", lambda paths: {n: samplers(paths)[n] for n in names})
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
def test_mistakes_are_one_line(fsbench, plugin, arguments, code, line):
    exit_code, out, err = fsbench(*arguments.split())
    assert (exit_code, out) == (code, "")
    assert err.startswith(f"error: {line}") and len(err.splitlines()) == 1
    if "temperature" in arguments:
        code, _, err = fsbench(*plugin(), "--dtype", "bf16")
        assert (code, err) == (2, "error: mine: takes fp32, not bf16\n")
