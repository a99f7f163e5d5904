"""`fsbench report`: results as one HTML page. No GPU, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fsbench.cli.options import FILE, Results, option


def report(
    results: Results,
    out: Annotated[Path, option("--out", FILE, "The page to write.")] = Path("report.html"),
) -> None:
    """Write results as one HTML page that needs no network: figures inline, tables that sort."""
    from fsbench.cli.reading import measured_results, run_folders
    from fsbench.figures.report import page
    from fsbench.records.disk import refusals, write_atomically
    from fsbench.records.store import read_environment

    frame = measured_results(results)
    text = page(frame, {folder: read_environment(folder) for folder in run_folders(results)})
    with refusals("write a report to", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, text)
    print(f"wrote {out}")
