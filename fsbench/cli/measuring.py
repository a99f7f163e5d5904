"""What `fsbench run` does once it knows the plan: measure, export, print."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsbench.errors import InvalidArgument

if TYPE_CHECKING:
    import pandas as pd

    from fsbench.measure.plan import Plan
    from fsbench.measure.ranks import Job, Report
    from fsbench.records.cell import CellRecord
    from fsbench.records.store import Store


def measure_on(
    index: int,
    plan: Plan,
    options: dict[str, Any],
    out: Path | None,
    resume: Path | None,
    suffix: str,
) -> int:
    """Measure the plan on one GPU (or the CPU), export and print; returns the exit code.

    suffix tells the folders of several GPUs apart.
    """
    from fsbench.machine import device_state
    from fsbench.machine.environment import environment
    from fsbench.measure.outcomes import Outcomes
    from fsbench.measure.runner import Runner
    from fsbench.timers import make_timer

    device = options["device"]
    nvml_index = None
    if device == "cuda":
        import torch

        torch.cuda.set_device(index)
        nvml_index = device_state.nvml_index(index)
    timer = make_timer(options["timer"], device, options["l2"])
    facts = {**environment(device, sys.argv), "options": options}
    store = _store(facts, out / suffix if out else None, resume, suffix)
    try:
        with _progress(store.folder) as report:
            Runner(plan, Outcomes(store, report), timer, facts["gpu"], nvml_index).run()
    finally:
        store.close()
    return _finish(store.folder, store.records, options)


def measure_over_ranks(
    job: Job, options: dict[str, Any], out: Path | None, resume: Path | None
) -> int:
    """Measure the job's plan with each number of ranks that it has; returns the exit code.

    The ranks are processes of its own, or those of torchrun, if that started this one. Then all
    of them come here, and the exit code of the first counts.
    """
    from fsbench.machine.environment import environment
    from fsbench.measure import ranks
    from fsbench.records.store import read_records

    plan = job.plan
    degrees = list(dict.fromkeys(problem.tp for problem in plan.problems))
    rank = _rank_of_torchrun(degrees, out or resume)
    facts = {**environment(job.device, sys.argv), "options": options}
    if rank == 0 or rank is None:
        store = _store(facts, out, resume, "")
        store.close()
        folder = store.folder
    else:
        folder = out or resume or Path()
    with _progress(folder, silent=bool(rank)) as report:
        for degree in degrees:
            problems = [problem for problem in plan.problems if problem.tp == degree]
            part = replace(
                job,
                plan=replace(plan, problems=problems, providers=[]),
                folder=folder,
                indices=job.indices[:degree],
            )
            if rank is None:
                ranks.measure(part, report)
            else:
                ranks.measure_as_rank(part, rank, "env://", report)
    return 0 if rank else _finish(folder, read_records(folder), options)


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


def _store(facts: dict[str, Any], out: Path | None, resume: Path | None, suffix: str) -> Store:
    from fsbench.records.store import Store

    if resume:
        return Store.resume(resume, facts)
    return Store.create(out or new_folder(facts, suffix), facts)


@contextmanager
def _progress(folder: Path, silent: bool = False) -> Iterator[Report]:
    """A progress bar; if what it shows is stopped, how to go on."""
    from rich.console import Console

    from fsbench.cli.reporting import Progress

    console = Console(stderr=True, highlight=False, markup=False, quiet=silent)
    try:
        with Progress(console) as progress:
            yield progress.report
    except BaseException:
        again = f"fsbench run --resume {shlex.quote(str(folder))}"
        console.print(f"stopped; to continue: {again}", soft_wrap=True)
        raise


def _finish(folder: Path, records: list[CellRecord], options: dict[str, Any]) -> int:
    """Export and print what a folder holds; returns the exit code."""
    from fsbench.analysis import logits_store, scaling, tables
    from fsbench.cli.reporting import print_breakdown, print_energy, print_summary
    from fsbench.records import breakdown, summary

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
    print(f"\nWrote {folder}/results.csv and {len(written)} tables beside it.")
    return _exit_code(table)


def new_folder(facts: dict[str, Any], suffix: str) -> Path:
    """results/<gpu>/<utc>-<commit>, with the suffix if there is one."""
    from fsbench.records.iomodel import gpu_slug

    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    commit = (facts["git_sha"] or "nogit")[:7]
    name = "-".join(filter(None, (stamp, commit, suffix)))
    return Path("results") / (gpu_slug(facts["gpu"]) or "cpu") / name


def _exit_code(table: pd.DataFrame) -> int:
    """1 if a sampler failed verification, 3 if cells failed or none was measured, else 0."""
    statuses = set(table["status"])
    if "check_failed" in statuses:
        return 1
    failed = {"error", "oom", "timeout", "timer_unavailable"}
    return 3 if statuses & failed or "ok" not in statuses else 0
