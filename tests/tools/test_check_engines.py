"""`make check-engines`, without its downloads: what it reads of a package, and what it finds."""

from __future__ import annotations

import re

import check_engines
import pytest

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

def free(x, y): ...
"""


@pytest.fixture
def root(tmp_path):
    package = tmp_path / "engine"
    package.mkdir()
    (package / "base.py").write_text(BASE)
    (package / "parts.py").write_text(MODULE)
    return tmp_path


def expected(**of) -> ExpectedApi:
    given = {"signatures": {}, "fields": {}, "attributes": {}, **of}
    return ExpectedApi("1.0", **given)


def test_what_is_there_is_no_difference(root):
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
    ("of", "line"),
    [
        ({"signatures": {"engine.parts:free": ("x",)}},
         "engine.parts:free: expected parameters ('x',); got ('x', 'y')"),
        ({"signatures": {"engine.parts:Sampler.gone": ("self",)}},
         "engine.parts:Sampler.gone: expected it; there is none"),
        ({"signatures": {"engine.gone:free": ("x",)}},
         "engine.gone:free: expected it; there is none"),
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
def test_a_difference_is_a_line(root, of, line):
    assert check_engines.check(expected(**of), root) == [line]


def test_the_exit_code_says_it(root, capsys):
    sources = [f"--source=vllm-{version}={root}" for version in check_engines.ADAPTERS]
    assert check_engines.main(sources) == 1
    assert re.search(r"vllm 0\.26\.0: \d+ differences", capsys.readouterr().out)
