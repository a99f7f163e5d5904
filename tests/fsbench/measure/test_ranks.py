"""`fsbench run --tp` over processes of this machine's CPU: what is measured, and what fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

import pandas as pd
import pytest

from fsbench import cli

PLUGIN = """
import os, signal, sys, time
from contextlib import suppress
from fsbench.provider import Capabilities, Kind, Provider

def close_sockets():
    for line in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if os.readlink("/proc/self/fd/" + line).startswith("socket:"):
                os.close(int(line))

LOOPBACK = "0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F"

def public_sockets():
    # Local addresses of this process's TCP sockets that other hosts can reach.
    sockets = set()
    for line in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            sockets.add(os.readlink("/proc/self/fd/" + line))
    rows = [row.split() for name in ("tcp", "tcp6") if os.path.exists("/proc/net/" + name)
            for row in open("/proc/net/" + name)]
    mine = [row[1] for row in rows if f"socket:[{{row[9]}}]" in sockets]
    assert mine, "expected TCP sockets of gloo"
    return [address for address in mine if not address.split(":")[0] in LOOPBACK]

def build(problem, weight):
    return lambda hidden, seed, offset: (hidden @ weight.T).argmax(1)

def build_sharded(problem, shard):
    import torch
    import torch.distributed as dist

    first = sum(shard.sizes[: shard.rank])

    def launch(hidden, seed, offset):
        {misbehavior}
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

MISBEHAVIOR = {
    "sound": "assert not public_sockets(), public_sockets()",
    "dies": "if shard.rank == 1: os.kill(os.getpid(), signal.SIGSEGV)",
    # The other rank first sees a closed connection.
    "dies_slowly": "if shard.rank == 1: close_sockets(); time.sleep(0.2); os.abort()",
    "hangs": "if shard.rank == 1: time.sleep(1000)",
    "raises": "if shard.rank == 0: raise RuntimeError('no luck today')",
    "disagrees": "pass",
}


def plugin(name: str) -> str:
    """The source of a sampler that misbehaves as its name says."""
    return PLUGIN.format(name=name, misbehavior=MISBEHAVIOR[name], disagrees=name == "disagrees")


def started(tmp_path: Path, *names: str, more: tuple[str, ...] = ()) -> Popen[str]:
    """`fsbench run` with these plug-ins, results in a folder named after the first."""
    arguments = ["--device", "cpu", "--tp", "1,2", "--d", "16", "--v", "101", "--batch", "3"]
    arguments += ["--dtype", "fp32", "--iters", "6", "--rounds", "2", "--warmup", "1"]
    for name in names:
        path = tmp_path / f"{name}.py"
        if not path.exists():  # another run may be reading it
            path.write_text(plugin(name))
        arguments += ["--provider-path", str(path), "--provider", name]
    out = tmp_path / names[0]
    return Popen(
        [sys.executable, "-m", "fsbench", "run", *arguments, "--out", str(out), *more],
        stdout=PIPE, stderr=STDOUT, text=True,
        env={**os.environ, "FSBENCH_TEST_MARK": str(tmp_path)},
    )  # fmt: skip


def results(process: Popen[str]) -> pd.DataFrame:
    """The table of results once it has ended, with exit code and output in .attrs."""
    output, _ = process.communicate()
    assert isinstance(process.args, list)
    out = Path(process.args[process.args.index("--out") + 1])
    assert (out / "results.csv").exists(), output
    table = pd.read_csv(out / "results.csv", keep_default_na=False)
    table.attrs = {"code": process.returncode, "output": output}
    return table


def left_behind(tmp_path: Path) -> list[str]:
    """Processes of a run that are still there, by the mark in their environment."""
    result = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if f"FSBENCH_TEST_MARK={tmp_path}".encode() in (process / "environ").read_bytes():
                    result.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return result


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


def assert_gone(tmp_path: Path) -> None:
    """No process of a run is left: those that were killed have been seen off."""
    while left_behind(tmp_path):  # the time limit of a test ends this
        time.sleep(0.1)


@pytest.mark.full
@needs_proc
def test_ranks_are_measured_must_agree_and_failures_end_only_their_cell(tmp_path):
    """One run of all samplers. A hanging rank gets longer than a busy machine takes to start."""
    table = results(started(tmp_path, *MISBEHAVIOR, more=("--timeout", "60")))
    output, rows = table.attrs["output"], table.set_index(["provider", "tp"])
    assert (rows.xs(1, level="tp").status == "ok").all(), output
    two = rows.xs(2, level="tp")
    assert two.status.to_dict() == {
        "sound": "ok",
        "dies": "error",
        "dies_slowly": "error",
        "hangs": "timeout",
        "raises": "error",
        "disagrees": "check_failed",
    }, output
    assert two.reason["dies"].startswith("rank 1 was ended by SIGSEGV")
    assert two.reason["dies_slowly"].startswith("rank 1 was ended by SIGABRT")
    assert "60 s" in two.reason["hangs"]
    assert "no luck today" in two.reason["raises"]
    assert "different tokens" in two.reason["disagrees"] or "oracle" in two.reason["disagrees"]
    assert rows.loc[("sound", 2), "n_samples"] in ("6", "6.0", 6)
    assert table.attrs["code"] == 1  # a failed check outweighs errors
    assert_gone(tmp_path)


@pytest.mark.full
def test_torchrun_measures_too(tmp_path):
    path = tmp_path / "sound.py"
    path.write_text(plugin("sound"))
    out = tmp_path / "out"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("--module", "fsbench", "run", "--device", "cpu", "--tp", "2"),
            # Not --d and --v: torchrun reads them as abbreviations of its options.
            *("--preset", "smoke", "--batch", "3", "--iters", "6", "--warmup", "1"),
            "--no-check",
            *("--provider-path", str(path), "--provider", "sound", "--out", str(out)),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    table = pd.read_csv(out / "results.csv")
    assert table[["provider", "tp", "status", "n_samples"]].values.tolist() == [
        ["sound", 2, "ok", 6]
    ]
    assert done.stdout.count("Wrote") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tp", "0"), "--tp"),
        (("--tp", "2", "--timer", "cupti"), "events with several GPUs"),
        (("--tp", "3", "--gpu", "1,2"), "an index for each of 3 ranks"),
    ],
)
def test_mistakes_are_named(arguments, message, monkeypatch, capsys):
    words = ["fsbench", "run", "--device", "cpu", "--dry-run", *arguments]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2 and message in capsys.readouterr().err
