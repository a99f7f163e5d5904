"""`fsbench run --tp` over processes of this machine's CPU: what is measured, and what fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

PLUGIN = """
import os, signal, sys, time
from contextlib import suppress
from fsbench.provider import Capabilities, Kind, Provider

def close_sockets():
    for line in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if os.readlink("/proc/self/fd/" + line).startswith("socket:"):
                os.close(int(line))

def build(problem, weight):
    return lambda hidden, seed, offset: (hidden @ weight.T).argmax(1)

def build_sharded(problem, shard):
    import torch
    import torch.distributed as dist

    first = sum(shard.sizes[: shard.rank])

    def launch(hidden, seed, offset):
        {misbehaviour}
        score, token = (hidden @ shard.weight.T).max(1)
        scores = [torch.empty_like(score) for _ in shard.sizes]
        tokens = [torch.empty_like(token) for _ in shard.sizes]
        dist.all_gather(scores, score, shard.group)
        dist.all_gather(tokens, token + first, shard.group)
        best = torch.stack(scores).argmax(0, keepdim=True)
        chosen = torch.stack(tokens).gather(0, best)[0]
        return chosen * 0 if {disagrees} and shard.rank == 1 else chosen

    return launch

PROVIDER = Provider(
    name="{name}", label="{name}", kind=Kind.GREEDY, build=build, build_sharded=build_sharded,
    capabilities=Capabilities(devices=("cpu",), dtypes=("fp32",)),
)
"""

MISBEHAVIOUR = {
    "sound": "pass",
    "dies": "if shard.rank == 1: os.kill(os.getpid(), signal.SIGSEGV)",
    # What the other rank sees first is that the connection closed.
    "dies_slowly": "if shard.rank == 1: close_sockets(); time.sleep(1); os.abort()",
    "hangs": "if shard.rank == 1: time.sleep(1000)",
    "raises": "if shard.rank == 0: raise RuntimeError('no luck today')",
    "disagrees": "pass",
}


def plugin(name: str) -> str:
    """The source of a sampler that misbehaves as its name says."""
    return PLUGIN.format(name=name, misbehaviour=MISBEHAVIOUR[name], disagrees=name == "disagrees")


def run(tmp_path: Path, *names: str, tp: str = "1,2", more: tuple[str, ...] = ()) -> pd.DataFrame:
    """`fsbench run` with these plug-ins; the table of results, with the output in .attrs."""
    arguments = ["--device", "cpu", "--tp", tp, "--d", "16", "--v", "101", "--batch", "3"]
    arguments += ["--dtype", "fp32", "--iters", "6", "--rounds", "2", "--warmup", "1"]
    for name in names:
        path = tmp_path / f"{name}.py"
        path.write_text(plugin(name))
        arguments += ["--provider-path", str(path), "--provider", name]
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "fsbench", "run", *arguments, "--out", str(out), *more],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "FSBENCH_TEST_MARK": str(tmp_path)},
    )  # fmt: skip
    table = pd.read_csv(out / "results.csv", keep_default_na=False)
    table.attrs = {"code": done.returncode, "output": done.stdout + done.stderr}
    return table


def left_behind(tmp_path: Path) -> list[str]:
    """Processes of a run that are still there, by the mark in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if f"FSBENCH_TEST_MARK={tmp_path}".encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_ranks_are_measured_and_what_they_do_wrong_ends_their_cell_alone(tmp_path):
    table = run(tmp_path, *MISBEHAVIOUR, more=("--timeout", "25"))
    output = table.attrs["output"]
    rows = table.set_index(["provider", "tp"])
    assert (rows.xs(1, level="tp").status == "ok").all(), output
    two = rows.xs(2, level="tp")
    assert two.status.to_dict() == {
        "dies": "error",
        "dies_slowly": "error",
        "hangs": "timeout",
        "raises": "error",
        "disagrees": "check_failed",
        "sound": "ok",
    }, output
    assert two.reason["dies"] == "rank 1 was ended by SIGSEGV"
    assert two.reason["dies_slowly"] == "rank 1 was ended by SIGABRT"
    assert "25 s" in two.reason["hangs"]
    assert "no luck today" in two.reason["raises"]
    assert "different tokens" in two.reason["disagrees"] or "oracle" in two.reason["disagrees"]
    assert rows.loc[("sound", 2), "n_samples"] in ("6", "6.0", 6)
    assert table.attrs["code"] == 1
    time.sleep(1)
    assert left_behind(tmp_path) == []


def test_torchrun_measures_too(tmp_path):
    path = tmp_path / "sound.py"
    path.write_text(plugin("sound"))
    out = tmp_path / "out"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("--module", "fsbench", "run", "--device", "cpu", "--tp", "2"),
            # Not --d and --v: torchrun takes them for the beginnings of options of its own.
            *("--preset", "smoke", "--batch", "3", "--iters", "6", "--warmup", "1"),
            *("--provider-path", str(path), "--provider", "sound", "--out", str(out)),
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    table = pd.read_csv(out / "results.csv")
    assert table[["provider", "tp", "status", "n_samples"]].values.tolist() == [
        ["sound", 2, "ok", 6]
    ]
    assert done.stdout.count("Wrote") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tp", "0"), "--tp"),
        (("--tp", "2", "--timer", "cupti"), "events with several GPUs"),
        (("--tp", "3", "--gpu", "1,2"), "an index for each of 3 ranks"),
    ],
)
def test_mistakes_are_named(arguments, said):
    done = subprocess.run(
        [sys.executable, "-m", "fsbench", "run", "--device", "cpu", "--dry-run", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and said in done.stderr
