"""Samplers run through the battery one after the other, and the record of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import fsbench
from fsbench.cli.options import FILE, WORD, option
from fsbench.errors import InvalidArgument, ProviderUnavailable, UnsupportedProblem, one_line
from fsbench.machine.packages import versions
from fsbench.provider import Kind, Provider
from fsbench.records.disk import refusals

if TYPE_CHECKING:
    from fsbench.discover import Found
    from fsbench.verify.check import Check

SCHEMA = 2
"""Version of the record that --json prints and --output writes."""

Providers = Annotated[
    list[str] | None,
    option("--provider", WORD, "A sampler; may be repeated. Default: all that can run here."),
]
Tier = Annotated[
    str,
    option(
        "--tier",
        WORD,
        "gate: what `run` asks before it times. ci: every check, in seconds. "
        "full: with as many draws as a claim of exactness needs.",
    ),
]
RecordFile = Annotated[
    Path | None,
    option("--output", FILE, "Append the record, a line of JSON for each check, to this file."),
]

Record = Callable[[dict[str, Any]], None]
Judged = tuple[str, "list[Check]", float]
"""(sampler, its checks, how long they took in seconds)."""


def recorder(output: Path | None, write: Callable[[str], object] | None = None) -> Record:
    """A function that gives a line of the record to `write` and appends it to the file, at once."""
    if output is not None:
        with refusals("write", output), open(output, "a", encoding="utf-8"):
            pass  # refused now, not after the first sampler

    def record(line: dict[str, Any]) -> None:
        text = json.dumps(line)
        if write is not None:
            write(text)
        if output is not None:
            with refusals("write", output), open(output, "a", encoding="utf-8") as file:
                file.write(text + "\n")

    return record


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
    skip: Callable[[str], None],
) -> Iterator[Judged]:
    """Each sampler with its checks, as far as it could be checked; `record` gets every line.

    named: a sampler that cannot be checked is an error; otherwise `skip` is told why.
    """
    import torch

    from fsbench.discover import available
    from fsbench.machine.environment import environment
    from fsbench.verify import verify as run_checks
    from fsbench.verify.battery import TIERS, require_names
    from fsbench.verify.check import Setting, conclusion

    if device == "cpu":
        # The operations are small, and threads that wait for each other cost more than they do: on
        # two cores that others use as well, one battery took 13 s with one thread, 62 s with two.
        torch.set_num_threads(1)
    if len(temperatures) > 2:
        raise InvalidArgument(f"--temperature: expected one or two; got {len(temperatures)}")
    require_names("--tier", [tier], TIERS)
    require_names("--check", only)
    told = {"tier": tier, "dtype": dtype, "weights": weights, "temperatures": temperatures}
    record({"schema": SCHEMA, "environment": environment(device, sys.argv), "setting": told})
    first, *second = temperatures
    setting = Setting(device, dtype, first, False, second[0] if second else None, weights)
    found = False
    for entry in chosen:
        checks: list[Check] = []
        began = since = time.monotonic()
        try:
            sampler = available(entry, device)
            _require_checkable(sampler, dtype)
            record({"provider": entry.name, **_presented(entry, sampler)})
            for done in run_checks(sampler, setting, tier, only):
                checks.append(done)
                now = time.monotonic()
                took = {"verdict": done.verdict, "seconds": round(now - since, 3)}
                record({"provider": sampler.name, **took, **asdict(done)})
                since = now
        except (ProviderUnavailable, UnsupportedProblem) as error:
            if named:  # it was asked for by name
                raise
            record({"provider": entry.name, "skipped": one_line(error)})
            skip(one_line(error))
        if checks:
            found = True
            record({"provider": entry.name, "conclusion": conclusion(checks)})
            yield entry.name, checks, since - began
    if not found:
        raise UnsupportedProblem("verify: no sampler can be checked here; `fsbench list` says why")


def _presented(entry: Found, sampler: Provider) -> dict[str, Any]:
    """Where a sampler comes from, the versions of its packages, and what it claims."""
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
