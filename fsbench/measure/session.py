"""A session of `fsbench run`: results folder, store, measuring processes and export."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from fsbench.machine import compilers
from fsbench.measure import supervisor
from fsbench.measure.plan import Job, torchrun_rank
from fsbench.measure.recorder import Recorder
from fsbench.measure.worker import Report, carry_out, ready_runner
from fsbench.records import breakdown, summary
from fsbench.records.cell import Cell, CellRecord
from fsbench.records.store import Store, new_folder, require_empty


@dataclass
class Session:
    """Measures a job and keeps its results in a folder.

    facts: the record for env.json, with the options of the run.
    out, resume: an empty folder, or one to continue; without both a folder is made when the first
        cell is ready.
    suffix: last part of the folder's name, which differs between GPUs.

    Raises:
        ResultsError: the folder cannot be used.
        InvalidArgument: torchrun started this process, and the job or its variables do not fit.
    """

    job: Job
    facts: dict[str, Any]
    out: Path | None = None
    resume: Path | None = None
    suffix: str = ""
    _store: Store | None = None
    _rank: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.job.together:
            self._rank = torchrun_rank(self._degrees(), self.out or self.resume)
        if self._rank not in (None, 0):
            self._store = Store.replica()
        elif self.resume:
            self._store = Store.resume(self.resume, self.facts)
        elif self.out:
            self.out /= self.suffix
            require_empty(self.out)
            if self._rank == 0:
                self._store = Store.create(self.out, self.facts)

    @property
    def exports(self) -> bool:
        """Return whether this process writes the results; only the first rank of torchrun does."""
        return self._rank in (None, 0)

    @property
    def store(self) -> Store:
        """Return the store, made at the first use."""
        if self._store is None:
            folder = self.out or new_folder(self.facts, self.suffix)
            self._store = Store.create(folder, self.facts)
        return self._store

    def measure(self, report: Report) -> None:
        """Measure what the store lacks, with each number of ranks in turn, in new processes.

        Under torchrun this process measures as one of the ranks.
        """
        if self._rank is not None:
            self._measure_as_rank(self._rank, report)
            return
        for degree in self._degrees():
            problems = [problem for problem in self.job.plan.problems if problem.tp == degree]
            last = self._store.interrupted if self._store else None
            cells = self._unmeasured(degree)
            plan = replace(self.job.plan, problems=problems, providers=[], last=last)
            indices = self.job.indices[:degree] if self.job.together else self.job.indices
            job = replace(self.job, plan=plan, indices=indices)
            supervisor.measure(job, lambda: self.store, report, cells)

    def _degrees(self) -> list[int]:
        return list(dict.fromkeys(problem.tp for problem in self.job.plan.problems))

    def _unmeasured(self, degree: int) -> list[Cell]:
        """Return the cells that lack rounds, for compiling ahead."""
        job = self.job
        cells = job.plan.cells(self.facts["gpu"], job.timer, job.l2)
        records = self._store.records if self._store else []
        complete = {r.cell for r in records if r.rounds.keys() >= set(range(job.plan.rounds))}
        return [cell for cell in cells if cell.problem.tp == degree and cell not in complete]

    def _measure_as_rank(self, rank: int, report: Report) -> None:
        compilers.settle()
        store = self.store
        recorder = Recorder(store, begin=store.begin)
        if rank == 0:
            recorder.report = report.report
            recorder.finished = lambda cell: report.finished(store.record(cell))
        job = replace(self.job, plan=replace(self.job.plan, providers=[], last=store.interrupted))
        runner = ready_runner(job, rank, "env://", recorder)
        assert recorder.team is not None
        records, last = recorder.team.gather((store.records, store.interrupted))[0]
        store.replace_records(records)
        runner.plan = replace(runner.plan, last=last)
        carry_out(runner)

    def export(self) -> tuple[pd.DataFrame, list[CellRecord], list[Path]]:
        """Write results.csv and breakdown.csv; return the rows, the records and further files."""
        folder, records = self.store.folder, self.store.records
        table = summary.export_csv(folder, records)
        kernels = breakdown.export_csv(folder, records)
        return table, records, [kernels] if kernels else []

    def advice(self) -> str:
        """Return how to continue a stopped run; "" if it has no folder yet."""
        if self._store is None or not self.exports:
            return ""
        folder = self._store.folder
        if not self._store.is_in_place():
            return f"{folder} was moved or changed: resume it where it is, or start another"
        return f"to continue: fsbench run --resume {shlex.quote(str(folder))}"

    def close(self) -> None:
        """Close the store; the folder can be read and resumed."""
        if self._store is not None:
            self._store.close()
