"""The C++ core is found, or missed with a reason; it is the one that this source describes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tree import ROOT

from fsbench.discover import discover
from fsbench.errors import ProviderUnavailable
from fsbench.simple import native
from fsbench.simple.reference import decide


@pytest.fixture
def without_core(monkeypatch):
    """As after an installation without a compiler."""
    monkeypatch.setattr(native, "_library", lambda: None)
    native.core.cache_clear()
    yield
    native.core.cache_clear()


def test_without_the_core_its_samplers_say_so(without_core):
    reasons = {name: entry.unavailable_reason("cpu") for name, entry in discover().items()}
    reasons = {name: reason for name, reason in reasons.items() if name.startswith("simple_")}
    assert reasons.pop("simple_full_v") is None
    assert len(reasons) == 3
    assert set(reasons.values()) == {"not built: needs g++ at install"}
    with pytest.raises(ProviderUnavailable, match="with a C\\+\\+ compiler there, install fsbench"):
        native.core()


def test_without_the_core_the_reference_decides(without_core):
    logits = torch.tensor([[0.0, 1.0, -torch.inf], [5.0, torch.nan, 0.0]])
    uniform = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert decide(logits, uniform).tokens.tolist() == [1, -1]


@pytest.mark.skipif(bool(native.missing()), reason=str(native.missing()))
def test_a_core_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(
        native, "CRing", type("CRing", (native.CRing,), {"_fields_": [("more", native.c_int64)]})
    )
    native.core.cache_clear()
    try:
        with pytest.raises(ProviderUnavailable, match="of another version"):
            native.core()
    finally:
        native.core.cache_clear()


def test_a_library_that_does_not_load_is_told(monkeypatch, tmp_path):
    (tmp_path / "_native.so").write_text("no library")
    monkeypatch.setattr(native, "_library", lambda: tmp_path / "_native.so")
    native.core.cache_clear()
    with pytest.raises(ProviderUnavailable, match=r"_native\.so"):
        native.core()
    native.core.cache_clear()


def _build(folder: Path, compiler: str) -> subprocess.CompletedProcess:
    """Build the extension alone, with another compiler."""

    to = ("--build-lib", folder, "--build-temp", folder)
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *to],
        cwd=ROOT,
        env={**os.environ, "CC": compiler, "CXX": compiler},
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="needs setuptools")
def test_the_build_goes_on_without_a_compiler(tmp_path):
    done = _build(tmp_path, "/bin/false")
    assert done.returncode == 0, done.stderr
    assert "failed" in done.stderr and not list(tmp_path.rglob("*.so"))


@pytest.mark.skipif(
    bool(native.missing()) or shutil.which("objdump") is None, reason="no core, or no objdump"
)
def test_wide_instructions_are_in_their_own_functions_only():
    """A template that two instruction sets share must not be compiled for the wider one."""
    done = subprocess.run(
        ["objdump", "-dC", "--no-show-raw-insn", native._library()], capture_output=True, text=True
    )
    if "file format elf64-x86-64" not in done.stdout:
        pytest.skip("not a library for x86-64")
    users: dict[str, set[str]] = {"zmm": set(), "ymm": set()}
    function = ""
    for line in done.stdout.splitlines():
        if line.endswith(">:"):
            function = line.split(" <", 1)[1]
        for register, functions in users.items():
            if f"%{register}" in line:
                functions.add(function)
    assert users["zmm"] and all("::avx512::" in name for name in users["zmm"])
    assert all("::avx512::" in name or "::avx2::" in name for name in users["ymm"])


def test_it_is_built_where_there_is_a_compiler():
    """A test run that skips all of the core's tests for want of a core is no test run."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    assert native.missing() is None
