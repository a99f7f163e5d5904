"""`fsbench list`: samplers, models, presets and GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    provider_path: Annotated[
        list[Path] | None, typer.Option(help="A .py file that defines PROVIDER; may be repeated.")
    ] = None,
) -> None:
    """List samplers (and whether they can run here), models, presets and GPUs. Needs no torch."""
    from fsbench import hardware, iomodel
    from fsbench.discover import discover
    from fsbench.presets import PRESETS
    from fsbench.problem import models

    providers = [_provider_facts(entry) for entry in discover(provider_path or []).values()]
    facts: dict[str, Any] = {
        "providers": providers,
        "models": [{"name": m.name, "v": m.V, "d": m.D} for m in models().values()],
        "presets": [{"name": name, "summary": p.summary} for name, p in PRESETS.items()],
        "gpus_here": [gpu.name for gpu in hardware.gpus()],
        "gpus_known": sorted(iomodel.gpus()),
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    _print(facts)


def _provider_facts(entry: Any) -> dict[str, Any]:
    provider = entry.provider
    if provider is None:
        return {"name": entry.name, "source": entry.source, "kind": None, "cuda": entry.broken,
                "cpu": entry.broken, "capabilities": {}, "presets": []}  # fmt: skip
    able = provider.capabilities
    return {
        "name": entry.name,
        "label": provider.label,
        "source": entry.source,
        "kind": str(provider.kind),
        "cuda": entry.unavailable_reason("cuda") or "yes",
        "cpu": entry.unavailable_reason("cpu") or "yes",
        "capabilities": {
            "dtypes": able.dtypes,
            "noise": able.noise,
            "zero_temperature": able.zero_temperature,
            "fused": able.fused,
            "graph_safe": able.graph_safe,
        },
        "presets": provider.presets,
    }


def _print(facts: dict[str, Any]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="providers", box=SIMPLE)
    for column in ("name", "kind"):
        table.add_column(column, no_wrap=True)
    table.add_column("what it can do")
    table.add_column("where it runs")
    for row in facts["providers"]:
        table.add_row(row["name"], row["kind"] or "broken", _abilities(row), _where(row))
    console.print(table)
    heads = ", ".join(f"{m['name']} ({m['v']} x {m['d']})" for m in facts["models"])
    console.print(f"[bold]models[/] (V x D): {heads}", highlight=False)
    for preset in facts["presets"]:
        console.print(f"[bold]preset {preset['name']}[/]: {preset['summary']}", highlight=False)
    here = ", ".join(facts["gpus_here"]) or "none"
    console.print(f"[bold]GPUs here[/]: {here}", highlight=False)
    console.print(f"[bold]GPUs with known peaks[/]: {', '.join(facts['gpus_known'])}", highlight=False)


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
    """'GPU, CPU', or the reason where it does not run."""
    if row["cuda"] == row["cpu"] != "yes":
        return row["cuda"]
    places = [("GPU", row["cuda"]), ("CPU", row["cpu"])]
    return ", ".join(name if answer == "yes" else f"{name}: {answer}" for name, answer in places)
