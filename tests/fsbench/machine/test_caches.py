"""Which compilers have anything in their caches on disk."""

from __future__ import annotations

import getpass
import tempfile
from pathlib import Path

import pytest
import torch._inductor.runtime.cache_dir_utils as inductor
import triton

from fsbench.machine import caches

VARIABLES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR",
             "FLASHINFER_WORKSPACE_BASE")  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_defaults_are_those_of_the_compilers(monkeypatch, tmp_path):
    """Also of a user without a name, and with temporary files elsewhere."""

    def nobody():
        raise KeyError("uid")

    folders = caches.folders()
    assert folders["triton"] == Path(triton.knobs.cache.dir)
    assert folders["inductor"] == Path(inductor.default_cache_dir())
    monkeypatch.setattr(getpass, "getuser", nobody)
    assert caches.folders()["inductor"] == Path(inductor.default_cache_dir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert caches.folders()["inductor"].parent == tmp_path


def test_a_cache_counts_once_there_is_something_in_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "t"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "i"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    assert caches.filled() == []
    (tmp_path / "t").mkdir()
    assert caches.filled() == []
    (tmp_path / "t" / "kernel").touch()
    assert caches.filled() == ["triton"]
    (tmp_path / ".cache" / "flashinfer" / "0.6.9").mkdir(parents=True)
    assert caches.filled() == ["triton", "flashinfer"]
