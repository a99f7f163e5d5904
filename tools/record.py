"""Measures a machine with GPUs anew, job by job: the jobs of record.toml, in its order.

    python tools/record.py                             # everything, however long it takes
    python tools/record.py --minutes 9 --only 'paper,lean,verify-*'
    python tools/record.py --list --gpu h100           # seconds that jobs take there
    python tools/record.py --dry-run                   # what would be called

Results go to results/<gpu>/, what jobs print to log/ there. record.json has of each job its
results, commit, seconds and, once it has ended, its exit code. A job that failed has ended too: a
sampler that fails verification is a result. A later call goes on with what has not ended: it
continues a `fsbench run` that was stopped, and begins other jobs anew. Without a GPU it needs
--folder and --jobs: jobs for a CPU.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
import tomllib
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fsbench.discover import load
from fsbench.machine import hardware
from fsbench.machine.environment import git_state
from fsbench.problem import models
from fsbench.records.disk import write_atomically
from fsbench.records.iomodel import gpu_slug

ROOT = Path(__file__).resolve().parents[1]
CODE = ("kernels", "baselines", "fsbench")  # what must not change while a folder is measured
SIDE_BY_SIDE = 8  # untimed jobs on a GPU
WORTH_S = 120  # less is not worth the start of a run that can be continued
GRACE_S = 30  # between the request to stop and the kill


@dataclass(frozen=True)
class Job:
    """A table of record.toml, which tells what the fields are."""

    name: str
    command: str
    seconds: float
    out: str = "{name}-{date}"
    gpus: int = 1
    alone: bool = False
    untimed: bool = False
    needs: str = ""

    @property
    def resumable(self) -> bool:
        """Whether `fsbench run --resume` continues it."""
        return self.command.startswith("fsbench run ")

    @property
    def lacking(self) -> bool:
        """Whether this environment has not what it needs: a Python package or a program."""
        return bool(self.needs and not (find_spec(self.needs) or shutil.which(self.needs)))


class Started(NamedTuple):
    """A job that runs on these GPUs since `began` (monotonic)."""

    job: Job
    gpus: list[str]
    process: subprocess.Popen[bytes]
    began: float


def fill(text: str, **words: Any) -> str:
    """The text with words for their names in braces; names without a word stay."""
    for name, word in words.items():
        text = text.replace(f"{{{name}}}", str(word))
    return " ".join(text.split())


def read_jobs(path: Path, gpu: str) -> list[Job]:
    """The jobs of a TOML file; one for every value of `each`.

    gpu: its slug, for how long they take.
    """
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    words = {**tables.pop("words", {}), "models": ",".join(models())}
    slower = tables.pop("slower", {}).get(gpu, 1)
    jobs = []
    for name, table in tables.items():
        words["cases"] = cases(table.pop("cases", ""))
        values = table.pop("each", {"": ""})
        values = samplers() if values == "samplers" else values
        for key in values:
            job = Job(f"{name}-{key}".replace(":", "-") if key else name, **table)
            each = values[key] if isinstance(values, dict) else key
            own = {"each": each, **words, "name": job.name, "key": key}
            command, out = fill(job.command, **own), fill(job.out, **own)
            seconds = round(job.seconds * slower)
            jobs.append(replace(job, command=command, out=out, seconds=seconds))
    return jobs


def cases(name: str) -> str:
    """The options of `fsbench run` for all samplers of a file in tools/cases; "" for none."""
    if not name:
        return ""
    path = f"tools/cases/{name}.py"
    found = load(name, path, "file", str(ROOT / path))
    return " ".join([f"--provider-path {path}", *(f"--provider {each.name}" for each in found)])


def chosen(jobs: list[Job], patterns: list[str]) -> list[Job]:
    """The jobs that match a pattern, each of which has to match one."""
    for pattern in patterns:
        if not any(fnmatch(job.name, pattern) for job in jobs):
            raise SystemExit(f"record: --only: no job is {pattern!r}; --list names them")
    return [job for job in jobs if any(fnmatch(job.name, pattern) for pattern in patterns)]


def samplers() -> list[str]:
    """Exact and greedy samplers of the GPU. Those of the host take hours; CI verifies them."""
    listed = subprocess.run(["fsbench", "list", "--json"], stdout=subprocess.PIPE, check=True)
    return [
        each["name"]
        for each in json.loads(listed.stdout)["providers"]
        if each["kind"] in ("exact", "greedy") and each["cuda"] == "yes"
        if each["capabilities"].get("graph_safe", True)
        if each["name"] != "scaled_matmul"  # which takes quantized heads alone
    ]


def commit_here() -> str:
    """FSBENCH_COMMIT, or this tree's commit, with -dirty if its code differs from that."""
    if told := os.environ.get("FSBENCH_COMMIT"):
        return told
    sha, dirty = git_state(ROOT)
    if not sha:
        raise SystemExit("record: expected FSBENCH_COMMIT where git does not tell the commit")
    return f"{sha}-dirty" if dirty else sha


