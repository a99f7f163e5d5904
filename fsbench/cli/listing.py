"""`fsbench list`: samplers, models, presets and GPUs."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsbench.cli.options import Json, ProviderPath
from fsbench.cli.tables import console, plain_table
from fsbench.problem import DTYPES

if TYPE_CHECKING:
    from rich.table import Table

    from fsbench.discover import Found


def list_(
    as_json: Json = False,
    capabilities: Annotated[
        bool, typer.Option("--capabilities", help="Show what each sampler can do, as a table.")
    ] = False,
    provider_path: ProviderPath = None,
) -> None:
    """List samplers and whether they can run here, models, presets and GPUs."""
    from fsbench.discover import discover, kept_stdout
    from fsbench.machine import hardware
    from fsbench.measure.presets import PRESETS
    from fsbench.problem import models
    from fsbench.records import iomodel

    samplers = discover(provider_path or []).values()
    with kept_stdout():
        providers = [_provider_facts(entry) for entry in samplers]
    facts: dict[str, Any] = {
        "providers": providers,
        "models": [{"name": m.name, "v": m.V, "d": m.D} for m in models().values()],
        "presets": [{"name": name, "summary": p.summary} for name, p in PRESETS.items()],
        "gpus_here": [gpu.name for gpu in hardware.gpus()],
        "gpus_known": sorted(iomodel.gpus()),
    }
    if as_json:
        print(json.dumps(facts, indent=2))
    elif capabilities:
        _print_capabilities(facts["providers"])
    else:
        _print(facts)


def _provider_facts(entry: Found) -> dict[str, Any]:
    from fsbench.discover import EXAMPLE

    facts: dict[str, Any] = {
        "name": entry.name,
        "label": None,
        "description": entry.description(),
        "source": entry.source,
        "kind": None,
        "cuda": entry.unavailable_reason("cuda") or "yes",
        "cpu": entry.unavailable_reason("cpu") or "yes",
        "capabilities": {},
        "presets": [],
        "kept_bytes": 0,
        "kept_share": 0.0,
    }
    if entry.provider is not None:
        kept = entry.provider.kept_bytes(EXAMPLE)
        facts |= {
            "label": entry.provider.label,
            "kind": str(entry.provider.kind),
            "capabilities": asdict(entry.provider.capabilities),
            "presets": entry.provider.presets,
            "kept_bytes": kept,
            "kept_share": kept / (2 * EXAMPLE.V * EXAMPLE.D),
        }
    return facts


def _print(facts: dict[str, Any]) -> None:
    from fsbench.discover import EXAMPLE

    print_ = console(soft_wrap=False).print
    width = console().width
    print_("sampler                            kind         runs here on")
    print_("─" * min(width, 80))
    for row in facts["providers"]:
        print_(f"{row['name']:34} {row['kind'] or 'broken':12} {_where(row)}".rstrip())
        if row["label"]:
            text = f"{row['label']}: {row['description']}"
            print_(
                fill(
                    text,
                    width,
                    initial_indent="    ",
                    subsequent_indent="    ",
                    break_on_hyphens=False,
                )
            )
    print_()
    keeping = [row for row in facts["providers"] if row["kept_bytes"]]
    models = _table("model", "V", "D")
    for row in facts["models"]:
        models.add_row(row["name"], str(row["v"]), str(row["d"]))
    presets = _table("preset", "")
    for row in facts["presets"]:
        presets.add_row(row["name"], row["summary"])
    if keeping:
        print_(
            "Memory in addition to a weight of "
            f"D = {EXAMPLE.D:,}, V = {EXAMPLE.V:,}, {EXAMPLE.dtype}:"
        )
        for row in keeping:
            share = f"{row['kept_share']:+.0%}"
            print_(f"  {share} ({row['kept_bytes'] / 1e9:.2f} GB)  {row['name']}")
        print_()
    for table in (models, presets):
        print_(table)
        print_()
    print_(f"GPUs here: {', '.join(facts['gpus_here']) or 'none'}")
    print_(f"GPUs with known peaks: {', '.join(facts['gpus_known'])}")


def _table(*columns: str, gap: int = 2) -> Table:
    table = plain_table(padding=(0, gap - 1, 0, 0))
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True, justify="right" if column == "V" else "left")
    table.add_column(columns[-1], justify="right" if columns[-1] == "D" else "left")
    return table


PLACES = {"GPU": "cuda", "CPU": "cpu"}


def _where(row: dict[str, Any]) -> str:
    """Return 'GPU, CPU', or why the sampler runs on neither."""
    places = [name for name, device in PLACES.items() if row[device] == "yes"]
    if places:
        return ", ".join(places)
    # The reason of the first device that it is made for: "no GPU", not "does not run on CPUs".
    first = next(iter(row["capabilities"].get("devices", ())), "cuda")
    return f"- {row[first]}"


CLAIMS = {
    "noise": ("noise", "tokens follow docs/design/noise.md, with token or group noise"),
    "fused": ("fused", "the logits never reach memory"),
    "zero_temperature": ("T=0", "temperature 0 is accepted and greedy"),
    "graph_safe": ("graph", "may be captured in a CUDA graph"),
    "host_sync_free": ("nosync", "no launch makes the host wait for the GPU"),
    "batch_invariant": ("inv", "given equal logits, a row's token does not depend on its batch"),
    "per_row_temperature": ("rowT", "a temperature per row"),
    "greedy_rows": ("mix", "greedy rows among sampled ones, in one launch"),
    "bias": ("bias", "a bias on the logits"),
    "mask": ("mask", "a mask of allowed tokens"),
    "per_request_seed": ("seed", "a seed per request"),
    "logprob": ("logp", "log-probabilities of the tokens"),
    "entropy": ("ent", "the entropy of each row"),
    "rank": ("rank", "how many tokens have a larger logit"),
    "top": ("top", "the largest logits and their tokens"),
    "num_samples": ("n", "n samples per row"),
    "filters": ("kpm", "top-k, top-p, min-p; in capitals: each row may have its own"),
    "penalties": ("pen", "repetition, presence and frequency penalties"),
    "quantized": ("head", "quantized heads that it takes as they are: int8, fp8"),
}
"""Field of Capabilities -> head and meaning of its column."""


def _print_capabilities(rows: list[dict[str, Any]]) -> None:
    """Print the matrix; on a narrow terminal in parts, split after `graph` and `seed`."""
    screen = console(soft_wrap=False)
    heads = [*PLACES, *DTYPES, *(head for head, _ in CLAIMS.values())]
    marks = {row["name"]: _marks(row["capabilities"]) for row in rows if row["capabilities"]}

    def matrix(columns: slice) -> Table:
        table = _table("provider", *heads[columns], gap=1)
        for name, cells in marks.items():
            table.add_row(name, *cells[columns])
        return table

    parts = [matrix(slice(None))]
    unbounded = screen.options.update(width=1000)
    if screen.measure(parts[0], options=unbounded).maximum > screen.width:
        cuts = [0, *(heads.index(name) + 1 for name in ("graph", "seed")), len(heads)]
        parts = [matrix(slice(*ends)) for ends in pairwise(cuts)]
    for part in parts:
        screen.print(part)
        screen.print()
    for head, meaning in CLAIMS.values():
        screen.print(f"{head:7}{meaning}")
    for row in rows:
        if row["name"] not in marks:
            screen.print(f"{row['name']}: broken, {row['cuda']}")


def _marks(able: dict[str, Any]) -> list[str]:
    """Return a row of the matrix, under PLACES, DTYPES and CLAIMS."""
    values = [
        *(device in able["devices"] for device in PLACES.values()),
        *(dtype in able["dtypes"] for dtype in DTYPES),
        *(able[field] for field in CLAIMS),
    ]
    return [_mark(value, able["mixed_filters"]) for value in values]


def _mark(value: object, mixed_filters: bool) -> str:
    if isinstance(value, list | tuple):  # of filters, or forms of a head: i of int8, f of fp8
        letters = "".join(name.removeprefix("top_")[0] for name in value)
        value = (letters.upper() if mixed_filters else letters) or "-"
    return value if isinstance(value, str) else "yes" if value else "-"
