"""`fsbench verify`: does a sampler draw what it should?"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fsbench.cli.devices import device_to_use
from fsbench.cli.options import FILE, WORD, Device, Dtype, Json, ProviderPath, number, option
from fsbench.cli.tables import plain_table
from fsbench.errors import (
    InvalidArgument,
    ProviderUnavailable,
    UnsupportedProblem,
    one_line,
)
from fsbench.provider import Kind, Provider
from fsbench.records.disk import refusals

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from fsbench.verify.check import Check

SCHEMA = 2
"""Version of the record that --json prints and --output writes."""


def verify(
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
            "gate: what `run` asks before it times. ci: every check, in seconds. "
            "full: with as many draws as a claim of exactness needs.",
        ),
    ] = "ci",
    check: Annotated[
        list[str] | None,
        option("--check", WORD, "Run only this check, such as tail; may be repeated."),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "bf16",
    temperature: Annotated[
        list[float] | None,
        option(
            "--temperature",
            number(0, above=True),
            "Temperature > 0 of the sampled checks; given twice, each has about half of them. "
            "Default: 1 and 0.5.",
        ),
    ] = None,
    as_json: Json = False,
    output: Annotated[
        Path | None,
        option("--output", FILE, "Append the record, a line of JSON for each check, to this file."),
    ] = None,
) -> None:
    """Judge samplers by a battery of tests, each with its power.

    Token by token against the oracle, where a sampler follows the documented
    noise; edge shapes, filters, and what a token must not depend on; the
    distribution of one row, out to its far tail; the independence of rows,
    steps, seeds and samples. docs/exactness.md says what each check sees, and
    what none can. An honest sampler fails with probability 1e-6; seeds are fixed.

    Verdicts: ok; not exact, where a sampler declares that it deviates and keeps
    to that; FAILED. At the end a sentence about each sampler: passed, or rejected
    and why. Exit code 1 if a check failed, 4 if a sampler that was asked for by
    name cannot run here.
    """
    import torch
    from rich.console import Console

    from fsbench.discover import available, discover, select
    from fsbench.machine.environment import environment
    from fsbench.verify import verify as run_checks
    from fsbench.verify.battery import TIERS, require_names
    from fsbench.verify.check import Setting, conclusion

    device = device_to_use(device)
    if device == "cpu":
        # The operations are small, and threads that wait for each other cost more than they do: on
        # two cores that others use as well, one battery took 13 s with one thread, 62 s with two.
        torch.set_num_threads(1)
    temperatures = temperature or [1.0, 0.5]
    if len(temperatures) > 2:
        raise InvalidArgument(f"--temperature: expected one or two; got {len(temperatures)}")
    require_names("--tier", [tier], TIERS)
    require_names("--check", check or [])
    found = discover(provider_path or [])
    chosen = select(found, provider) if provider else list(found.values())
    record = _recorder(as_json, output)
    told = {"tier": tier, "dtype": dtype, "temperatures": temperatures}
    record({"schema": SCHEMA, "environment": environment(device, sys.argv), "setting": told})
    first, *second = temperatures
    setting = Setting(device, dtype, first, second=second[0] if second else None)
    at = " and ".join(f"{T:g}" for T in temperatures)
    conclusions = {}
    console = Console(highlight=False, stderr=as_json)
    verdicts: list[bool] = []
    for entry in chosen:
        checks: list[Check] = []
        began = since = time.monotonic()
        try:
            sampler = available(entry, device)
            _require_checkable(sampler, dtype)
            for done in run_checks(sampler, setting, tier, check or ()):
                checks.append(done)
                now = time.monotonic()
                took = {"verdict": done.verdict, "seconds": round(now - since, 3)}
                record({"provider": sampler.name, **took, **asdict(done)})
                since = now
        except (ProviderUnavailable, UnsupportedProblem) as error:
            if provider:  # it was asked for by name
                raise
            record({"provider": entry.name, "skipped": one_line(error)})
            if not as_json:
                console.print(f"not checked: {one_line(error)}", markup=False)
        if checks and not as_json:
            title = f"{entry.name}: {device}, {dtype}, T = {at}; {since - began:.0f} s"
            console.print(_table(title, checks))
        if checks:
            conclusions[entry.name] = conclusion(checks)
            record({"provider": entry.name, "conclusion": conclusions[entry.name]})
        verdicts += [done.passed for done in checks]
    if not verdicts:
        raise UnsupportedProblem("verify: no sampler can be checked here; `fsbench list` says why")
    for name, sentence in conclusions.items():
        console.print(f"{name} {sentence}.", markup=False, soft_wrap=True)
    if not all(verdicts):
        raise typer.Exit(1)


def _recorder(as_json: bool, output: Path | None) -> Callable[[dict[str, Any]], None]:
    """A function that prints a line of the record, or appends it to the file, or both, at once."""
    if output is not None:
        with refusals("write", output), open(output, "a", encoding="utf-8"):
            pass  # refused now, not after the first sampler

    def record(line: dict[str, Any]) -> None:
        text = json.dumps(line)
        if as_json:
            print(text, flush=True)
        if output is not None:
            with refusals("write", output), open(output, "a", encoding="utf-8") as file:
                file.write(text + "\n")

    return record


def _require_checkable(sampler: Provider, dtype: str) -> None:
    if sampler.kind is Kind.LOWER_BOUND:
        raise UnsupportedProblem(f"{sampler.name}: is a lower bound, not a sampler")
    if dtype not in sampler.capabilities.dtypes:
        able = ", ".join(sampler.capabilities.dtypes)
        raise UnsupportedProblem(f"{sampler.name}: takes {able}, not {dtype}")


def _table(title: str, checks: list[Check]) -> Table:
    table = plain_table(title, title_justify="center", padding=(0, 1, 0, 0))
    for column in ("check", "verdict", "draws", "p", "seen", "would find"):
        table.add_column(column, overflow="fold")
    for done in checks:
        table.add_row(
            done.name,
            done.verdict,
            _short(done.draws),
            "" if done.p_value is None else f"{done.p_value:.2g}",
            escape(done.detail),
            escape(done.detects or ""),
        )
    return table


def _short(draws: int) -> str:
    return str(draws) if draws < 10**6 else f"{draws:.1e}"
