"""`fsbench plot`: the figures of one or several runs, from their results. No GPU, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsbench.errors import ResultsError


def plot(
    results: Annotated[
        list[Path], typer.Argument(help="Results folders, or folders that contain some.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("plots"),
    formats: Annotated[str, typer.Option("--format", help="Comma list of png, pdf, svg.")] = "png",
) -> None:
    """Draw runtime, speedup, roofline and bandwidth for every configuration in the results.

    Runs of the same configuration are merged: a cell measured twice is drawn from the run given
    last (below one folder, the last by name), and a speedup always comes from a single run.
    """
    from fsbench import plotting
    from fsbench.cli.reading import read_results
    from fsbench.plotstyle import styles
    from fsbench.tables import configurations

    suffixes = plotting.check_formats(name.strip() for name in formats.split(","))
    frame = read_results(results)
    found = configurations(frame)
    if not found:
        counts = frame["status"].value_counts() if len(frame) else {}
        got = ", ".join(f"{count} {status}" for status, count in counts.items()) or "no cell"
        raise ResultsError(f"results: expected at least one cell with status ok; got {got}")
    looks = styles(frame)
    for configuration in found:
        for name in plotting.FIGURES:
            figure = plotting.draw(name, configuration, looks)
            if figure is None:
                print(
                    f"no {name} figure for {configuration.stem}: "
                    "no fused and unfused exact sampler were measured in one run"
                )
                continue
            for suffix in suffixes:
                path = out / f"{name}_{configuration.stem}.{suffix}"
                plotting.save(figure, path)
                print(f"wrote {path}")
