"""`fsbench list`: samplers, models, presets and GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from fsbench.discover import Found


def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    capabilities: Annotated[
        bool, typer.Option("--capabilities", help="Show what each sampler can do.")
    ] = False,
    provider_path: Annotated[
        list[Path] | None, typer.Option(help="A .py file that defines PROVIDER; may be repeated.")
    ] = None,
) -> None:
    """List samplers (and whether they can run here), models, presets and GPUs. Needs no torch."""
    from fsbench import hardware, iomodel
    from fsbench.discover import discover
    from fsbench.presets import PRESETS
    from fsbench.problem import models

    facts: dict[str, Any] = {
        "providers": [_provider_facts(entry) for entry in discover(provider_path or []).values()],
        "models": [{"name": m.name, "v": m.V, "d": m.D} for m in models().values()],
        "presets": [{"name": name, "summary": p.summary} for name, p in PRESETS.items()],
        "gpus_here": [gpu.name for gpu in hardware.gpus()],
        "gpus_known": sorted(iomodel.gpus()),
    }
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts, capabilities)


def _provider_facts(entry: Found) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": entry.name,
        "label": None,
        "source": entry.source,
        "kind": None,
        "cuda": entry.unavailable_reason("cuda") or "yes",
        "cpu": entry.unavailable_reason("cpu") or "yes",
        "capabilities": {},
        "presets": [],
    }
    if entry.provider is not None:
        able = entry.provider.capabilities
        facts |= {
            "label": entry.provider.label,
            "kind": str(entry.provider.kind),
            "capabilities": {
                "devices": able.devices,
                "dtypes": able.dtypes,
                "noise": able.noise,
                "zero_temperature": able.zero_temperature,
                "fused": able.fused,
                "graph_safe": able.graph_safe,
            },
            "presets": entry.provider.presets,
        }
    return facts


def _print(facts: dict[str, Any], capabilities: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    providers = _table("provider", "kind", "can do" if capabilities else "runs here on")
    for row in facts["providers"]:
        last = _abilities(row) if capabilities else _where(row)
        providers.add_row(row["name"], row["kind"] or "broken", last)
    models = _table("model", "V", "D")
    for row in facts["models"]:
        models.add_row(row["name"], str(row["v"]), str(row["d"]))
    presets = _table("preset", "")
    for row in facts["presets"]:
        presets.add_row(row["name"], row["summary"])
    for table in (providers, models, presets):
        console.print(table)
        console.print()
    console.print(f"GPUs here: {', '.join(facts['gpus_here']) or 'none'}")
    console.print(f"GPUs with known peaks: {', '.join(facts['gpus_known'])}")


def _table(*columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True, justify="right" if column == "V" else "left")
    table.add_column(columns[-1], justify="right" if columns[-1] == "D" else "left")
    return table


def _abilities(row: dict[str, Any]) -> str:
    able = row["capabilities"]
    marks = [
        ("fused", able.get("fused")),
        ("token noise", able.get("noise") == "token"),
        ("T = 0", able.get("zero_temperature")),
        ("graphs", able.get("graph_safe")),
    ]
    return ", ".join([*able.get("dtypes", ()), *(name for name, has in marks if has)])


def _where(row: dict[str, Any]) -> str:
    """'GPU, CPU', or why it runs on neither."""
    places = [name for name, device in (("GPU", "cuda"), ("CPU", "cpu")) if row[device] == "yes"]
    if places:
        return ", ".join(places)
    # Of the devices it is made for, the reason of the first: "no GPU", not "does not run on CPUs".
    first = next(iter(row["capabilities"].get("devices", ())), "cuda")
    return f"- {row[first]}"
