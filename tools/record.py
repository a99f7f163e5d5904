"""Repeat the measurements of results/ on a machine with GPUs: the jobs of record.toml, in order.

    python tools/record.py                             # everything, however long it takes
    python tools/record.py --minutes 9 --only 'paper,lean,verify-*'
    python tools/record.py --list --gpu h100           # seconds that jobs take there
    python tools/record.py --dry-run                   # what would be called

Results are written to results/<gpu>/, the output of jobs to log/ in it. For each job, record.json
has the path of its results, the commit, the seconds and, once it has ended, its exit code (a
sampler that fails verification is a result, too). A later call continues an `fsbench run` or `e2e`
that was stopped, and repeats other jobs. Without a GPU, pass --folder and --jobs: jobs for a CPU.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from record_jobs import ROOT, Job, chosen, fill, read_jobs

from fsbench.e2e.records import STEPS
from fsbench.machine import hardware
from fsbench.machine.environment import git_state
from fsbench.records.disk import write_atomically
from fsbench.records.iomodel import gpu_slug
from fsbench.records.store import POINTS

# Code that must stay the same while a folder is measured; peaks.toml is derived from its results.
CODE = ("kernels", "baselines", "fsbench", ":!fsbench/records/peaks.toml")
OF_ENGINES = "fsbench/e2e"
UNTIMED_PER_GPU = 8
WORTH_S = 120  # enough for a run that can be continued, however long it takes
GRACE_S = 30  # between the request to stop and the kill


class Started(NamedTuple):
    """A running job. began: time.monotonic() of its start."""

    job: Job
    gpus: list[str]
    process: subprocess.Popen[bytes]
    began: float


def commit_here() -> str:
    """Return FSBENCH_COMMIT or this tree's commit, with -dirty if its code was changed."""
    if commit := os.environ.get("FSBENCH_COMMIT"):
        return commit
    sha, dirty = git_state(ROOT)
    if not sha:
        raise SystemExit("record: this tree has no git commit; set FSBENCH_COMMIT")
    return f"{sha}-dirty" if dirty else sha


def same_code(a: str, b: str, job: Job) -> bool:
    """Return whether two commits have the same code for a job; without git, whether a is b."""
    code = CODE if job.needs == "vllm" else (*CODE, f":!{OF_ENGINES}")
    diff = ["git", "-C", str(ROOT), "diff", "--quiet", a, b, "--", *code]
    return a == b or not subprocess.run(diff, stderr=subprocess.DEVNULL).returncode


def read_state(folder: Path) -> dict[str, Any]:
    """Return the record.json of a folder: job -> facts."""
    path = folder / "record.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


