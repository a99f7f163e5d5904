"""`fsbench report`: results as HTML pages. No GPU, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fsbench.cli.options import FOLDER, Results, option


def report(
    results: Results,
    out: Annotated[Path, option("--out", FOLDER, "Folder for the pages.")] = Path("report"),
) -> None:
    """Write results as an HTML page for each GPU that needs no network: figures, sorting tables.

    Cells that several commits measured have a history.
    """
    from fsbench.cli.reading import by_time, measured_results
    from fsbench.figures.report import pages
    from fsbench.records.disk import refusals, write_atomically
    from fsbench.records.store import read_environment

    folders = by_time(results)
    frame = measured_results(folders)
    for name, text in pages(frame, {folder: read_environment(folder) for folder in folders}):
        path = out / f"{name}.html"
        with refusals("write a report to", path):
            out.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        print(f"wrote {path}", flush=True)
