"""`fsbench list`: samplers, models, presets and GPUs."""

from __future__ import annotations

import json
from dataclasses import asdict
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsbench.cli.options import Json, ProviderPath
from fsbench.cli.tables import console, table

if TYPE_CHECKING:
    from fsbench.discover import Found


def list_(
    as_json: Json = False,
    capabilities: Annotated[
        bool, typer.Option("--capabilities", help="List what each sampler can do.")
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
    print_("sampler                            kind         runs here on")
    print_("─" * min(console().width, 80))
    for row in facts["providers"]:
        print_(f"{row['name']:34} {row['kind'] or 'broken':12} {_where(row)}".rstrip())
        if row["label"]:
            print_(_indented(f"{row['label']}: {row['description']}"))
    print_()
    keeping = [row for row in facts["providers"] if row["kept_bytes"]]
    if keeping:
        print_(
            "Memory in addition to a weight of "
            f"D = {EXAMPLE.D:,}, V = {EXAMPLE.V:,}, {EXAMPLE.dtype}:"
        )
        for row in keeping:
            share = f"{row['kept_share']:+.0%}"
            print_(f"  {share} ({row['kept_bytes'] / 1e9:.2f} GB)  {row['name']}")
        print_()
    models = [("model", "{name:<}"), ("V", "{v}"), ("D", "{d}")]
    print_(table(models, facts["models"], padding=(0, 1, 0, 0)))
    print_()
    presets = [("preset", "{name:<}"), ("", "{summary:<}")]
    print_(table(presets, facts["presets"], padding=(0, 1, 0, 0)))
    print_()
    print_(f"GPUs here: {', '.join(facts['gpus_here']) or 'none'}")
    print_(f"GPUs with known peaks: {', '.join(facts['gpus_known'])}")


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
    "noise": "tokens follow docs/design/noise.md (token or group noise)",
    "fused": "no [B, V] logits in memory",
    "zero_temperature": "temperature 0 is accepted and greedy",
    "graph_safe": "can be captured in a CUDA graph",
    "host_sync_free": "no launch makes the host wait for the GPU",
    "batch_invariant": "for equal logits, a token does not depend on its batch",
    "per_row_temperature": "a temperature per row",
    "greedy_rows": "greedy rows among sampled ones, in one launch",
    "bias": "a bias on the logits",
    "mask": "a mask of allowed tokens",
    "per_request_seed": "a seed per request",
    "logprob": "log-probabilities of the tokens",
    "entropy": "the entropy of each row",
    "rank": "number of tokens with a larger logit",
    "top": "the largest logits and their tokens",
    "num_samples": "n samples per row",
    "filters": "top-k, top-p, min-p",
    "mixed_filters": "filters that differ between rows",
    "penalties": "repetition, presence and frequency penalties",
    "quantized": "forms of quantized heads that it takes: int8, fp8",
}
"""Field of Capabilities -> meaning."""


def claims(able: dict[str, Any]) -> list[str]:
    """Return the capabilities that a sampler has, such as 'fused' or 'noise (group)'."""
    words = []
    for name in CLAIMS:
        if value := able[name]:
            values = " ".join(value) if isinstance(value, list | tuple) else value
            words.append(name if value is True else f"{name} ({values})")
    return words


def _print_capabilities(rows: list[dict[str, Any]]) -> None:
    print_ = console(soft_wrap=False).print
    for row in rows:
        if able := row["capabilities"]:
            places = [name for name, device in PLACES.items() if device in able["devices"]]
            print_(row["name"])
            print_(_indented(", ".join([*places, *able["dtypes"], *claims(able)])))
        else:
            print_(f"{row['name']}: broken, {row['cuda']}")
    print_()
    for name, meaning in CLAIMS.items():
        print_(f"{name:20}{meaning}")


def _indented(text: str) -> str:
    indent = " " * 4
    return fill(
        text,
        console().width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
