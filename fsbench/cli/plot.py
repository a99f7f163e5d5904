"""`fsbench plot`: the figures of one or several runs, from their results. No GPU, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsbench.errors import ResultsError

if TYPE_CHECKING:
    import pandas as pd


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
    from fsbench.plotstyle import styles
    from fsbench.tables import configurations

    suffixes = plotting.check_formats(name.strip() for name in formats.split(","))
    frame = _read(results)
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


def _read(paths: list[Path]) -> pd.DataFrame:
    """The rows of all results folders, each folder once, in the order given."""
    import pandas as pd

    from fsbench import summary
    from fsbench.results import read_records, results_folders

    folders = dict.fromkeys(folder.resolve() for folder in results_folders(paths))
    tables = []
    for folder in folders:
        if not (folder / "results.csv").exists():  # a run that was killed: derive it, in memory
            tables.append(summary.frame(read_records(folder)).assign(folder=str(folder)))
            continue
        try:
            tables.append(summary.read_csv([folder]))
        except (OSError, ValueError) as error:
            raise ResultsError(f"cannot read {folder / 'results.csv'}: {error}") from error
    return pd.concat(tables, ignore_index=True)
