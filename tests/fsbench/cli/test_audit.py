"""`fsbench audit`: one run or some records, one table, and an exit code by severity."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from fsbench.cli import app


def audit(*arguments: object):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


@pytest.fixture
def few(effort):
    effort("gate", fit_draws=2**13)


@pytest.mark.parametrize(("draw", "code"), [("argmax(1)", 0), ("argmin(1)", 5)])
def test_a_run_is_recorded_told_and_read_again(plugin, tmp_path, few, draw, code):
    record = tmp_path / "audit.jsonl"
    options = [*plugin(draw=draw, kind="GREEDY"), "--dtype", "fp32", "--device", "cpu"]
    done = audit(*options, "--tier", "gate", "--output", record)
    assert done.exit_code == code, done.output
    assert done.stderr.startswith(f"mine: {code // 5} of 1 checks failed; ")
    again = audit(record)
    assert (again.exit_code, again.stdout) == (code, done.stdout)
    told = json.loads(audit(record, "--json").stdout)
    assert [each["severity"] for each in told["samplers"]] == ["defect" if code else "clean"]
    setting = json.loads(record.read_text().splitlines()[0])["setting"]
    told = {"tier": "gate", "dtype": "fp32", "weights": "", "temperatures": [1.0, 0.6]}
    assert setting == told


def test_a_bias_exits_1(plugin, few):
    options = [*plugin(draw="argmax(1)", kind="EXACT", zero=False), "--dtype", "fp32"]
    done = audit(*options, "--device", "cpu", "--tier", "gate")
    assert done.exit_code == 1 and "| bias | fit |" in done.stdout


def test_another_file_is_no_record(fsbench, tmp_path):
    (tmp_path / "points.jsonl").write_text('{"setting": {}}')
    code, out, err = fsbench("audit", "points.jsonl")
    assert (code, out) == (2, "")
    assert err == "error: points.jsonl: expected a record of fsbench verify; got another\n"
