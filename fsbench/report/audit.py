"""The audit: claims of samplers, and the findings in the records of `fsbench verify`.

A finding is a `defect` if a few launches show it: a forbidden token, a crash, wrong noise or a
wrong log-probability. It is a `bias` if only statistics show it: a wrong distribution, shared
noise. It is `declared` if the sampler declares the deviation and stays within it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fsbench.errors import ExitCode
from fsbench.records.sheet import escaped

EXIT_CODES = {
    "clean": ExitCode.OK,
    "declared": ExitCode.OK,
    "bias": ExitCode.CHECK_FAILED,
    "defect": ExitCode.DEFECT,
}
"""Exit code of each severity, from the mildest to the worst."""

HEADINGS = ("sampler", "package", "on", "claims", "found", "by", "how much", "shown by")
"""Columns of the table."""

_Line = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """A check that did not pass.

    Attributes:
        seen: detail that the check reported.
        seconds: duration of the check.
        command: command that repeats the check.
    """

    check: str
    severity: str
    seen: str
    seconds: float
    command: str


@dataclass(frozen=True)
class Audited:
    """One version of a sampler in one setting. lines: its record, one line per check."""

    sampler: str
    package: str
    on: str
    claims: str
    findings: tuple[Finding, ...]
    lines: tuple[_Line, ...]

    @property
    def checks(self) -> int:
        """Number of checks of the sampler."""
        return len(self.lines)

    @property
    def draws(self) -> int:
        """Number of tokens drawn in all checks."""
        return sum(line["draws"] for line in self.lines)

    @property
    def severity(self) -> str:
        """The worst severity of its findings; `clean` without findings."""
        return max((each.severity for each in self.findings), key=_RANKS.index, default="clean")

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield a row of the table per finding, or one `clean` row."""
        head = (self.sampler, self.package, self.on, self.claims)
        for finding in self.findings:
            command = f"{finding.command} ({finding.seconds:.0f} s)"
            yield (*head, finding.severity, finding.check, finding.seen, command)
            head = "", "", "", ""
        if not self.findings:
            yield (*head, "clean", f"{self.checks} checks", f"{self.draws:.2g} draws", "")


_RANKS = list(EXIT_CODES)


def audited(lines: Iterable[_Line]) -> tuple[list[Audited], dict[str, str]]:
    """Return (samplers, the worst first; reason by name of those that were skipped).

    If a check has several lines, the last one counts.
    """
    checks: dict[tuple[str, ...], dict[str, tuple[_Line, str]]] = {}
    skipped: dict[str, str] = {}
    options = on = ""
    presented: _Line = {}
    for line in lines:
        name = str(line.get("provider", ""))
        if "setting" in line:
            options, on, presented = _command(line), _place(line), {}
        elif "package" in line:
            presented = line
        elif "skipped" in line:
            skipped[name] = line["skipped"]
        elif "verdict" in line:
            header = presented if presented.get("provider") == name else {}
            source = str(header.get("source", ""))
            path = f" --provider-path {shlex.quote(source)}" if source.endswith(".py") else ""
            command = f"fsbench verify --provider {shlex.quote(name)}{path} {options}"
            claims = _claims(header.get("claims", {}))
            key = (name, header.get("package", "not recorded"), on, claims, source)
            checks.setdefault(key, {})[line["name"]] = line, command
    samplers = [_of_checks(key, list(each.values())) for key, each in checks.items()]
    samplers.sort(key=lambda each: (-_RANKS.index(each.severity), each.sampler, each.package))
    for name, *_ in checks:
        skipped.pop(name, None)
    return samplers, skipped


def _of_checks(key: Sequence[str], checks: Sequence[tuple[_Line, str]]) -> Audited:
    findings = [
        Finding(
            line["name"],
            _severity(line),
            line["detail"] + (f"; total variation < {line['bound']:.2g}" if line["bound"] else ""),
            line["seconds"],
            f"{command} --check {shlex.quote(line['name'])}",
        )
        for line, command in checks
        if line["verdict"] != "ok"
    ]
    findings.sort(key=lambda each: -_RANKS.index(each.severity))
    sampler, package, on, claims, _ = key
    lines = tuple(line for line, _ in checks)
    return Audited(sampler, package, on, claims, tuple(findings), lines)


def _severity(line: _Line) -> str:
    if line["passed"]:
        return "declared"
    return "defect" if line["p_value"] is None else "bias"


def _temperatures(setting: _Line) -> list[str]:
    values = setting.get("temperatures") or [setting["temperature"]]  # one, before 0.2.0
    return [f"{T:g}" for T in values]


def _place(line: _Line) -> str:
    environment, setting = line["environment"], line["setting"]
    machine = environment["gpu"] or f"{environment['device']}, {environment['cpu']}"
    head = f", {weights} head" if (weights := setting.get("weights")) else ""
    return f"{machine}, {setting['dtype']}{head}, T = {' and '.join(_temperatures(setting))}"


def _command(line: _Line) -> str:
    setting, device = line["setting"], line["environment"]["device"]
    options = [f"--tier {setting['tier']} --device {device} --dtype {setting['dtype']}"]
    options += [f"--weights {weights}"] if (weights := setting.get("weights")) else []
    return " ".join(options + [f"--temperature {T}" for T in _temperatures(setting)])


def _claims(claims: _Line) -> str:
    """Return the capabilities that differ from the default, except devices, dtypes and form."""
    if not claims:
        return "not recorded"
    words = []
    for name, value in claims.items():
        if name not in ("devices", "dtypes", "graph_safe", "host_sync_free", "fused"):
            text = ", ".join(value) if isinstance(value, list) else value
            words.append(name.replace("_", " ") + (f": {text}" if value is not True else ""))
    return "; ".join(words) or "exact"


def markdown(samplers: Iterable[Audited], skipped: dict[str, str]) -> str:
    """Return the table as Markdown, followed by the reasons of skipped samplers."""
    rows: list[Sequence[str]] = [HEADINGS, ["---"] * len(HEADINGS)]
    for each in samplers:
        for name, *cells, shown in each.rows():
            command, seconds, took = shown.rpartition(" (")
            rows.append([_code(name), *map(escaped, cells), _code(command) + seconds + took])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", *(f"- {escaped(why)}" for why in skipped.values())] if skipped else []
    return "\n".join(lines)


def _code(text: str) -> str:
    """Return text as code; escaped text if it would end the code, its cell or its line."""
    return f"`{text}`" if text and not set(text) & set("`|\n") else escaped(text)


def worst(samplers: Iterable[Audited]) -> str:
    """Return the worst severity of all samplers."""
    return max((each.severity for each in samplers), key=_RANKS.index, default="clean")
