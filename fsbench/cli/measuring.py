"""What `fsbench run` does once it knows the plan: measure, export, print."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsbench.errors import InvalidArgument

if TYPE_CHECKING:
    import pandas as pd

    from fsbench.measure.worker import Job, Report
    from fsbench.records.store import Store


def measure(
    job: Job, options: dict[str, Any], out: Path | None, resume: Path | None, suffix: str
) -> int:
    """Measure the job's plan, export and print; returns the exit code.

    suffix tells the folders of several GPUs apart. Problems with several ranks are measured with
    each number of them in turn, by processes of this one's, or by those of torchrun, if that
    started it. Then all of them come here, and the exit code of the first counts.
    """
    from fsbench.machine.environment import environment
    from fsbench.measure import supervisor
    from fsbench.records.store import Store, require_empty

    degrees = list(dict.fromkeys(problem.tp for problem in job.plan.problems))
    device = f"cuda:{job.indices[0]}" if job.device == "cuda" else "cpu"
    facts = {**environment(device, sys.argv), "options": options}
    rank = _rank_of_torchrun(degrees, out or resume) if job.together else None
    if rank is not None:
        return _measure_as_rank(job, rank, facts, out, resume)
    stores = [Store.resume(resume, facts)] if resume else []
    if out:
        out = out / suffix if suffix else out
        require_empty(out)

    def opened() -> Store:
        if not stores:
            stores.append(Store.create(out or _own_folder(facts, suffix), facts))
        return stores[0]

    hurry = job.plan.hurry and not resume
    early = job.plan.cells(facts["gpu"], job.timer, job.l2) if hurry else []
    try:
        with _progress(stores) as report:
            for degree in degrees:
                problems = [problem for problem in job.plan.problems if problem.tp == degree]
                last = stores[0].interrupted if stores else None
                plan = replace(job.plan, problems=problems, providers=[], last=last)
                indices = job.indices[:degree] if job.together else job.indices
                supervisor.measure(replace(job, plan=plan, indices=indices), opened, report, early)
    finally:
        for store in stores:
            store.close()
    return _finish(opened(), options)


def _measure_as_rank(
    job: Job, rank: int, facts: dict[str, Any], out: Path | None, resume: Path | None
) -> int:
    """Measure as one of torchrun's processes; the first one writes the results."""
    from fsbench.machine import compilers
    from fsbench.measure.outcomes import Outcomes
    from fsbench.measure.worker import carry_out, ready_runner
    from fsbench.records.store import Store

    compilers.settle()
    store = Store.replica()
    if rank == 0:
        store = Store.resume(resume, facts) if resume else Store.create(out or Path(), facts)
    try:
        with _progress([store] if rank == 0 else []) as report:
            outcomes = Outcomes(store, begin=store.begin)
            if rank == 0:
                outcomes.report = report.report
                outcomes.finished = lambda cell, s: report.finished(store.record(cell), s)
            job = replace(job, plan=replace(job.plan, providers=[], last=store.interrupted))
            runner = ready_runner(job, rank, "env://", outcomes)
            assert outcomes.team is not None
            records, last = outcomes.team.gather((store.records, store.interrupted))[0]
            store.know(records)
            runner.plan = replace(runner.plan, last=last)
            carry_out(runner)
    finally:
        store.close()
    return 0 if rank else _finish(store, options=facts["options"])


def _rank_of_torchrun(degrees: list[int], folder: Path | None) -> int | None:
    """This process's rank, if torchrun started it (its variables say so), else None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    ranks = int(os.environ["WORLD_SIZE"])
    if degrees != [ranks]:
        raise InvalidArgument(f"--tp: expected {ranks}, the ranks of torchrun; got {degrees}")
    if folder is None:
        raise InvalidArgument("--out: expected a folder, which all ranks of torchrun share")
    return int(os.environ["RANK"])


@contextmanager
def _progress(stores: list[Store]) -> Iterator[Report]:
    """A progress bar; if what it shows is stopped, how to go on with what was measured."""
    from rich.console import Console

    from fsbench.cli.reporting import Progress

    console = Console(stderr=True, highlight=False, markup=False)
    try:
        with Progress(console) as progress:
            yield progress
    except BaseException:
        for store in stores:
            again = f"fsbench run --resume {shlex.quote(str(store.folder))}"
            console.print(f"stopped; to continue: {again}", soft_wrap=True)
        raise


def _finish(store: Store, options: dict[str, Any]) -> int:
    """Export and print what a run left; returns the exit code."""
    from fsbench.cli.reporting import (
        print_breakdown,
        print_energy,
        print_summary,
        print_sustained,
        print_times,
    )
    from fsbench.records import breakdown, summary
    from fsbench.report import logits_store, scaling, tables

    folder, records = store.folder, store.records
    table = summary.export_csv(folder, records)
    written = tables.write_tables(folder, table)
    written += scaling.write_scaling(folder, tables.configurations(table))
    written += logits_store.write_tables(folder, table)
    if kernels := breakdown.export_csv(folder, records):
        written.append(kernels)
    print_summary(table)
    if options["breakdown"]:
        print_breakdown(table, records)
    if options["energy"] is not None:
        print_energy(table)
    if options["sustained"] is not None:
        print_sustained(table)
    print_times(store.times)
    print(f"\nWrote {folder}/results.csv and {len(written)} tables beside it.")
    return _exit_code(table)


def new_folder(facts: dict[str, Any], suffix: str) -> Path:
    """results/<gpu>/<utc>-<commit>, with the suffix if there is one: a name that is still free.

    Runs that begin within one second have folders that end in -2, -3 and so on.
    """
    from fsbench.records.iomodel import gpu_slug

    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    commit = (facts["git_sha"] or "nogit")[:7]
    first = "-".join(filter(None, (stamp, commit, suffix)))
    names = (f"{first}-{number}" if number > 1 else first for number in count(1))
    folders = (Path("results") / (gpu_slug(facts["gpu"]) or "cpu") / name for name in names)
    return next(folder for folder in folders if not folder.exists())


def _own_folder(facts: dict[str, Any], suffix: str) -> Path:
    """A new folder that no other process has: two may see the same free name."""
    from fsbench.records.disk import refusals

    while True:
        folder = new_folder(facts, suffix)
        with refusals("write results in", folder), suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def _exit_code(table: pd.DataFrame) -> int:
    """1 if a sampler failed verification, 3 if cells failed or none was measured, else 0."""
    statuses = set(table["status"])
    if "check_failed" in statuses:
        return 1
    failed = {"error", "oom", "timeout", "timer_unavailable"}
    return 3 if statuses & failed or not table["median_us"].notna().any() else 0