class Recorder:
    """Runs jobs on these GPUs and keeps record.json (`state`) of a folder.

    Args:
        read_only: start no job, and take no lock.
        compiled: start `fsbench run` without processes that compile.
    """

    def __init__(
        self,
        folder: Path,
        gpus: list[str],
        commit: str,
        read_only: bool = False,
        compiled: bool = False,
    ):
        self.folder, self.gpus, self.commit, self.compiled = folder, gpus, commit, compiled
        self.running: list[Started] = []
        if not read_only:
            self._lock()
        self.state = read_state(folder)

    def _lock(self) -> None:
        (self.folder / "log").mkdir(parents=True, exist_ok=True)
        # Jobs inherit the lock: if this process is killed, no call starts jobs next to orphans.
        self.lock = open(self.folder / "log" / "lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            message = f"record: {self.folder}: another call, or a job that it left, is running"
            raise SystemExit(f"{message}; wait for it or end it") from None

    def note(self, job: Job, **facts: Any) -> None:
        """Add facts of a job to record.json."""
        self.state[job.name] = {**self.state.get(job.name, {}), **facts}
        write_atomically(self.folder / "record.json", json.dumps(self.state, indent=1) + "\n")

    def run(self, jobs: list[Job], minutes: float) -> None:
        """Start each job once a GPU is free, until all have ended or the time is over."""
        deadline = time.monotonic() + 60 * minutes
        waiting = list(jobs)
        try:
            while (remaining_s := deadline - time.monotonic()) > 0:
                self.reap()
                for job in list(waiting):
                    # A job that was stopped needs more than the time that it had.
                    spent = self.state.get(job.name, {}).get("seconds", 0)
                    most = WORTH_S if job.resume_command else math.inf
                    needs = min(max(job.seconds, spent), most)
                    if needs <= remaining_s and (gpus := self.free(job)):
                        waiting.remove(job)
                        self.start(job, gpus)
                if not self.running:
                    break
                time.sleep(0.1)
        finally:
            self.stop()

    def free(self, job: Job) -> list[str]:
        """Return the GPUs on which a job may start now; none if it has to wait."""
        if job.alone or any(each.job.alone for each in self.running):
            return [] if self.running else self.gpus
        on = {gpu: [each.job for each in self.running if gpu in each.gpus] for gpu in self.gpus}
        for gpu in sorted(self.gpus, key=lambda gpu: len(on[gpu])):
            shared = job.untimed and all(each.untimed for each in on[gpu])
            if len(on[gpu]) < (UNTIMED_PER_GPU if shared else 1):
                return [gpu]
        return []

    def cores(self, gpus: list[str]) -> set[int]:
        """Return the share of these GPUs in the cores, so that no job's compilers slow another."""
        cores = sorted(os.sched_getaffinity(0))
        owner = {core: n * len(self.gpus) // len(cores) for n, core in enumerate(cores)}
        # A GPU has no share if there are fewer cores than GPUs.
        return {core for core in cores if self.gpus[owner[core]] in gpus} or set(cores)

    @contextmanager
    def on_cores_of(self, gpus: list[str]) -> Iterator[None]:
        """Be on the `cores` of these GPUs, which a process that is started inherits."""
        if not hasattr(os, "sched_setaffinity"):  # not Linux
            return (yield)
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores(gpus))
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def start(self, job: Job, gpus: list[str]) -> None:
        """Start a job, or continue it."""
        out, command = self.call(job)
        if job.name in self.state and out.is_dir() and "--resume" not in command:
            shutil.rmtree(out)  # left by this job when it was stopped
        elif out.is_file():  # some programs append
            out.unlink()
        out.parent.mkdir(parents=True, exist_ok=True)
        self.note(job, out=str(out.relative_to(self.folder)), commit=self.commit)
        began = time.monotonic()
        with open(self.folder / "log" / f"{job.name}.txt", "ab") as log, self.on_cores_of(gpus):
            process = subprocess.Popen(
                ["bash", "-c", command],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[self.lock.fileno()],
            )
        self.running.append(Started(job, gpus, process, began))
        print(f"{job.name}: started on GPU {','.join(gpus)}", flush=True)

    def call(self, job: Job) -> tuple[Path, str]:
        """Return the path that a job writes to, and its command."""
        entry = self.state.get(job.name)
        out = self.folder / (entry["out"] if entry else self.unused(job))
        if entry and job.resume_command and (out / "env.json").exists():
            return out, f"{job.resume_command} --resume {shlex.quote(str(out))}"
        degrees = ",".join(str(n) for n in (1, 2, 4, 8) if n <= len(self.gpus))
        command = fill(job.command, out=shlex.quote(str(out)), degrees=degrees)
        without = self.compiled and job.resume_command.endswith("fsbench run")
        return out, f"{command} --warmers 0" if without else command

    def unused(self, job: Job) -> str:
        """Return a path for a job's results: NAME-DATE, with the time too if that exists."""
        now = datetime.now(UTC)
        out = fill(job.out, date=f"{now:%Y%m%d}")
        return fill(job.out, date=f"{now:%Y%m%dT%H%M%S}") if (self.folder / out).exists() else out

    def reap(self, stopped: bool = False) -> None:
        """Note the seconds and exit codes of jobs that have ended, or that were `stopped`."""
        for started in [each for each in self.running if each.process.poll() is not None]:
            self.running.remove(started)
            job, code = started.job, started.process.returncode
            seconds = round(time.monotonic() - started.began, 1)
            ended = {} if stopped and code else {"exit": code}
            self.note(job, seconds=self.state[job.name].get("seconds", 0) + seconds, **ended)
            print(f"{job.name}: {state_of(ended)} after {seconds:.0f} s", flush=True)
            if ended:
                pack(self.folder / self.state[job.name]["out"])

    def stop(self) -> None:
        """Interrupt running jobs as Ctrl-C does, and kill those that continue."""
        self.reap()
        for request in (signal.SIGINT, signal.SIGKILL):
            for started in self.running:
                os.killpg(started.process.pid, request)
            until = time.monotonic() + GRACE_S
            while self.running and time.monotonic() < until:
                time.sleep(0.1)
                self.reap(stopped=True)


def pack(out: Path) -> None:
    """Pack the samples of a run that will not be continued, and remove its tables of speedups."""
    for samples in (out / POINTS, out / STEPS):
        if samples.exists():
            write_atomically(Path(f"{samples}.gz"), gzip.compress(samples.read_bytes(), mtime=0))
            samples.unlink()
    for table in out.glob("speedup_*"):
        table.unlink()


def state_of(entry: dict[str, Any]) -> str:
    return f"exit {entry['exit']}" if "exit" in entry else "stopped"


def main(arguments: list[str] | None = None) -> None:
    """Parse the options, and run, list or print the jobs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=math.inf, help="end this call then")
    parser.add_argument("--only", default="*", help="names of jobs, comma list; * matches anything")
    parser.add_argument("--list", action="store_true", help="print the state of each job and exit")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and exit")
    parser.add_argument("--gpu", help="with --list: the GPU, such as h100")
    parser.add_argument("--again", action="store_true", help="repeat jobs that other code measured")
    parser.add_argument("--compiled", action="store_true", help="tools/compile_jobs.py has ended")
    parser.add_argument("--folder", type=Path, help="default: results/<gpu>")
    parser.add_argument("--jobs", type=Path, help="default: tools/record.toml")
    args = parser.parse_args(arguments)
    gpus = hardware.gpus()
    gpu = args.gpu or (gpu_slug(gpus[0].name) if gpus else "")
    read_only = args.list or args.dry_run
    if not (gpus or (args.folder and args.jobs) or (read_only and (gpu or args.folder))):
        others = "without one, pass --folder and --jobs, or --list --gpu NAME"
        raise SystemExit(f"record: expected an NVIDIA GPU; {hardware.nvml_problem()}; {others}")
    folder = args.folder.resolve() if args.folder else Path("results") / gpu
    table = (args.jobs or Path(__file__).with_suffix(".toml")).resolve()
    os.chdir(ROOT)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(gpu.index) for gpu in gpus)
    if not shutil.which("fsbench"):
        raise SystemExit("record: expected fsbench on PATH; `make record` puts it there")
    jobs = chosen(read_jobs(table, gpu), args.only.split(","))
    commit = commit_here()
    if args.list:
        show(jobs, read_state(folder), commit)
        return
    recorder = Recorder(folder, visible.split(","), commit, read_only, args.compiled)
    if args.dry_run:
        for job in jobs:
            if "exit" not in recorder.state.get(job.name, {}):
                print(f"{job.name}: {recorder.call(job)[1]}")
        return
    jobs = [job for job in jobs if job.gpus <= len(recorder.gpus) and not job.lacks_needs]
    outdated = [
        job.name
        for job in jobs
        if job.name in recorder.state
        if not same_code(recorder.state[job.name]["commit"], commit, job)
    ]
    if outdated and not args.again:
        raise SystemExit(
            f"record: {', '.join(outdated)}: measured with other code than that of {commit[:7]}; "
            "pass --again, leave them out by --only, or take another --folder"
        )
    for name in outdated:
        del recorder.state[name]
    # Background jobs of a shell ignore SIGINT, and the processes started below would inherit that.
    for request in (signal.SIGINT, signal.SIGTERM):
        signal.signal(request, signal.default_int_handler)
    to_do = [job for job in jobs if "exit" not in recorder.state.get(job.name, {})]
    recorder.run(to_do, args.minutes)
    show(jobs, recorder.state, commit)


def show(jobs: list[Job], state: dict[str, Any], commit: str) -> None:
    """Print a line for each job: its expected seconds, results and state; and the sum."""
    to_do_s = 0.0
    for job in jobs:
        entry = state.get(job.name, {})
        status = "to do" if job.gpus == 1 else f"to do on {job.gpus} GPUs"
        if job.lacks_needs:
            status = f"needs {job.needs}"
        elif entry:
            changed = "" if same_code(entry["commit"], commit, job) else ", other code"
            seconds = f"{entry.get('seconds', 0):.0f} s"
            status = f"{state_of(entry)}, {seconds}, commit {entry['commit'][:7]}{changed}"
        if "exit" not in entry and not job.lacks_needs:
            to_do_s += job.seconds / (UNTIMED_PER_GPU if job.untimed else 1)
        out = entry.get("out", fill(job.out, date="DATE"))
        print(f"{job.name:<34}{job.seconds:>5g} s  {out:<40}  {status}")
    print(f"{to_do_s:.0f} s to do on one GPU")


if __name__ == "__main__":
    main()
