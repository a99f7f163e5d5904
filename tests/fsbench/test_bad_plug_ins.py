"""Bad plug-ins: one is listed as broken with a reason, and no command is the worse for it."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

from fsbench import discover
from fsbench.cli import app

AT_IMPORT = {
    "raise RuntimeError('two\\nlines')": "RuntimeError: two lines",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise GeneratorExit": "GeneratorExit",
    "raise BaseException('base')": "BaseException: base",
    "import sys; sys.exit(0)": "SystemExit: 0",
    "import os; os._exit(0)": "it ends the process, by exit code 0",
    "import os; os._exit(7)": "it ends the process, by exit code 7",
    "import os; os.abort()": "it ends the process, by signal 6",
    "import os; os.kill(os.getpid(), 9)": "it ends the process, by signal 9",
    "import atexit, os; atexit.register(os._exit, 3)": "it ends the process, by exit code 3",
    "import faulthandler; faulthandler._sigsegv()": "it ends the process, by signal 11",
    "while True: pass": "it hangs",
    "import time; time.sleep(10**6)": "it hangs",
    "import threading, time; threading.Thread(target=time.sleep, args=[9e5]).start()": "it hangs",
    "import os; os.fork() or [None for _ in iter(int, 1)]": "defines no PROVIDER",
    "import os; os.fork()": "defines no PROVIDER",
    "class E(Exception):\n def __str__(self): raise ValueError\nraise E": "E: (no text: str()",
    "class E(Exception):\n def __str__(self): return 7\nraise E": "E: (no text: str()",
    "raise ValueError('\\x1b[31m \\udc80 \\0')": "ValueError: ?[31m \\udc80 ?",
    "raise type('A\\nB', (Exception,), {})('x')": "A B: x",
    "raise ValueError('x' * 10**6)": "ValueError: xxx",
    "raise ExceptionGroup('several', [ValueError(1)])": "ExceptionGroup: several",
    "def f(): f()\nf()": "RecursionError: ",
    "import no_such_package": "ModuleNotFoundError: No module named 'no_such_package'",
    "import torch.no_such": "ModuleNotFoundError: ",
    "1 +": "SyntaxError: ",
    "\\udc80": "SyntaxError: ",
    "x = '\\0'.encode('utf-16'); del __name__; raise NameError(__file__[:0])": "NameError",
    "": "defines no PROVIDER",
    "PROVIDER = None": "defines no PROVIDER",
    "PROVIDER = 'mine'": "defines no PROVIDER",
    "from fsbench.provider import Provider; PROVIDER = Provider": "defines no PROVIDER",
    "from fsbench.provider import Provider; PROVIDER = Provider.__new__(Provider)": "AttributeErr",
    "def __getattr__(name): raise KeyError(name)": "KeyError: ",
    "from fsbench.provider import Provider; PROVIDER = Provider()": "TypeError: ",
    "import sys; sys.modules[__name__] = None": "defines no PROVIDER",
}
"""What a plug-in does when it is imported -> how its reason begins."""

PROVIDER = """
from fsbench.provider import *
def build(problem, weight): return lambda hidden, seed, offset: None
def die(*a): import os; os._exit(0)
def hang(*a): import time; time.sleep(10**6)
def fail(*a): raise ValueError("no")
given = dict(name={name!r}, label="L", kind=Kind.EXACT, build=build)
able = {able}
if able: given["capabilities"] = Capabilities(**able)
PROVIDER = Provider(**{{**given, **{fields}}})
"""

FIELDS = {
    "name": ["None", "7", "'other'", "'a\\nb'", "''", "[]"],
    "label": ["None", "7", "'a\\nb'", "'\\x1b[31m'", "'\\udc80'"],
    "kind": ["None", "'exact'", "Kind", "7"],
    "build": ["None", "'build'", "7"],
    "capabilities": ["None", "Capabilities", "{}"],
    "requires": ["None", "'torch'", "(7,)", "7"],
    "presets": ["None", "'paper'", "(None,)"],
    "compute_capability": ["9", "'9.0'", "(9,)", "(9, '0')"],
    "supports": ["None", "'yes'", "die", "hang"],
    "kept_bytes": ["None", "7", "fail", "die", "hang", "lambda p: 'x'", "lambda p: -1",
                   "lambda p: None", "lambda p: float('nan')"],
    "not_built": ["None", "die", "hang"],
    "sample": ["7"],
    "noise_map": ["7"],
    "tuning": ["7"],
    "build_sharded": ["7"],
    "matmul_form": ["7"],
}  # fmt: skip
ABLE = {
    "devices": ["None", "'cuda'", "('tpu',)", "(7,)"],
    "dtypes": ["None", "'bf16'", "('fp8',)"],
    "noise": ["'tokens'", "7"],
    "fused": ["None", "1", "'yes'"],
    "mask": ["True"],
    "filters": ["None", "('top_q',)", "'top_k'"],
    "filter_order": ["()", "None", "('top_k',)"],
    "ties": ["'last'"],
    "known_deviation": ["'0'", "-1", "float('nan')"],
    "exact_to_gap": ["-1", "'far'"],
    "seed_stride": ["0", "1.5"],
}
CASES = [
    *AT_IMPORT.items(),
    *(
        (PROVIDER.format(name="mine", able="{}", fields=f"{{{field!r}: {value}}}"), "")
        for field, values in FIELDS.items()
        for value in values
    ),
    *(
        (PROVIDER.format(name="mine", able=f"{{{field!r}: {value}}}", fields="{}"), "")
        for field, values in ABLE.items()
        for value in values
    ),
]
RIGHT = PROVIDER.format(name="mine", able="{}", fields="{}")


def listed(*arguments):
    """The plug-in's row of `fsbench list --json`."""
    done = CliRunner().invoke(app, ["list", "--json", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    (row,) = (row for row in json.loads(done.stdout)["providers"] if row["name"] == "mine")
    return row


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A busy machine takes its time to import what does not hang."""
    monkeypatch.setattr(discover, "PATIENCE_S", 3000.0)


def broken(tmp_path, text, reason):
    if reason == "it hangs" or "': hang}" in text:
        discover.PATIENCE_S = 3.0  # `patient` undoes it; it hangs for ever, however long one waits
    path = tmp_path / "mine.py"
    path.write_text(text, errors="surrogatepass")
    before = os.getcwd()
    row = listed("--provider-path", str(path))
    assert row["kind"] is None and row["cpu"] == row["cuda"], row
    assert row["cpu"].startswith(reason) and row["cpu"].isprintable(), row["cpu"]
    assert os.getcwd() == before


@pytest.mark.parametrize("part", range(4))
def test_a_few_are_listed_as_broken(tmp_path, part):
    for number, (text, reason) in enumerate(CASES[part * 2 :: 29]):
        (tmp_path / str(number)).mkdir()
        broken(tmp_path / str(number), text, reason)


@pytest.mark.full
@pytest.mark.parametrize(("text", "reason"), CASES, ids=range(len(CASES)))
def test_all_are_listed_as_broken(tmp_path, text, reason):
    broken(tmp_path, text, reason)


@pytest.mark.parametrize(
    "line",
    [
        "import os; os.fork()",
        "print('words')",
        "import os; os.write(1, b'words')",
        "import sys; sys.stdout = None",
        "import os; os.chdir('/')",
        "not_built = given['not_built'] = lambda: print('words')",
        "given['kept_bytes'] = lambda problem: print('words') or 7",
        "given['not_built'] = fail",
        "given['supports'] = fail",
    ],
)
def test_what_is_odd_but_usable_is_usable_and_json_stays_json(tmp_path, capfd, line):
    (tmp_path / "mine.py").write_text(RIGHT.replace("PROVIDER =", f"{line}\nPROVIDER ="))
    before = os.getcwd(), sys.stdout
    row = listed("--provider-path", str(tmp_path / "mine.py"))
    assert row["kind"] == "exact"
    assert (os.getcwd(), sys.stdout) == before
    assert "words" not in capfd.readouterr().out


def test_a_plug_in_whose_process_goes_on_after_its_import_is_broken(tmp_path):
    forks = "import os\nif not os.fork():\n    while True: pass\nPROVIDER ="
    broken(tmp_path, RIGHT.replace("PROVIDER =", forks), "it leaves a process running at import")


def test_another_process_is_told_what_was_found_and_tries_nothing_again(tmp_path, monkeypatch):
    paths = [tmp_path / f"{name}.py" for name in ("hangs", "mine", "other")]
    for path, text in zip(paths, ("while True: pass", RIGHT, "1 / 0"), strict=True):
        path.write_text(text)
    monkeypatch.setattr(discover, "PATIENCE_S", 3.0)
    result = discover.discover(paths)
    chosen = [result["hangs"], result["mine"]]
    monkeypatch.setattr(discover.subprocess, "Popen", None)  # no process is started
    second = discover.discover(paths, discover.reasons(chosen))
    assert second["hangs"] == result["hangs"] and second["hangs"].broken.startswith("it hangs")
    assert second["mine"].provider is not None
    assert second["other"].broken == "it was not chosen for this run"


@pytest.mark.parametrize("text", ["import os; os._exit(0)", "print('words')", RIGHT])
def test_installed_plug_ins_break_no_command(tmp_path, monkeypatch, text):
    """One that dies, one without a sampler, and one with the name of ours."""
    (tmp_path / "installed_plug_in.py").write_text(text.replace("'mine'", "'greedy'"))
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("greedy", "installed_plug_in:PROVIDER", discover.ENTRY_POINTS)
    monkeypatch.setattr(discover, "entry_points", lambda group: [entry])
    result = discover.discover()
    assert result["greedy"].source == "fsbench.baselines.greedy"
    (other,) = (each for each in result.values() if "installed_plug_in" in each.source)
    assert other.name == "greedy (entry point installed_plug_in:PROVIDER)"
    assert other.broken.startswith("defined twice, in fsbench.baselines.greedy and entry point")
    results = os.path.join(os.path.dirname(__file__), "../../results/h200/lean-20261123")
    arguments = ["recommend", "--model", "qwen3-8b", "--results", results, "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0 and json.loads(done.stdout)["advice"]
