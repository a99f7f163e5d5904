"""`fsbench verify`: does a sampler draw what it should?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fsbench.cli.run import device_to_use


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
    temperature: Annotated[float, typer.Option(help="Temperature > 0 of the sampled checks.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check samplers against the oracle, greedy decoding and the softmax itself.

    oracle: the very token the documented noise gives. fit: a G-test with no token left out, and
    the error of probabilities that it would have found. Exit code 1 if a check failed.
    """
    from rich.console import Console
    from rich.table import Table

    from fsbench.discover import available, discover, select
    from fsbench.problem import Problem
    from fsbench.provider import Kind
    from fsbench.verify import verify as run_checks
    from fsbench.verify.checks import Setting

    device = device_to_use(device)
    Problem(1, 1, 1, dtype, temperature, device)  # names a wrong dtype or temperature
    found = discover(provider_path or [])
    if provider:
        chosen = [available(entry, device) for entry in select(found, provider)]
    else:
        chosen = [available(e, device) for e in found.values() if not e.unavailable_reason(device)]
    table = Table(title=f"verify on {device}, {dtype}, T = {temperature:g}")
    for column in ("provider", "check", "verdict", "draws", "p", "finds rms bias of", "detail"):
        table.add_column(column, overflow="fold")
    records = []
    for sampler in chosen:
        if sampler.kind is Kind.LOWER_BOUND or dtype not in sampler.capabilities.dtypes:
            continue
        for check in run_checks(sampler, Setting(device, dtype, temperature)):
            records.append({"provider": sampler.name, **asdict(check)})
            table.add_row(
                sampler.name,
                check.name,
                "ok" if check.passed else "FAILED",
                str(check.draws),
                "" if check.p_value is None else f"{check.p_value:.3g}",
                "" if check.detects is None else f"{check.detects:.2%}",
                check.detail,
            )
    if as_json:
        print(json.dumps(records, indent=2))
    else:
        Console().print(table)
    if not all(record["passed"] for record in records):
        raise typer.Exit(1)
