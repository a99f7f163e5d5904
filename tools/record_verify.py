"""Record `fsbench verify` of every sampler that can run here.

python tools/record_verify.py FOLDER --device cuda --tier ci --jobs 6

Each sampler has a process of its own; `--jobs` of them run side by side, which changes how long
they take and nothing else. FOLDER/NAME.jsonl is a sampler's record. At the end they become
FOLDER/verify.csv, a row for each check and one for the conclusion, and FOLDER/env.json. The same
command again runs only the samplers without a conclusion. Exit code 1 if one is missing at the end,
or rejected.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

FIELDS = ("sampler", "check", "verdict", "draws", "p_value", "seconds", "detail")
FSBENCH = (sys.executable, "-m", "fsbench")


def samplers(device: str) -> list[str]:
    """All that can be judged on this machine, the slow ones first: those of many checks."""
    out = subprocess.run([*FSBENCH, "list", "--json"], capture_output=True, text=True, check=True)
    found = [
        each
        for each in json.loads(out.stdout)["providers"]
        if each["kind"] != "lower_bound" and each[device] == "yes"
    ]
    found.sort(key=lambda each: (not each["capabilities"].get("noise"), each["name"]))
    return [each["name"] for each in found]


def lines(path: Path) -> list[dict[str, Any]]:
    """The record of one sampler; empty unless it has its last line."""
    if not path.exists():
        return []
    try:
        read = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError:  # killed while it wrote
        return []
    return read if read and {"conclusion", "skipped"} & set(read[-1]) else []


def judge(name: str, folder: Path, options: Sequence[str], timeout: float) -> str:
    """One sampler in a process of its own; what is to be said of it."""
    path = folder / f"{name}.jsonl"
    if not lines(path):
        path.unlink(missing_ok=True)
        command = [*FSBENCH, "verify", "--provider", name, "--output", str(path), *options]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, env=environ
            )
        except subprocess.TimeoutExpired:
            return f"{name}: not judged: no end within {timeout:g} s"
        if not lines(path):
            said = done.stderr.strip().splitlines() or ["no reason given"]
            return f"{name}: not judged: exit code {done.returncode}: {said[-1]}"
    last = lines(path)[-1]
    return f"{name} {last.get('conclusion') or last['skipped']}"


def collect(folder: Path, names: Sequence[str]) -> bool:
    """Write verify.csv and env.json of the samplers judged; whether all were, and passed.

    Raises:
        SystemExit: they were judged by different commits or on different GPUs.
    """
    rows, environments, settings, passed = [], [], [], True
    for name in names:
        record = lines(folder / f"{name}.jsonl")
        passed &= bool(record)
        for line in record:
            if "environment" in line:
                environments.append(line["environment"])
                settings.append(line["setting"])
            elif "verdict" in line:
                rows.append([name, line["name"], *(line[field] for field in FIELDS[2:])])
            elif "conclusion" in line:
                verdict, _, said = line["conclusion"].partition(": ")
                rows.append([name, "conclusion", verdict, "", "", "", said])
                passed &= verdict == "passed"
    for part in ("git_sha", "gpu", "cpu"):
        seen = {str(environment[part]) for environment in environments}
        if len(seen) > 1:
            sys.exit(f"{folder}: expected records of one {part}; got {', '.join(sorted(seen))}")
    if not environments or any(setting != settings[0] for setting in settings):
        sys.exit(f"{folder}: expected records of one tier, dtype and temperatures")
    with open(folder / "verify.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([FIELDS, *rows])
    env = {**environments[0], "argv": sys.argv, "setting": settings[0]}
    (folder / "env.json").write_text(json.dumps(env, indent=1) + "\n", encoding="utf-8")
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tier", default="ci")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--provider", action="append", help="default: all")
    parser.add_argument("--jobs", type=int, default=6, help="processes side by side")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one sampler")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    names = given.provider or samplers(given.device)
    options = ("--device", given.device, "--tier", given.tier, "--dtype", given.dtype)
    run = partial(judge, folder=given.folder, options=options, timeout=given.timeout)
    with ThreadPoolExecutor(given.jobs) as pool:
        for said in pool.map(run, names):
            print(said, flush=True)
    sys.exit(not collect(given.folder, names))


if __name__ == "__main__":
    main()
