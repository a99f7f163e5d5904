"""Check that mypy reads every file of the product and sees the types of the public calls.

`make lint` runs mypy on the tree. These tests run it again with errors planted in copies of files.
"""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tree import ROOT

from fsbench.kernels import flash_sample

# A GPU machine has what measuring needs, not what linting needs.
process_options = pytest.importorskip("mypy.main").process_options

PRODUCT = {
    path
    for folder in ROOT.iterdir()
    if not folder.name.startswith(".") and folder.name not in ("tests", "build", "dist")
    for path in ([folder] if folder.suffix == ".py" else folder.rglob("*.py"))
    # fsbench/kernels and fsbench/baselines are links to the folders next to fsbench/.
    if path.resolve() == path
}
"""All Python of this checkout, apart from the tests."""

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]

PLANTED = ("fsbench/kernels/fused", "fsbench/baselines", "fsbench/measure", "tools")
"""Folders where a file gets an error."""

ERROR = 'def planted() -> int:\n    return "a" + 1\n'

REVEAL = "from fsbench.kernels import flash_sample\n\nreveal_type(flash_sample)\n"


def test_mypy_reads_every_file(monkeypatch):
    monkeypatch.chdir(ROOT)
    sources, _ = process_options([])
    paths = [Path(source.path or "").resolve() for source in sources]
    assert set(paths) == PRODUCT
    assert len(paths) == len(PRODUCT), "a file is read twice"


def test_exceptions_are_made_for_files_that_exist(monkeypatch):
    """An override of mypy for a module that has moved would have no effect."""
    monkeypatch.chdir(ROOT)
    sources, _ = process_options([])
    modules = {source.module for source in sources}
    overridden = {name for each in SETTINGS["mypy"]["overrides"] for name in each["module"]}
    assert {name for name in overridden if name.split(".")[0] == "fsbench"} <= modules


def test_types_ship():
    assert (ROOT / "fsbench" / "py.typed").is_file()
    assert "py.typed" in SETTINGS["setuptools"]["package-data"]["fsbench"]


@pytest.mark.full
def test_errors_are_reported_wherever_they_are_and_public_calls_have_types(tmp_path):
    """One run checks all of this, with a copy of the cache of `make lint`, to save time."""
    cache = tmp_path / "cache"
    if (ROOT / ".mypy_cache").exists():
        shutil.copytree(ROOT / ".mypy_cache", cache)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(cache)]
    planted = [_first_module(ROOT / folder) for folder in PLANTED]
    added = dict.fromkeys(planted, ERROR) | {ROOT / "examples" / "decode_loop.py": REVEAL}
    for number, (path, text) in enumerate(added.items()):
        copy = tmp_path / f"copy{number}.py"
        copy.write_text(path.read_text(encoding="utf-8") + "\n\n" + text, encoding="utf-8")
        command += ["--shadow-file", str(path), str(copy)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()

    wrong = [line for line in lines if ": error: " in line]
    assert len(wrong) == len(PLANTED), done.stdout + done.stderr
    for path in planted:
        assert any(line.startswith(f"{path.relative_to(ROOT)}:") for line in wrong), wrong
    assert all('("str" and "int")' in line for line in wrong), wrong
    assert f"(checked {len(PRODUCT)} source files)" in lines[-1]

    (revealed,) = [line for line in lines if "Revealed type" in line]
    parameters = re.findall(r"[( ](\w+): ", revealed.split("Revealed type is ")[1])
    assert parameters == [*inspect.signature(flash_sample).parameters]
    assert "hidden: torch._tensor.Tensor, weight: torch._tensor.Tensor | " in revealed
    assert revealed.split(" -> ")[-1].endswith('fsbench.kernels.launch.result.Sample]"')


@pytest.mark.full
def test_gpu_tests_read_fields_that_exist(tmp_path):
    """These tests rarely run, so a renamed field would be noticed late."""
    tests = sorted((ROOT / "tests").rglob("test_*_gpu*.py"))
    command = [sys.executable, "-m", "mypy", "--check-untyped-defs", "--explicit-package-bases"]
    command += ["--follow-imports", "silent", "--cache-dir", str(tmp_path), *map(str, tests)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert f"(checked {len(tests)} source files)" in done.stdout, done.stdout + done.stderr
    assert not [line for line in done.stdout.splitlines() if line.endswith("[attr-defined]")]


def _first_module(folder: Path) -> Path:
    return next(path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py")
