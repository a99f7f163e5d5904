"""What `make check-engines` says of rivals, without its downloads."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import check_rivals
import pytest
from check_rivals import RIVALS, Rival

from fsbench.discover import discover

MODULE = """
class Sampler:
    def __init__(self, size, *, mode="raw"):
        self.states = None
def draw(probs, k, p=1.0, *, seed, offset=None): ...
"""
GIVEN = ("probs", "k", "seed")


def lines(tmp_path: Path, **of) -> list[str]:
    package = tmp_path / "engine"
    package.mkdir()
    (package / "parts.py").write_text(MODULE)
    return check_rivals.check(Rival("engine", "1.0", **{"calls": {}, **of}), tmp_path)


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ({"calls": {"engine.parts:draw": GIVEN, "engine.parts:Sampler.__init__": ("size",)}}, []),
        (
            {"calls": {"engine.parts:draw": (*GIVEN, "top_k")}},
            ["engine.parts:draw: expected parameters top_k; "
             "got ['probs', 'k', 'p', 'seed', 'offset']"],
        ),
        (
            {"calls": {"engine.parts:draw": ("probs",)}},
            ["engine.parts:draw: needs k, seed, which are not given"],
        ),
        ({"calls": {"engine.gone:f": ()}}, ["engine.gone:f: expected it; there is none"]),
        (
            {"attributes": {"engine.parts:Sampler": ("states", "seeds")}},
            ["engine.parts:Sampler: expected attributes seeds"],
        ),
    ],
)  # fmt: skip
def test_a_difference_is_a_line(tmp_path, of, said):
    assert lines(tmp_path, **of) == said


def test_the_exit_code_says_it(tmp_path, capsys):
    sources = [f"--source={each.package}-{each.version}={tmp_path}" for each in RIVALS]
    assert check_rivals.main(sources) == 1
    assert "flashinfer-python-0.6.9: 5 differences in" in capsys.readouterr().out


ABSENT = ("hf_generate", "llama_cpp_chain", "vllm_gumbel", "vllm_flashinfer", "flashinfer_cake")


@pytest.mark.parametrize("name", ABSENT)
def test_a_rival_says_which_package_it_lacks(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    entry = discover()[name]
    missing = ", ".join(entry.provider.requires)
    for device in entry.provider.capabilities.devices:
        assert entry.unavailable_reason(device) == f"package {missing} is not installed"
