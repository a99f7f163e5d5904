"""`fsbench verify`: check samplers and what they claim."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

import fsbench
from fsbench.cli.devices import device_to_use
from fsbench.cli.options import (
    FILE,
    PATH,
    WORD,
    Device,
    Dtype,
    Json,
    ProviderPath,
    Weights,
    argument,
    number,
    option,
)
from fsbench.cli.progress import Heartbeat
from fsbench.cli.tables import plain_table
from fsbench.errors import (
    InvalidArgument,
    ProviderUnavailable,
    ResultsError,
    UnsupportedProblem,
    one_line,
)
from fsbench.machine.packages import versions
from fsbench.provider import Kind, Provider
from fsbench.records.lines import Lines

if TYPE_CHECKING:
    from rich.table import Table

    from fsbench.discover import Found
    from fsbench.report.audit import Audited
    from fsbench.verify.check import Check

SCHEMA = 2
"""Version of the record that --json prints and --output writes."""

Record = Callable[[dict[str, Any]], None]


def verify(
    records: Annotated[
        list[Path] | None,
        argument("RECORDS", PATH, "Records of verify, or folders of them, instead of a new run."),
    ] = None,
    provider: Annotated[
        list[str] | None,
        option("--provider", WORD, "A sampler; may be repeated. Default: all that can run here."),
    ] = None,
    provider_path: ProviderPath = None,
    tier: Annotated[
        str,
        option(
            "--tier",
            WORD,
            "gate: the checks that `run` makes before timing. ci: every check, in seconds. "
            "full: with enough draws for a claim of exactness.",
        ),
    ] = "ci",
    check: Annotated[
        list[str] | None,
        option("--check", WORD, "Run only this check, such as tail; may be repeated."),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "bf16",
    weights: Weights = None,
    temperature: Annotated[
        list[float] | None,
        option(
            "--temperature",
            number(0, above=True),
            "Temperature > 0 of the sampled checks; given twice, each has about half of them. "
            "Default: 1.3 and 0.7.",
        ),
    ] = None,
    as_json: Json = False,
    output: Annotated[
        Path | None,
        option("--output", FILE, "Append the record, a line of JSON for each check, to this file."),
    ] = None,
) -> None:
    """Check samplers for correctness; each check reports how large an error it would detect.

    Checks compare tokens with the reference, if a sampler follows the documented
    noise; they test edge shapes, filters, and that a token does not depend on other
    rows; the distribution of one row, including its far tail; and the independence
    of rows, steps, seeds and samples. docs/design/exactness.md lists the errors that
    each check detects. A correct sampler fails with probability 1e-6; seeds are fixed.

    Verdicts: ok; not exact, for a sampler that stays within the deviation that it
    declares; FAILED. The table has all checks of one sampler; of several, a line
    for each, with the worst that was found (clean, declared, bias or defect), and
    its checks that are not ok. A sentence per sampler follows: passed, or rejected
    and why; then the commands that repeat the failed checks.

    Exit code 0 if all samplers passed or stayed within declared deviations, 1 for a
    bias, 5 for a defect, 4 if a sampler given by --provider cannot run here.
    """
    from rich.console import Console

    from fsbench.records.verdicts import read_verdicts
    from fsbench.report.audit import EXIT_CODES, audited, worst
    from fsbench.verify.check import TEMPERATURES

    write = partial(print, flush=True) if as_json else None
    lines: list[dict[str, Any]] = []
    if records:
        for line in read_verdicts(records):
            lines.append(line)
            if write:
                write(json.dumps(line))
        if not lines:
            raise ResultsError("RECORDS: expected records of fsbench verify; got none")
    else:
        activity = "importing torch"

        def begin(sampler: str, check: str) -> None:
            nonlocal activity
            activity = f"{sampler}: checking {check}"

        show = partial(print, file=sys.stderr, flush=True)
        with recorder(output, write) as written, Heartbeat(show, lambda: activity) as heartbeat:
            from fsbench.discover import discover, select

            found = discover(provider_path or [])

            def record(line: dict[str, Any]) -> None:
                lines.append(line)
                written(line)

            for name, checks, seconds in judged(
                select(found, provider) if provider else found.values(),
                named=bool(provider),
                device=device_to_use(device),
                dtype=dtype,
                weights=weights or "",
                temperatures=temperature or [*TEMPERATURES],
                tier=tier,
                only=check or (),
                record=record,
                begin=begin,
            ):
                failed = sum(not each.passed for each in checks)
                heartbeat.print(f"{name}: {failed} of {len(checks)} checks failed; {seconds:.0f} s")
    samplers, skipped = audited(lines)
    console = Console(highlight=False, stderr=as_json)
    if not as_json:
        for why in skipped.values():
            console.print(f"not checked: {why}", markup=False)
        console.print(_table(samplers))
    for line in lines:
        if "conclusion" in line:
            sentence = f"{line['provider']} {line['conclusion']}."
            console.print(sentence, markup=False, soft_wrap=True)
    for finding in (found for each in samplers for found in each.findings):
        if finding.severity != "declared":
            console.print(f"again: {finding.command}", markup=False, soft_wrap=True)
    if code := EXIT_CODES[worst(samplers)]:
        raise typer.Exit(code)


def _table(samplers: Collection[Audited]) -> Table:
    """Return a table of one sampler's checks; or of several samplers, with checks that are not ok.

    If there are several, each has a line above its checks.
    """
    title = "; ".join(dict.fromkeys(each.on for each in samplers))
    table = plain_table(title, title_justify="center", padding=(0, 1, 0, 0))
    several = len(samplers) > 1
    table.add_column("sampler, check" if several else "check", no_wrap=True)
    for column in ("verdict", "draws", "p", "seen", "would find")[: 4 if several else 5]:
        table.add_column(column, overflow="fold")
    for each in samplers:
        shown = [line for line in each.lines if not several or line["verdict"] != "ok"]
        if several:
            passed = f"{each.checks - len(shown)} of {each.checks} checks ok"
            table.add_row(each.sampler, each.severity, _short(each.draws), "", passed)
        for line in shown:
            cells = [
                ("  " if several else "") + line["name"],
                line["verdict"],
                _short(line["draws"]),
                "" if line["p_value"] is None else f"{line['p_value']:.2g}",
                escape(line["detail"]),
                escape(line.get("detects") or ""),
            ]
            table.add_row(*cells[: len(table.columns)])
    return table


def _short(draws: int) -> str:
    return str(draws) if draws < 10**6 else f"{draws:.1e}"


@contextmanager
def recorder(output: Path | None, write: Callable[[str], object] | None = None) -> Iterator[Record]:
    """Provide a function that passes a line to `write` and appends it to the file at once.

    Raises:
        ResultsError: the file cannot be written, or has other content.
    """
    with closing(Lines.open(output)) if output else nullcontext() as lines:

        def record(line: dict[str, Any]) -> None:
            if write is not None:
                write(json.dumps(line))
            if lines is not None:
                lines.append(line)

        yield record


def judged(
    chosen: Iterable[Found],
    *,
    named: bool,
    device: str,
    dtype: str,
    weights: str = "",
    temperatures: list[float],
    tier: str,
    only: Collection[str] = (),
    record: Record,
    begin: Callable[[str, str], None] = lambda sampler, check: None,
) -> Iterator[tuple[str, list[Check], float]]:
    """Yield each sampler with its checks, and the seconds that they took.

    Args:
        named: a sampler that cannot be checked is an error; otherwise a line says why.
        record: called with every line of the record.
        begin: called with the sampler and the check, before each check.
    """
    import torch

    from fsbench.discover import available
    from fsbench.machine.environment import environment
    from fsbench.verify import verify as run_checks
    from fsbench.verify.battery import TIERS, require_names
    from fsbench.verify.check import Setting, conclusion

    if device == "cpu":
        # The operations are small, and waiting threads cost more than they contribute: on two busy
        # cores, all checks of a sampler took 13 s with one thread, 62 s with two.
        torch.set_num_threads(1)
    if len(temperatures) > 2:
        raise InvalidArgument(f"--temperature: expected one or two; got {len(temperatures)}")
    require_names("--tier", [tier], TIERS)
    require_names("--check", only)
    settings = {"tier": tier, "dtype": dtype, "weights": weights, "temperatures": temperatures}
    record({"schema": SCHEMA, "environment": environment(device, sys.argv), "setting": settings})
    first, *second = temperatures
    setting = Setting(device, dtype, first, False, second[0] if second else None, weights)
    is_any_checked = False
    for entry in chosen:
        checks: list[Check] = []
        began = since = time.monotonic()
        try:
            sampler = available(entry, device)
            _require_checkable(sampler, dtype)
            record({"provider": entry.name, **_presented(entry, sampler)})
            for done in run_checks(sampler, setting, tier, only, partial(begin, entry.name)):
                checks.append(done)
                now = time.monotonic()
                took = {"verdict": done.verdict, "seconds": round(now - since, 3)}
                record({"provider": sampler.name, **took, **asdict(done)})
                since = now
        except (ProviderUnavailable, UnsupportedProblem) as error:
            if named:
                raise
            record({"provider": entry.name, "skipped": one_line(error)})
        if checks:
            is_any_checked = True
            record({"provider": entry.name, "conclusion": conclusion(checks)})
            yield entry.name, checks, since - began
    if not is_any_checked:
        raise UnsupportedProblem("verify: no sampler can be checked here; `fsbench list` says why")


def _presented(entry: Found, sampler: Provider) -> dict[str, Any]:
    """Return the source of a sampler, the versions of its packages, and its claims."""
    able = sampler.capabilities
    package = f"fsbench {fsbench.__version__}"
    if ".kernels." not in entry.source:
        package = versions(sampler.requires or ("torch",))
    claims = {f.name: value for f in fields(able) if (value := getattr(able, f.name)) != f.default}
    return {"source": entry.source, "package": package, "claims": claims}


def _require_checkable(sampler: Provider, dtype: str) -> None:
    if sampler.kind is Kind.LOWER_BOUND:
        raise UnsupportedProblem(f"{sampler.name}: is a lower bound, not a sampler")
    if dtype not in sampler.capabilities.dtypes:
        able = ", ".join(sampler.capabilities.dtypes)
        raise UnsupportedProblem(f"{sampler.name}: takes {able}, not {dtype}")
