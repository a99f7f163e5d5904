"""The audit of verify's records: severities, claims, commands, versions."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from planted_bugs import BUGS, KNOWN
from tiers import full

from fsbench.cli.verify import judged
from fsbench.discover import Found
from fsbench.errors import ResultsError
from fsbench.records.verdicts import read_verdicts
from fsbench.report.audit import audited, markdown, worst

SETTING = {
    "environment": {"device": "cpu", "gpu": "", "cpu": "Zen"},
    "setting": {"tier": "ci", "dtype": "fp32", "temperatures": [1.0, 0.6]},
}


def presented(sampler="mine", package="torch 2.13.0", **claims):
    return {"provider": sampler, "source": "fsbench.baselines.x", "package": package,
            "claims": {"devices": ["cpu"], **claims}}  # fmt: skip


def check(name="fit", passed=True, p_value=0.5, deviates=False, sampler="mine", **more):
    verdict = ("not exact" if deviates else "ok") if passed else "FAILED"
    line = {"provider": sampler, "verdict": verdict, "seconds": 1.5, "name": name, "bound": None,
            "passed": passed, "detail": "G = 9", "draws": 100, "p_value": p_value}  # fmt: skip
    return {**line, **more}


@pytest.mark.parametrize(
    ("checks", "severity"),
    [
        ([check()], "clean"),
        ([check(deviates=True), check("tiles")], "declared"),
        ([check(passed=False, p_value=1e-9), check("tail 10", deviates=True)], "bias"),
        ([check(passed=False, p_value=1e-9), check("edges", False, None)], "defect"),
    ],
)
def test_the_worst_finding_is_the_severity(checks, severity):
    (only,), skipped = audited([SETTING, presented(), *checks])
    assert (only.severity, worst([only]), skipped) == (severity, severity, {})
    assert [each.severity for each in only.findings][:1] == [severity] * (severity != "clean")
    assert (only.checks, only.draws) == (len(checks), 100 * len(checks))


def test_a_finding_has_the_command_that_repeats_it():
    failed = check("fit of seeds", False, 1e-9, bound=0.125)
    (only,), _ = audited([SETTING, {**presented(), "source": "/a b/mine.py"}, failed])
    (finding,) = only.findings
    assert shlex.split(finding.command) == [
        *("fsbench", "verify", "--provider", "mine", "--provider-path", "/a b/mine.py"),
        *("--tier", "ci", "--device", "cpu", "--dtype", "fp32"),
        *("--temperature", "1", "--temperature", "0.6", "--check", "fit of seeds"),
    ]
    assert finding.seen == "G = 9; total variation < 0.12" and finding.seconds == 1.5


def test_a_name_is_quoted_in_commands_and_ends_no_cell_of_the_table():
    name = "a|b `c` <d>; rm x"
    samplers, _ = audited([SETTING, presented(name), check(passed=False, sampler=name)])
    (finding,) = samplers[0].findings
    assert shlex.split(finding.command)[:4] == ["fsbench", "verify", "--provider", name]
    *_, row = markdown(samplers, {}).splitlines()
    assert len(re.split(r"(?<!\\)\|", row)) == 2 + 8 and "<d>" not in row
    assert row.startswith(r"| a\|b \`c\` &lt;d>; rm x |")


def test_two_versions_are_two_rows_and_the_last_verdict_counts():
    old, new = presented(package="flashinfer-python 0.6.9"), presented(package="flashinfer 0.7")
    lines = [SETTING, old, check(passed=False), check(), SETTING, new, check(passed=False)]
    samplers, _ = audited(lines)
    assert [(each.package, each.severity) for each in samplers] == [
        ("flashinfer 0.7", "bias"),
        ("flashinfer-python 0.6.9", "clean"),
    ]


def test_claims_are_said_in_words():
    able = {"noise": "group", "filters": ["top_k", "top_p"], "ties": "any", "exact_to_gap": 10.0,
            "excess_beyond_gap": 0.2, "per_request_seed": True}  # fmt: skip
    (only,), _ = audited([SETTING, presented(**able), check()])
    assert only.claims == (
        "noise: group; filters: top_k, top_p; ties: any; exact to gap: 10.0; "
        "excess beyond gap: 0.2; per request seed"
    )


def test_records_without_versions_are_read(tmp_path):
    """Records of version 0.1.0, in a folder with other files."""
    old = {**SETTING, "setting": {"tier": "full", "dtype": "bf16", "temperature": 1.0}}
    text = "\n".join(map(json.dumps, [old, check(), {"provider": "b", "skipped": "b: absent"}]))
    (tmp_path / "verify.jsonl").write_text(text + "\n")
    (tmp_path / "points.jsonl").write_text('{"cell": 1}\n')
    (tmp_path / "cut.jsonl").write_text('{"cell": ')
    samplers, skipped = audited(read_verdicts([tmp_path]))
    assert [(each.sampler, each.package, each.claims) for each in samplers] == [
        ("mine", "not recorded", "not recorded")
    ]
    table = markdown(samplers, skipped)
    assert "| `mine` | not recorded | cpu, Zen, bf16, T = 1 |" in table
    assert table.endswith("\n\n- b: absent")
    with pytest.raises(ResultsError, match="expected a record of fsbench verify"):
        list(read_verdicts([tmp_path / "points.jsonl"]))


@pytest.mark.parametrize("damage", [b"\xff", b"[]", b"{"])
def test_damaged_records_are_named(tmp_path, damage):
    begin = json.dumps(SETTING).encode()
    (tmp_path / "cut.jsonl").write_bytes(begin + b"\n" + damage + b"\n")
    with pytest.raises(ResultsError, match=r"cut\.jsonl:2: "):
        list(read_verdicts([tmp_path]))
    (tmp_path / "cut.jsonl").write_bytes(damage + b"\n" + begin)
    assert list(read_verdicts([tmp_path])) == []  # no record: something else of another tool
    with pytest.raises(ResultsError, match="RECORDS: expected records of fsbench verify; got"):
        list(read_verdicts([tmp_path / "missing"]))


SEVERE = dict.fromkeys(("masks", "truncation", "invariance", "call"), "defect")
QUICK = "a neighbor's top-k changes a token (SGLang 35697)"
IN_CI = [bug if bug == QUICK else full(bug) for bug in sorted(KNOWN & BUGS.keys())]


@pytest.mark.parametrize("bug", IN_CI)
def test_the_audit_finds_what_was_wrong_in_the_field(bug, one_thread):
    sampler, name = BUGS[bug]
    lines = []
    entry = Found(sampler.name, "/bugs.py", sampler)
    list(judged(
        [entry], named=True, device="cpu", dtype="fp32", temperatures=[1.0, 0.6], tier="ci",
        only=[name], record=lines.append,
    ))  # fmt: skip
    (result,), _ = audited(json.loads(json.dumps(lines)))
    assert (result.severity, result.findings[0].check) == (SEVERE.get(name, "bias"), name)
