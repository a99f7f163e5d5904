"""`fsbench report`: results as HTML pages. No GPU, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fsbench.cli.options import FOLDER, Results, option


def report(
    results: Results,
    out: Annotated[Path, option("--out", FOLDER, "Folder for the pages.")] = Path("report"),
) -> None:
    """Write one self-contained HTML page per GPU, and an index with a verdict for each.

    A page has figures and sortable tables.
    """
    from fsbench.cli.result_frames import by_time, measured_results
    from fsbench.records.disk import refusals, write_atomically
    from fsbench.records.store import read_environment
    from fsbench.report.html import index_page, pages

    environments = {folder: read_environment(folder) for folder in by_time(results)}
    made = list(pages(measured_results(list(environments)), environments))
    texts = {"index": index_page(card for *_, card in made)}
    texts |= {name: text for name, text, _ in made}
    for name, text in texts.items():
        path = out / f"{name}.html"
        with refusals("write a report to", path):
            out.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        print(f"wrote {path}", flush=True)
