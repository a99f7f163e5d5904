"""Every launch sets enable_fp_fusion, so no default of a version of Triton decides it."""

from __future__ import annotations

import ast
import tomllib
from importlib.metadata import version
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from tree import ROOT
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from fsbench.kernels.configs.gpu import bind_and_launch


def launches(source: str) -> list[ast.Call]:
    """Calls of the form kernel[grid](...)."""
    return [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and ast.unparse(node.func.value).endswith("kernel")
    ]


def test_every_launch_names_it():
    files = sorted(chain((ROOT / "kernels").rglob("*.py"), (ROOT / "baselines").rglob("*.py")))
    keywords = {
        f"{file.relative_to(ROOT)}:{call.lineno}": [keyword.arg for keyword in call.keywords]
        for file in files
        for call in launches(file.read_text(encoding="utf-8"))
    }
    assert len(keywords) == 2, f"expected bind_and_launch and weight_stream; got {sorted(keywords)}"
    assert all("enable_fp_fusion" in names for names in keywords.values()), keywords


def test_a_launch_that_lacks_it_is_seen():
    [call] = launches("_draw_kernel[(rows,)](x, BLOCK=4)")
    assert [keyword.arg for keyword in call.keywords] == ["BLOCK"]


def test_it_reaches_the_kernel_and_what_the_kernel_returns_comes_back():
    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]):
            return lambda *arguments, **named: (grid, arguments, named)

    named = {"B": 2, "enable_fp_fusion": True}
    assert bind_and_launch(Kernel(), (3,), 1, B=2) == ((3,), (1,), named)


def bound() -> Requirement:
    """Return the requirement on Triton in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [requirement] = [name for name in project["dependencies"] if name.startswith("triton")]
    return Requirement(requirement)


def test_triton_is_bounded_by_the_versions_whose_defaults_are_known():
    """3.10 turns the default of enable_fp_fusion off, and has not run: the bound ends before it."""
    assert version("triton") in bound().specifier
    assert "3.6.0" in bound().specifier and "3.10.0" not in bound().specifier


@pytest.mark.parametrize("capability", [80, 90])
def test_named_and_default_have_one_cache_key_within_the_bound(capability):
    """Otherwise kernels that other calls, or an older fsbench, compiled would not be found."""
    assert Version(version("triton")) < Version("3.10")
    backend = make_backend(GPUTarget("cuda", capability, 32))
    named = backend.parse_options({"enable_fp_fusion": True, "num_warps": 4})
    assert named.hash() == backend.parse_options({"num_warps": 4}).hash()
    assert named.hash() != backend.parse_options({"enable_fp_fusion": False}).hash()
