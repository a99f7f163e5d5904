"""`fsbench export`: results as one table. No GPU, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fsbench.cli.options import FOLDER, Results, option


def export(
    results: Results,
    out: Annotated[Path, option("--out", FOLDER, "Folder for the files.")] = Path("export"),
) -> None:
    """Write results as one tidy CSV with a data dictionary.

    results.csv has a row for each cell of each run, with versions and commit; columns.csv says what
    its columns mean.
    """
    from fsbench.cli.result_frames import read_results
    from fsbench.records.disk import refusals, write_atomically
    from fsbench.records.sheet import as_csv
    from fsbench.records.store import read_environment
    from fsbench.report.export import dictionary, tidy

    frame = read_results(results)
    environments = {folder: read_environment(Path(folder)) for folder in frame.folder.unique()}
    table = tidy(frame, environments)
    files = {
        "results.csv": as_csv(table, index=False),
        "columns.csv": as_csv(dictionary(table), index=False),
    }
    for name, text in files.items():
        path = out / name
        with refusals("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
    print(f"wrote {len(table)} rows and {len(files)} files below {out}")
