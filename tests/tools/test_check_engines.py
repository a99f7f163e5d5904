"""`make check-engines` without its downloads: how it reads a package, and what it reports."""

from __future__ import annotations

import importlib.util
import re

import check_engines
import pytest

from fsbench.discover import discover
from fsbench.integrations.vllm_expected import ExpectedApi

BASE = (
    "class Base:\n    def __init__(self):\n        self.deep = 1\n    def kept(self, a, *, b): ..."
)
MODULE = """
from engine.base import Base
from engine.base import Base as Other

class Sampler(Base):
    flag = True

    def load(self, first, /, second=1, *args, third: int = 2, **kwargs):
        self.states, self.count = {}, 0
        other.foreign = local = 3

class Output(NamedTuple):
    tokens: int
    counts: int
    extra: int | None = None

class Limits:
    def __init__(self, size, *, mode="raw"): ...

def free(x, y): ...
def draw(probs, k, p=1.0, *, seed, offset=None): ...
"""


@pytest.fixture
def root(tmp_path):
    package = tmp_path / "engine"
    package.mkdir()
    (package / "base.py").write_text(BASE)
    (package / "parts.py").write_text(MODULE)
    return tmp_path


def expected(**parts) -> ExpectedApi:
    return ExpectedApi("1.0", **{"signatures": {}, "fields": {}, "attributes": {}, **parts})


def test_a_source_as_expected_has_no_difference(root):
    assert (
        check_engines.check(
            expected(
                signatures={
                    "engine.parts:Sampler.load": (
                        *("self", "first", "second", "args", "third", "kwargs"),
                    ),
                    "engine.parts:Sampler.kept": ("self", "a", "b"),
                    "engine.parts:free": ("x", "y"),
                },
                fields={"engine.parts:Output": ("tokens", "counts")},
                attributes={"engine.parts:Sampler": ("flag", "load", "states", "count", "deep")},
                filled=("engine.parts:Output",),
            ),
            root,
        )
        == []
    )


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({"signatures": {"engine.parts:free": ("x",)}},
         "engine.parts:free: expected parameters ('x',); got ('x', 'y')"),
        ({"signatures": {"engine.parts:Sampler.gone": ("self",)}},
         "engine.parts:Sampler.gone: not found"),
        ({"signatures": {"engine.gone:free": ("x",)}},
         "engine.gone:free: not found"),
        ({"fields": {"engine.parts:Output": ("tokens", "ranks")}},
         "engine.parts:Output: expected fields ranks"),
        ({"fields": {"engine.parts:Output": ("tokens",)}, "filled": ("engine.parts:Output",)},
         "engine.parts:Output: expected no further fields to fill; got counts"),
        ({"attributes": {"engine.parts:Sampler": ("states", "foreign", "local")}},
         "engine.parts:Sampler: expected attributes foreign, local"),
        ({"attributes": {"engine.parts:Gone": ("states",)}},
         "engine.parts:Gone: expected attributes states"),
    ],
)  # fmt: skip
def test_a_difference_is_a_line(root, parts, line):
    assert check_engines.check(expected(**parts), root) == [line]


PASSED = ("probs", "k", "seed")


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        ({"calls": {"engine.parts:draw": PASSED, "engine.parts:Limits.__init__": ("size",)}}, []),
        (
            {"calls": {"engine.parts:draw": (*PASSED, "top_k")}},
            ["engine.parts:draw: expected parameters top_k; "
             "got ['probs', 'k', 'p', 'seed', 'offset']"],
        ),
        (
            {"calls": {"engine.parts:draw": ("probs",)}},
            ["engine.parts:draw: requires k, seed, which are not passed"],
        ),
        ({"calls": {"engine.gone:f": ()}}, ["engine.gone:f: not found"]),
        (
            {"attributes": {"engine.parts:Sampler": ("states", "seeds")}},
            ["engine.parts:Sampler: expected attributes seeds"],
        ),
    ],
)  # fmt: skip
def test_the_calls_of_a_baseline_must_be_accepted(root, parts, lines):
    rival = check_engines.Rival("engine", "1.0", **{"calls": {}, **parts})
    assert check_engines.check_rival(rival, root) == lines


def test_the_exit_code_is_1(root, capsys):
    versions = {("vllm", check_engines.EXPECTED.version)}
    versions |= {(each.package, each.version) for each in check_engines.RIVALS}
    assert check_engines.main([f"--source={p}-{version}={root}" for p, version in versions]) == 1
    out = capsys.readouterr().out
    assert re.search(r"vllm 0\.26\.0: \d+ differences", out)
    assert "flashinfer-python 0.6.9: 6 differences in" in out


def test_a_rival_names_the_package_that_it_lacks(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    assert discover()["vllm_gumbel"].unavailable_reason("cuda") == "package vllm is not installed"
