"""Check that commands that need no GPU load neither torch nor FlashInfer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cells import cell
from tiers import full
from tree import H200

from fsbench.records.cell import Round
from fsbench.records.store import Store

_REPORT = """
import sys
from fsbench.cli import main
sys.argv = ["fsbench", *{arguments!r}]
try:
    main()
finally:
    names = {{name.split(".")[0] for name in sys.modules}}
    print("LOADED", len(sys.modules), *sorted(names), file=sys.stderr)
"""

RUNS = H200

MODULES = 1000
"""Largest number of modules that a command loads: about half a second on an idle machine."""


def start(*arguments: object, cwd=None) -> tuple[str, set[str], int]:
    """Run a command in a fresh process; return its output, top-level modules and module count."""
    done = subprocess.run(
        [sys.executable, "-c", _REPORT.format(arguments=[*map(str, arguments)])],
        capture_output=True,
        text=True,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    loaded = next(line for line in done.stderr.splitlines() if line.startswith("LOADED"))
    _, number, *names = loaded.split()
    return done.stdout, set(names), int(number)


@pytest.mark.full
def test_the_report_names_torch_when_it_is_loaded():
    _, loaded, _ = start("doctor")
    assert "torch" in loaded


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([command, "--help"] for command in ("run", "list", "hotvocab")),
        *(
            full([command, "--help"])
            for command in (
                *("plot", "compare", "iomodel", "verify", "doctor", "tune"),
                "e2e",
            )
        ),
        ["list"],
        ["list", "--json"],
        ["iomodel"],
        ["iomodel", "--json"],
    ],
    ids=" ".join,
)
def test_starts_without_torch(arguments):
    out, loaded, number = start(*arguments)
    # triton, which samplers are written in, brings numpy; nothing brings torch.
    assert not loaded & {"torch", "flashinfer", "cupti", "pandas", "scipy", "matplotlib"}
    assert number < MODULES
    if "--json" in arguments:
        json.loads(out)
    else:
        assert out


def test_plot_works_without_torch(tmp_path):
    store = Store.create(tmp_path / "run", {"gpu": "NVIDIA H200", "device": "cuda"})
    for name, fused, time_us in (("fast", True, 10.0), ("slow", False, 20.0)):
        for b in (1, 2):
            one = cell(provider=name, label=name, fused=fused, b=b)
            store.append_round(one, 0, Round([time_us] * 8))
    store.close()
    out, loaded, _ = start("plot", "run", "--out", "plots", cwd=tmp_path)
    assert "matplotlib" in loaded
    assert not loaded & {"torch", "triton", "flashinfer", "cupti"}
    assert "wrote plots/" in out
    assert list((tmp_path / "plots").glob("*.png"))


@pytest.mark.parametrize(
    ("other", "cells"), [(["--paper", "h200"], 54), ([RUNS / "lean-20261123"], 36)], ids=str
)
def test_compare_works_without_torch(other, cells):
    out, loaded, _ = start("compare", RUNS / "paper-20261123", *other)
    assert f"{cells} cells" in out
    assert not loaded & {"torch", "triton", "flashinfer", "cupti", "matplotlib"}


def test_an_error_is_reported_without_torch(tmp_path):
    script = _REPORT.format(arguments=["plot", "nowhere"])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    error, loaded = done.stderr.splitlines()
    assert error.startswith("error: nowhere: expected a results folder")
    assert "torch" not in loaded.split()
