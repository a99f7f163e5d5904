"""The jobs of record.toml: what they call, how long they take, which of them are chosen."""

from __future__ import annotations

import re
import shutil
import tomllib
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsbench.discover import discover, load
from fsbench.problem import models
from fsbench.provider import Kind

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Job:
    """A table of record.toml, which describes the fields."""

    name: str
    command: str
    seconds: float
    out: str = "{name}-{date}"
    gpus: int = 1
    alone: bool = False
    untimed: bool = False
    needs: str = ""

    @property
    def resume_command(self) -> str:
        """The start of the command, with its variables, if --resume continues it; else ''."""
        start = re.match(r"([A-Z\d_]+=\S+ )*fsbench (run|e2e)(?= )", self.command)
        return start[0] if start else ""

    @property
    def lacks_needs(self) -> bool:
        """Whether the Python package or program that it needs is missing."""
        return bool(self.needs and not (find_spec(self.needs) or shutil.which(self.needs)))


def fill(text: str, **words: Any) -> str:
    """Replace {name} by its word; names without a word are kept."""
    for name, word in words.items():
        text = text.replace(f"{{{name}}}", str(word))
    return " ".join(text.split())


def read_jobs(path: Path, gpu: str) -> list[Job]:
    """Return the jobs of a TOML file, one for every value of `each`.

    Args:
        gpu: slug of the GPU, which scales the expected seconds.
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
            job_words = {"each": each, **words, "name": job.name, "key": key}
            command, out = (fill(text, **job_words) for text in (job.command, job.out))
            seconds = round(job.seconds * slower)
            jobs.append(replace(job, command=command, out=out, seconds=seconds))
    return jobs


def cases(name: str) -> str:
    """Return the options of `fsbench run` for all samplers of a file in tools/cases."""
    if not name:
        return ""
    path = f"tools/cases/{name}.py"
    entries = load(name, path, ROOT / path)
    return " ".join([f"--provider-path {path}", *(f"--provider {each.name}" for each in entries)])


def chosen(jobs: list[Job], patterns: list[str]) -> list[Job]:
    """Return the jobs that match a pattern; exit if a pattern matches none."""
    for pattern in patterns:
        if not any(fnmatch(job.name, pattern) for job in jobs):
            raise SystemExit(f"--only: no job is {pattern!r}; --list names them")
    return [job for job in jobs if any(fnmatch(job.name, pattern) for pattern in patterns)]


def samplers() -> list[str]:
    """Return the exact and greedy samplers whose steps the GPU runs without the host.

    A step that waits for the host takes too long for as many draws; CI verifies those on CPUs.
    """
    return [
        name
        for name, entry in discover().items()
        if entry.provider is not None and entry.unavailable_reason("cuda") is None
        if entry.provider.kind in (Kind.EXACT, Kind.GREEDY)
        if entry.provider.capabilities.graph_safe or entry.provider.capabilities.host_sync_free
        if name != "scaled_matmul"  # takes quantized heads only
    ]