def same_code(a: str, b: str) -> bool:
    """Whether two commits have the same code; without git, whether they are the same."""
    diff = ["git", "diff", "--quiet", a, b, "--", *CODE]
    return a == b or not subprocess.run(diff, stderr=subprocess.DEVNULL).returncode


def read_state(folder: Path) -> dict[str, Any]:
    """The record.json of a folder, by job."""
    path = folder / "record.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


class Recorder:
    """The jobs of one folder on these GPUs. state: its record.json. looks: begins no job."""

    def __init__(self, folder: Path, gpus: list[str], commit: str, looks: bool = False):
        self.folder, self.gpus, self.commit = folder, gpus, commit
        self.running: list[Started] = []
        if not looks:
            self._lock()
        self.state = read_state(folder)

    def _lock(self) -> None:
        folder = self.folder
        (folder / "log").mkdir(parents=True, exist_ok=True)
        # Jobs inherit it: should this process be killed, none is begun beside those it leaves.
        self.lock = open(folder / "log" / "lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"record: another call measures {folder}, or jobs it left") from None

    def note(self, job: Job, **facts: Any) -> None:
        """Add facts of a job to record.json."""
        self.state[job.name] = {**self.state.get(job.name, {}), **facts}
        write_atomically(self.folder / "record.json", json.dumps(self.state, indent=1) + "\n")

    def run(self, jobs: list[Job], minutes: float) -> None:
        """Begin each job once it has a GPU, until all have ended or the time is over."""
        deadline = time.monotonic() + 60 * minutes
        waiting = list(jobs)
        try:
            while (left := deadline - time.monotonic()) > 0:
                self.reap()
                for job in list(waiting):
                    spent = self.state.get(job.name, {}).get("seconds", 0)  # not enough
                    needs = WORTH_S if job.resumable else max(job.seconds, spent)
                    if needs <= left and (gpus := self.free(job)):
                        waiting.remove(job)
                        self.begin(job, gpus)
                if not self.running:
                    break
                time.sleep(0.1)
        finally:
            self.stop()

    def free(self, job: Job) -> list[str]:
        """The GPUs on which a job may begin now; none if it has to wait."""
        if job.alone or any(each.job.alone for each in self.running):
            return [] if self.running else self.gpus
        on = {gpu: [each.job for each in self.running if gpu in each.gpus] for gpu in self.gpus}
        for gpu in sorted(self.gpus, key=lambda gpu: len(on[gpu])):
            shared = job.untimed and all(each.untimed for each in on[gpu])
            if len(on[gpu]) < (SIDE_BY_SIDE if shared else 1):
                return [gpu]
        return []

    def begin(self, job: Job, gpus: list[str]) -> None:
        """Start a job, or continue it."""
        known = job.name in self.state
        out, command = self.call(job)
        if (
            known and out.is_dir() and "--resume" not in command
        ):  # what this job left when it was stopped
            shutil.rmtree(out)
        elif out.is_file():  # some programs append
            out.unlink()
        out.parent.mkdir(parents=True, exist_ok=True)
        self.note(job, out=str(out.relative_to(self.folder)), commit=self.commit)
        began = time.monotonic()
        with open(self.folder / "log" / f"{job.name}.txt", "ab") as log:
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
        print(f"{job.name}: begins on GPU {','.join(gpus)}", flush=True)

    def call(self, job: Job) -> tuple[Path, str]:
        """(where it writes, the command)."""
        known = job.name in self.state
        out = self.folder / (self.state[job.name]["out"] if known else self.unused(job))
        if known and job.resumable and (out / "env.json").exists():
            return out, f"fsbench run --resume {shlex.quote(str(out))}"
        degrees = ",".join(str(n) for n in (1, 2, 4, 8) if n <= len(self.gpus))
        return out, fill(job.command, out=shlex.quote(str(out)), degrees=degrees)

    def unused(self, job: Job) -> str:
        """Where a job writes: NAME-DATE, or with the time, too, if that exists."""
        now = datetime.now(UTC)
        out = fill(job.out, date=f"{now:%Y%m%d}")
        return fill(job.out, date=f"{now:%Y%m%dT%H%M%S}") if (self.folder / out).exists() else out

    def reap(self, stopped: bool = False) -> None:
        """Note what the jobs took that run no more. stopped: they did not end by themselves."""
        for started in [each for each in self.running if each.process.poll() is not None]:
            self.running.remove(started)
            job, code = started.job, started.process.returncode
            seconds = round(time.monotonic() - started.began, 1)
            ended = {} if stopped and code else {"exit": code}
            self.note(job, seconds=self.state[job.name].get("seconds", 0) + seconds, **ended)
            print(f"{job.name}: {state_of(ended)} after {seconds:.0f} s", flush=True)

    def stop(self) -> None:
        """Interrupt what runs, as Ctrl-C does; kill what does not heed that."""
        self.reap()
        for request in (signal.SIGINT, signal.SIGKILL):
            for started in self.running:
                os.killpg(started.process.pid, request)
            until = time.monotonic() + GRACE_S
            while self.running and time.monotonic() < until:
                time.sleep(0.1)
                self.reap(stopped=True)


def state_of(entry: dict[str, Any]) -> str:
    return f"exit {entry['exit']}" if "exit" in entry else "stopped"


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end this call then")
    parser.add_argument("--only", default="*", help="these jobs, comma list; * matches anything")
    parser.add_argument("--list", action="store_true", help="tell what is done, begin nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, begin nothing")
    parser.add_argument("--gpu", help="with --list: seconds and results of this one, as h100")
    parser.add_argument("--again", action="store_true", help="measure anew what other code did")
    parser.add_argument("--folder", type=Path, help="default: results/<gpu>")
    parser.add_argument("--jobs", type=Path, help="default: tools/record.toml")
    given = parser.parse_args(arguments)
    gpus = hardware.gpus()
    gpu = given.gpu or (gpu_slug(gpus[0].name) if gpus else "")
    looks = given.list or given.dry_run
    if not (gpus or (given.folder and given.jobs) or (looks and (gpu or given.folder))):
        raise SystemExit(
            f"record: expected an NVIDIA GPU; {hardware.nvml_problem()}; without one: --folder and "
            "--jobs, or --list --gpu NAME"
        )
    folder = given.folder.resolve() if given.folder else Path("results") / gpu
    table = (given.jobs or Path(__file__).with_suffix(".toml")).resolve()
    os.chdir(ROOT)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(gpu.index) for gpu in gpus)
    if not shutil.which("fsbench"):
        raise SystemExit("record: expected fsbench on PATH; `make record` puts it there")
    jobs = chosen(read_jobs(table, gpu), given.only.split(","))
    commit = commit_here()
    if given.list:
        show(jobs, read_state(folder), commit)
        return
    recorder = Recorder(folder, visible.split(","), commit, looks)
    if given.dry_run:
        for job in jobs:
            if "exit" not in recorder.state.get(job.name, {}):
                print(f"{job.name}: {recorder.call(job)[1]}")
        return
    jobs = [job for job in jobs if job.gpus <= len(recorder.gpus) and not job.lacking]
    known = {job.name: recorder.state[job.name] for job in jobs if job.name in recorder.state}
    other = [name for name, entry in known.items() if not same_code(entry["commit"], commit)]
    if other and not given.again:
        raise SystemExit(
            f"record: {', '.join(other)}: measured with other code than that of {commit[:7]}; "
            "measure them --again, leave them out by --only, or take another --folder"
        )
    for name in other:
        del recorder.state[name]
    # A shell's background has jobs ignore SIGINT, which they would inherit.
    for request in (signal.SIGINT, signal.SIGTERM):
        signal.signal(request, signal.default_int_handler)
    recorder.run(
        [job for job in jobs if "exit" not in recorder.state.get(job.name, {})], given.minutes
    )
    show(jobs, recorder.state, commit)


def show(jobs: list[Job], state: dict[str, Any], commit: str) -> None:
    """Print a line for each job: its expected seconds, what is done, its results; and the sum."""
    left = 0.0
    for job in jobs:
        entry = state.get(job.name, {})
        told = "to do" if job.gpus == 1 else f"to do on {job.gpus} GPUs"
        if job.lacking:
            told = f"needs {job.needs}"
        elif entry:
            changed = "" if same_code(entry["commit"], commit) else ", other code"
            seconds = f"{entry.get('seconds', 0):.0f} s"
            told = f"{state_of(entry)}, {seconds}, commit {entry['commit'][:7]}{changed}"
        if "exit" not in entry and not job.lacking:
            left += job.seconds / (SIDE_BY_SIDE if job.untimed else 1)
        out = entry.get("out", fill(job.out, date="DATE"))
        print(f"{job.name:<34}{job.seconds:>5g} s  {out:<40}  {told}")
    print(f"{left:.0f} s to do on one GPU")


if __name__ == "__main__":
    main()
