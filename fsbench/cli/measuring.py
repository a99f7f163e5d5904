"""What `fsbench run` does once it knows the plan: measure, write tables, print."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsbench import interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from fsbench.measure.session import Session
    from fsbench.measure.worker import Job, Report


def measure(
    job: Job, options: dict[str, Any], out: Path | None, resume: Path | None, suffix: str
) -> int:
    """Measure the job's plan, export and print; return the exit code. See `Session`."""
    from fsbench.machine.environment import environment
    from fsbench.measure.session import Session

    interrupts.raise_exceptions()
    device = f"cuda:{job.indices[0]}" if job.device == "cuda" else "cpu"
    facts = {**environment(device, sys.argv), "options": options}
    session = Session(job, facts, out, resume, suffix)
    try:
        with _progress(session) as report:
            session.measure(report)
    finally:
        session.close()
    return _finish(session, options) if session.exports else 0


@contextmanager
def _progress(session: Session) -> Iterator[Report]:
    """A progress bar; if what it shows is stopped, how to go on with what was measured."""
    from rich.console import Console

    from fsbench.cli.reporting import Progress

    console = Console(stderr=True, highlight=False, markup=False)
    try:
        with Progress(console) as progress:
            yield progress
    except BaseException:
        if advice := session.advice():
            console.print(f"stopped; {advice}", soft_wrap=True)
        raise


def _finish(session: Session, options: dict[str, Any]) -> int:
    """Export and print what a run left; return the exit code."""
    from fsbench.cli.reporting import (
        print_breakdown,
        print_energy,
        print_summary,
        print_sustained,
        print_times,
    )
    from fsbench.report import logits_store, scaling, tables

    folder = session.store.folder
    table, records, written = session.export()
    written += tables.write_tables(folder, table)
    written += scaling.write_scaling(folder, tables.configurations(table))
    written += logits_store.write_tables(folder, table)
    print_summary(table)
    if options["breakdown"]:
        print_breakdown(table, records)
    if options["energy"] is not None:
        print_energy(table)
    if options["sustained"] is not None:
        print_sustained(table)
    print_times(session.store.times)
    print(f"\nWrote {folder}/results.csv and {len(written)} tables beside it.")
    return _exit_code(table)


def _exit_code(table: pd.DataFrame) -> int:
    """1 if a sampler failed verification, 3 if cells failed or none was measured, else 0."""
    statuses = set(table["status"])
    if "check_failed" in statuses:
        return 1
    failed = {"error", "oom", "timeout", "timer_unavailable"}
    return 3 if statuses & failed or not table["median_us"].notna().any() else 0
