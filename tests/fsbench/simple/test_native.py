"""The C++ core is loaded, or missing with a reason; wide instructions are where they may be."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
import torch
from tree import ROOT

from fsbench.discover import discover
from fsbench.errors import ProviderUnavailable
from fsbench.simple import native
from fsbench.simple.reference import decide

missing = pytest.mark.skipif(bool(native.missing()), reason=str(native.missing()))


@pytest.fixture
def library(monkeypatch):
    """Return a function that replaces the path of the library, and forget what is loaded."""
    native.core.cache_clear()
    yield lambda path: monkeypatch.setattr(native, "_library", lambda: path)
    native.core.cache_clear()


def test_without_the_core_its_samplers_say_so_and_the_reference_decides(library):
    library(None)
    reasons = {
        name: entry.unavailable_reason("cpu")
        for name, entry in discover().items()
        if name.startswith("simple_")
    }
    assert reasons.pop("simple_full_v") is None and len(reasons) == 3
    assert set(reasons.values()) == {"not built: needs g++ at install"}
    with pytest.raises(ProviderUnavailable, match="install a C\\+\\+ compiler, then fsbench"):
        native.core()
    logits = torch.tensor([[0.0, 1.0, -torch.inf], [5.0, torch.nan, 0.0]])
    uniform = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert decide(logits, uniform).tokens.tolist() == [1, -1]


@missing
def test_a_core_of_another_version_is_refused(library, monkeypatch):
    fields = {"_fields_": [("more", native.c_int64)]}
    monkeypatch.setattr(native, "CRing", type("CRing", (native.CRing,), fields))
    with pytest.raises(ProviderUnavailable, match="of another version"):
        native.core()


def test_a_library_that_does_not_load_is_named(library, tmp_path):
    (tmp_path / "_native.so").write_text("no library")
    library(tmp_path / "_native.so")
    with pytest.raises(ProviderUnavailable, match=r"_native\.so"):
        native.core()


@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="needs setuptools")
def test_the_build_goes_on_without_a_compiler(tmp_path):
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path,
         "--build-temp", tmp_path],
        cwd=ROOT, env={**os.environ, "CC": "/bin/false", "CXX": "/bin/false"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "failed" in done.stderr and not list(tmp_path.rglob("*.so"))


@missing
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_wide_instructions_are_in_functions_for_their_instruction_set():
    """A template that two instruction sets share must not be compiled for the wider one."""
    command = ["objdump", "-dC", "--no-show-raw-insn", native._library()]
    listing = subprocess.run(command, capture_output=True, text=True).stdout
    if "file format elf64-x86-64" not in listing:
        pytest.skip("not a library for x86-64")
    users: dict[str, set[str]] = {"zmm": set(), "ymm": set()}
    function = ""
    for line in listing.splitlines():
        if line.endswith(">:"):
            function = line.split(" <", 1)[1]
        for register, functions in users.items():
            if f"%{register}" in line:
                functions.add(function)
    assert users["zmm"] and all("::avx512::" in name for name in users["zmm"])
    assert all("::avx512::" in name or "::avx2::" in name for name in users["ymm"])


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_it_is_built_where_there_is_a_compiler():
    """Without the core all of its tests would be skipped."""
    assert native.missing() is None
