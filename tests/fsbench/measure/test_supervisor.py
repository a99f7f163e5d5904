"""A rank's failure while another still works, with threads in place of ranks."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace

from cells import cell

from fsbench.measure import supervisor
from fsbench.measure.plan import Job
from fsbench.measure.recorder import Recorder
from fsbench.records.store import Store


@dataclass(frozen=True)
class Plan:
    given_up: frozenset[str] = frozenset()
    check: bool = False


class Rank:
    """A thread with what the supervisor uses of a process."""

    pid, exitcode = 2**22 + 1, None  # above the largest pid

    def __init__(self, target, args, daemon):
        *names, line = args
        child_end = Connection(os.dup(line.fileno()))  # the supervisor closes its copy
        self._thread = threading.Thread(target=target, args=(*names, child_end), daemon=daemon)
        self.sentinel, self._other_end = os.pipe()

    def start(self):
        self._thread.start()

    def kill(self):
        os.close(self.sentinel)
        os.close(self._other_end)

    def join(self):
        """It may be waiting for a rank that has failed."""


class Played:
    """A run of one cell, at which rank 1 fails before rank 0 has said what it does."""

    def __init__(self):
        self.statuses, self.records, self._lines = [], [], []
        self._begun = threading.Event()

    def begin(self, cell):
        self._begun.set()

    def append_status(self, *status):
        self.statuses.append(status)

    def main(self, job, rank, meet, line):
        self._lines.append(line)  # open, as that of a rank that waits for another
        if job.plan.given_up:
            line.send(("done", ()))
        elif rank == 1:
            self._begun.wait()
            line.send(("trouble", ("check_failed", "wrong tokens")))
        else:
            line.send(("cell", ("the cell",)))
            line.recv()
            time.sleep(0.2)  # sooner, and it is not the message that this is about
            line.send(("progress", (0.5, 1, "still at it", None)))


def test_a_failure_is_not_forgotten_while_another_rank_goes_on(monkeypatch):
    played = Played()
    monkeypatch.setattr(supervisor, "GRACE", 0.3)
    monkeypatch.setattr(supervisor.worker, "main", played.main)
    context = SimpleNamespace(Pipe=Pipe, Process=Rank)
    monkeypatch.setattr(supervisor.server, "start", lambda: context)
    report = SimpleNamespace(report=lambda *progress: None, finished=lambda *cell: None)
    job = Job(Plan(), [], [], "cpu", [0, 1], "cpu", "cold", seconds=20.0, together=True)
    supervisor.measure(job, lambda: played, report)
    assert played.statuses == [("the cell", "check_failed", "rank 1: wrong tokens")]


class Threads:
    """A team whose ranks are two threads."""

    def __init__(self):
        self._barrier = threading.Barrier(2)

    def gather(self, value):
        self._barrier.wait(20)
        return [None, None]


def test_no_rank_works_on_a_cell_before_its_name_is_known():
    """If it dies, the cell before would be given up in its place."""
    events, team = [], Threads()

    def begin(named):
        time.sleep(0.2)
        events.append("known")

    def work():
        events.append("work")

    ranks = [
        Recorder(Store.replica(), team=team, **({"begin": begin} if rank == 0 else {}))
        for rank in range(2)
    ]
    threads = [
        threading.Thread(target=rank.part, args=(cell(tp=2), "", "timing", work)) for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events == ["known", "work", "work"]
