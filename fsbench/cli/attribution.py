"""Output of `fsbench iomodel --measured`: model, measurements, and causes of the difference."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fsbench.cli.result_frames import read_results
from fsbench.cli.tables import console, print_table, records
from fsbench.errors import ResultsError
from fsbench.provider import Kind
from fsbench.report import attribution
from fsbench.report.tables import Configuration, configurations

_SPEEDUP = [
    *(("B", "{b}"), ("I/O model", "{predicted:.3f}"), ("measured", "{measured:.3f}")),
    *(("gaps", "{gaps:+.3f}"), ("passes", "{passes:+.3f}"), ("matmul", "{matmul:+.3f}")),
    ("if sampling\nwere free", "{bound:.3f}"),
]
_EXTENDED = [
    *(("sampler", "{label:<}"), ("kernels", "{kernels:d}"), ("fixed us", "{fixed_us:.1f}")),
    *(("of it\ngaps us", "{gaps_us:.1f}"), ("passes", "{passes:.1f}")),
    ("error at\nother B", "{worst:.1%}"),
]


def print_measured(results: list[Path], as_json: bool) -> None:
    """Print every configuration of results folders, as tables or as JSON.

    Raises:
        ResultsError: no configuration can be compared with the model.
    """
    parts = [_part(configuration) for configuration in configurations(read_results(results))]
    if not any(part["speedups"] or part["extended"] for part in parts):
        raise ResultsError(
            "--measured: expected an exact sampler over stored logits in one run with two lower "
            "bounds, the matmul alone and the weight read once; found none"
        )
    if as_json:
        print(json.dumps(parts, indent=2))
        return
    for part in parts:
        _print_part(part)


def _part(configuration: Configuration) -> dict[str, Any]:
    fused = next(iter(_by_time(configuration, Kind.EXACT, fused=True)), None)
    bounds = _by_time(configuration, Kind.LOWER_BOUND)
    speedups, extended = [], []
    for other in configuration.providers(Kind.EXACT, fused=False) if len(bounds) > 1 else ():
        # The slowest bound is the matmul, which writes the logits; the fastest reads the weight.
        stream, matmul = bounds[0], bounds[-1]
        label = configuration.label(other)
        if fused:
            table = attribution.attribute(configuration, fused, other, matmul)
            rows = records(table.reset_index())
            speedups += [{"other": other, "label": label, "rows": rows}] if rows else []
        extension = attribution.extend(configuration, other, matmul, stream)
        extended += [{"label": label, **vars(extension)}] if extension else []
    return {
        "configuration": configuration.stem,
        "title": f"{configuration.title}; {configuration.conditions}",
        "fused": fused,
        "fused_label": configuration.label(fused) if fused else None,
        "speedups": speedups,
        "extended": extended,
    }


def _by_time(configuration: Configuration, kind: Kind, fused: bool | None = None) -> list[str]:
    """Return the providers of a kind, sorted by number of batch sizes, then by time."""
    names = configuration.providers(kind, fused)
    rows = configuration.measured
    logs = {name: rows[rows.provider == name].median_us.map(math.log) for name in names}
    return sorted(names, key=lambda name: (-len(logs[name]), logs[name].mean()))


def _print_part(part: dict[str, Any]) -> None:
    print_ = console(soft_wrap=False).print
    print_(part["title"], style="bold")
    for pair in part["speedups"]:
        title = f"\nSpeedup of {part['fused_label']} over {pair['label']}"
        print_table(_SPEEDUP, pair["rows"], title)
    if part["extended"]:
        title = "\nThe model with two terms more: time = matmul + fixed + passes over the logits"
        print_table(_EXTENDED, part["extended"], title)
    print_()
