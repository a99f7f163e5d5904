"""`fsbench verify`: does a sampler draw what it should?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fsbench.cli.devices import device_to_use
from fsbench.errors import InvalidArgument, ProviderUnavailable, UnsupportedProblem, one_line
from fsbench.provider import Kind, Provider

if TYPE_CHECKING:
    from rich.table import Table


def verify(
    provider: Annotated[
        list[str] | None,
        typer.Option(help="A sampler; may be repeated. Default: all that can run here."),
    ] = None,
    provider_path: Annotated[
        list[Path] | None, typer.Option(help="A .py file that defines PROVIDER; may be repeated.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    temperature: Annotated[
        float, typer.Option(help="Temperature > 0 of the sampled checks.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check samplers against the oracle, greedy decoding and the softmax itself.

    oracle: the very token the documented noise gives. fit: a G-test with no token left out, and
    the error of probabilities that it would have found. Exit code 1 if a check failed.
    """
    from rich.console import Console

    from fsbench.discover import available, discover, select
    from fsbench.problem import Problem
    from fsbench.verify import verify as run_checks
    from fsbench.verify.checks import Setting

    device = device_to_use(device)
    Problem(1, 1, 1, dtype, temperature, device)  # names a wrong dtype or temperature
    if temperature == 0:
        raise InvalidArgument("--temperature: expected a number > 0 (greedy is always checked)")
    found = discover(provider_path or [])
    chosen = select(found, provider) if provider else list(found.values())
    records: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for entry in chosen:
        try:
            sampler = available(entry, device)
            _require_checkable(sampler, dtype)
            for check in run_checks(sampler, Setting(device, dtype, temperature)):
                records.append({"provider": sampler.name, **asdict(check)})
        except (ProviderUnavailable, UnsupportedProblem) as error:
            if provider:  # it was asked for by name
                raise
            skipped[entry.name] = one_line(error)
    if as_json:
        print(json.dumps(records, indent=2))
    else:
        console = Console(highlight=False)
        console.print(_table(f"{device}, {dtype}, T = {temperature:g}", records))
        for reason in skipped.values():
            console.print(f"not checked: {reason}", markup=False)
    if not records:
        raise UnsupportedProblem("verify: no sampler can be checked here; `fsbench list` says why")
    if not all(record["passed"] for record in records):
        raise typer.Exit(1)


def _require_checkable(sampler: Provider, dtype: str) -> None:
    if sampler.kind is Kind.LOWER_BOUND:
        raise UnsupportedProblem(f"{sampler.name}: is a lower bound, not a sampler")
    if dtype not in sampler.capabilities.dtypes:
        able = ", ".join(sampler.capabilities.dtypes)
        raise UnsupportedProblem(f"{sampler.name}: takes {able}, not {dtype}")


def _table(title: str, records: list[dict[str, Any]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=title, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for column in ("provider", "check", "verdict", "p", "finds bias of", "detail"):
        table.add_column(column, overflow="fold")
    for record in records:
        table.add_row(
            record["provider"],
            record["name"],
            "ok" if record["passed"] else "FAILED",
            "" if record["p_value"] is None else f"{record['p_value']:.2g}",
            "" if record["detects"] is None else f"{record['detects']:.1%} rms",
            escape(record["detail"]),
        )
    return table
