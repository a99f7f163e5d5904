"""The output of a measuring tool: a CSV file, and next to it the environment as JSON."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from fsbench.machine.environment import environment


def write_csv(
    path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]], device: str
) -> None:
    """Write the environment to NAME.env.json and each row to NAME.csv as soon as it is measured.

    Args:
        path: the CSV file; its folder is made, and files of an earlier call are replaced.
        rows: values in the order of columns. A run that ends early leaves the rows until then.
        device: "cuda" or "cpu", whose environment is recorded.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    record = json.dumps(environment(device, sys.argv), indent=2)
    path.with_suffix(".env.json").write_text(record + "\n", encoding="utf-8")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            writer.writerow(row)
            file.flush()
