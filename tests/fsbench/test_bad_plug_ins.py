"""Bad plug-ins: one is listed as broken with a reason, and every command still works."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields, replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from plug_in import plug_in
from tiers import full
from tree import ROOT
from typer.testing import CliRunner

from fsbench import discover
from fsbench.cli import app
from fsbench.errors import InvalidArgument
from fsbench.provider import Capabilities, Kind, Provider

IMPORT = "from fsbench.provider import Provider; PROVIDER = "
AT_IMPORT = {
    "raise RuntimeError('two\\nlines')": "RuntimeError: two lines",
    "import sys; sys.exit(0)": "SystemExit: 0",
    "class E(Exception):\n def __str__(self): return 7\nraise E": "E: (no text: str()",
    "raise ValueError('\\x1b[31m \\udc80 \\0')": "ValueError: ?[31m \\udc80 ?",
    "raise type('A\\nB', (Exception,), {})('x' * 10**6)": "A B: xxx",
    "raise ExceptionGroup('several', [ValueError(1)])": "ExceptionGroup: several",
    "def f(): f()\nf()": "RecursionError: ",
    "import no_such_package": "ModuleNotFoundError: No module named 'no_such_package'",
    "1 +": "SyntaxError: ",
    "\udc80": "SyntaxError: ",
    "": "defines no PROVIDER",
    "PROVIDER = 'mine'": "defines no PROVIDER of type fsbench.provider.Provider",
    f"{IMPORT} Provider.__new__(Provider)": "AttributeError: ",
    f"{IMPORT} Provider()": "TypeError: ",
    "def __getattr__(name): raise KeyError(name)": "KeyError: ",
    "import sys; sys.modules[__name__] = None": "defines no PROVIDER",
    plug_in("other"): "PROVIDER is named 'other', not 'mine'",
    "PROVIDERS = ()": "PROVIDERS: expected a tuple of fsbench.provider.Provider",
    f"{plug_in('mine')}PROVIDERS = (PROVIDER, 1)": "PROVIDERS: expected a tuple",
    f"{plug_in('mine')}PROVIDERS = (PROVIDER,)": "defines both PROVIDER and PROVIDERS",
}
"""Source of a plug-in -> start of the reason against it."""


@pytest.mark.parametrize(("text", "reason"), AT_IMPORT.items(), ids=range(len(AT_IMPORT)))
def test_a_plug_in_that_fails_is_broken_with_one_line(tmp_path, text, reason):
    path = tmp_path / "mine.py"
    path.write_text(text, errors="surrogatepass")
    (entry,) = discover.load("mine", str(path), "file", str(path))
    assert entry.provider is None and entry.broken.startswith(reason), entry.broken
    assert entry.broken.isprintable() and len(entry.broken) < 400


FIELDS: dict[str, list[Any]] = {
    "name": [None, 7, "a\nb", []],
    "label": [None, "\x1b[31m", "\udc80"],
    "kind": [None, "exact", Kind],
    "build": [None, "build"],
    "capabilities": [None, Capabilities, {}],
    "requires": [None, "torch", (7,)],
    "presets": [None, "paper", (None,)],
    "compute_capability": [9, "9.0", (9,), (9, "0")],
    **{name: [None, 7] for name in ("supports", "kept_bytes", "not_built")},
    **{name: [7] for name in ("sample", "noise_map", "tuning", "build_sharded", "matmul_form")},
}
ABLE: dict[str, list[Any]] = {
    "devices": [None, "cuda", ("tpu",), (7,)],
    "dtypes": [None, "bf16", ("fp8",)],
    "noise": ["tokens", 7],
    "fused": [None, 1, "yes"],
    "filters": [None, ("top_q",), "top_k"],
    "filter_order": [(), None, ("top_k",)],
    "ties": ["last"],
    "known_deviation": ["0", -1, float("nan")],
    "exact_to_gap": [-1, "far"],
    "seed_stride": [0, 1.5],
}
MINE = Provider("mine", "L", Kind.EXACT, lambda problem, weight: None)


@pytest.mark.parametrize("field", [*FIELDS, *ABLE])
def test_a_field_of_another_type_is_refused_by_name(field):
    assert {*FIELDS, *ABLE} <= {each.name for each in (*fields(Provider), *fields(Capabilities))}
    for value in FIELDS.get(field, ABLE.get(field, [])):
        with pytest.raises((InvalidArgument, AttributeError), match=f"{field}: expected|no attri"):
            if field in FIELDS:
                replace(MINE, **{field: value})
            else:
                replace(MINE, capabilities=Capabilities(**{field: value}))


PROVIDER = """
from fsbench.provider import *
def build(problem, weight): return lambda hidden, seed, offset: None
def die(*a): import os; os._exit(0)
def hang(*a): import time; time.sleep(10**6)
def fail(*a): raise ValueError("no")
fields = dict(name="mine", label="L", kind=Kind.EXACT, build=build)
LINE
PROVIDER = Provider(**fields)
"""
HANGS = {
    "while True: pass": "it hangs",
    "import threading, time; threading.Thread(target=time.sleep, args=[9e5]).start()": "it hangs",
    PROVIDER.replace("LINE", "fields['not_built'] = hang"): "it hangs",
}
DEADLY = {
    "import os; os._exit(7)": "it ends the process, by exit code 7",
    "import os; os.abort()": "it ends the process, by signal 6",
    "import atexit, os; atexit.register(os._exit, 3)": "it ends the process, by exit code 3",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "import os; os.fork()": "defines no PROVIDER",
    PROVIDER.replace("LINE", "fields['supports'] = die"): "it ends the process, by exit code 0",
    PROVIDER.replace("LINE", "fields['kept_bytes'] = die"): "it ends the process, by exit code 0",
    PROVIDER.replace("LINE", "fields['kept_bytes'] = fail"): "ValueError: no",
    PROVIDER.replace("LINE", "fields['kept_bytes'] = lambda p: -1"): "kept_bytes: expected bytes",
    PROVIDER.replace("LINE", "import os\nif not os.fork():\n while True: pass"): (
        "it leaves a process running at import"
    ),
    **HANGS,
}


def listed(*arguments):
    """Return the plug-in's row of `fsbench list --json`."""
    done = CliRunner().invoke(app, ["list", "--json", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    (row,) = (row for row in json.loads(done.stdout)["providers"] if row["name"] == "mine")
    return row


@pytest.mark.parametrize(
    ("text", "reason"),
    [item if number in (0, 5, 10) else full(*item) for number, item in enumerate(DEADLY.items())],
    ids=range(len(DEADLY)),
)
def test_a_plug_in_that_ends_or_stops_its_process_is_broken(tmp_path, monkeypatch, text, reason):
    # A busy machine takes long to import the others.
    monkeypatch.setattr(discover, "PATIENCE_S", 3.0 if text in HANGS else 3000.0)
    (tmp_path / "mine.py").write_text(text)
    before = os.getcwd()
    row = listed("--provider-path", str(tmp_path / "mine.py"))
    assert row["kind"] is None and row["cpu"] == row["cuda"] and os.getcwd() == before
    assert row["cpu"].startswith(reason) and row["cpu"].isprintable(), row["cpu"]


@pytest.mark.parametrize(
    "lines",
    [
        "import os; os.fork(); print('words'); os.write(1, b'words'); os.chdir('/')\n"
        "fields['kept_bytes'] = lambda problem: print('words') or 7\n"
        "fields['not_built'] = lambda: print('words')",
        "import sys; sys.stdout = None\nfields['not_built'] = fields['supports'] = fail",
    ],
    ids=["prints", "fails"],
)
def test_an_odd_plug_in_is_usable_and_json_stays_json(tmp_path, capfd, lines):
    (tmp_path / "mine.py").write_text(PROVIDER.replace("LINE", lines))
    before = os.getcwd(), sys.stdout
    assert listed("--provider-path", str(tmp_path / "mine.py"))["kind"] == "exact"
    assert (os.getcwd(), sys.stdout) == before
    assert "words" not in capfd.readouterr().out


def test_another_process_takes_the_reasons_and_probes_nothing_again(tmp_path, monkeypatch):
    paths = [tmp_path / f"{name}.py" for name in ("dies", "mine", "other")]
    for path, text in zip(paths, ("import os; os._exit(1)", PROVIDER, "1 / 0"), strict=True):
        path.write_text(text.replace("LINE", ""))
    first = discover.discover(paths)
    chosen = [first["dies"], first["mine"]]
    monkeypatch.setattr(discover.subprocess, "Popen", None)  # no process is started
    second = discover.discover(paths, discover.reasons(chosen))
    assert second["dies"] == first["dies"] and second["dies"].broken.startswith("it ends")
    assert second["mine"].provider is not None
    assert second["other"].broken == "it was not chosen for this run"


@pytest.mark.parametrize("text", ["import os; os._exit(0)", PROVIDER])
def test_installed_plug_ins_break_no_command(tmp_path, monkeypatch, text):
    """One that dies, and one with the name of a shipped sampler."""
    source = text.replace("LINE", "fields['name'] = 'greedy'")
    (tmp_path / "installed_plug_in.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("greedy", "installed_plug_in:PROVIDER", discover.ENTRY_POINTS)
    monkeypatch.setattr(discover, "entry_points", lambda group: [entry])
    entries = discover.discover()
    assert entries["greedy"].source == "fsbench.baselines.greedy"
    (other,) = (each for each in entries.values() if "installed_plug_in" in each.source)
    assert other.name == "greedy (entry point installed_plug_in:PROVIDER)"
    assert other.broken.startswith("defined twice, in fsbench.baselines.greedy and entry point")
    results = str(ROOT / "results/h200/lean-20261123")
    arguments = ["recommend", "--model", "qwen3-8b", "--results", results, "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0 and json.loads(done.stdout)["advice"]
