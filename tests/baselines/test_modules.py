"""Every baseline module: its name, what it imports, and what it says it cannot do."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import fsbench.baselines
from fsbench.problem import Problem
from fsbench.provider import Kind

MODULES = [module.name for module in pkgutil.iter_modules(fsbench.baselines.__path__)]
NAMES = [
    module.name for module in pkgutil.iter_modules(fsbench.baselines.__path__) if not module.ispkg
]
CPU = {"multinomial", "multinomial_compiled", "exponential_race", "greedy", "matmul_only"}
CPU_ONLY = {"simple_full_v", "simple_parallel"}
TRUNCATED = {"sort_top_k_top_p", "sort_top_k_top_p_compiled", "akunu_cpu"}
CPU |= {"simple_full_v", "simple_parallel", "simple_offload", "simple_shvs"}


def provider(name: str):
    return importlib.import_module(f"fsbench.baselines.{name}").PROVIDER


def test_importing_them_imports_no_framework() -> None:
    """`fsbench list` imports them all and must start without torch."""
    script = (
        "import importlib, sys\n"
        f"for name in {MODULES!r}: importlib.import_module('fsbench.baselines.' + name)\n"
        "sys.exit(bool({'torch', 'flashinfer'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.parametrize("name", NAMES)
def test_name_is_the_file_stem(name: str) -> None:
    assert provider(name).name == name


@pytest.mark.parametrize("name", NAMES)
def test_unsupported_reasons(name: str) -> None:
    its = provider(name)
    on_cpu = its.unsupported_reason(Problem(1, 8, 8, "bf16", device="cpu"))
    assert (on_cpu is None) == (name in CPU | TRUNCATED)
    if on_cpu is not None:
        assert on_cpu == "runs on cuda only, not on cpu"
    on_gpu = its.unsupported_reason(Problem(1, 8, 8, "bf16"))
    if name in CPU_ONLY:
        assert on_gpu == "runs on cpu only, not on cuda"
        return
    assert on_gpu is None
    in_fp32 = its.unsupported_reason(Problem(1, 8, 8, "fp32"))
    expected = "takes bf16, fp16, not fp32" if name.startswith("flashinfer") else None
    assert in_fp32 == expected
    sharded = its.unsupported_reason(Problem(1, 8, 8, tp=2)) is None
    assert sharded == (its.build_sharded is not None)
    if its.kind is Kind.EXACT:
        greedy = its.unsupported_reason(Problem(1, 8, 8, temperature=0.0))
        assert (greedy is None) == its.capabilities.zero_temperature


def test_presets() -> None:
    members: dict[str, set[str]] = {}
    for name in NAMES:
        for preset in provider(name).presets:
            members.setdefault(preset, set()).add(name)
    assert members["cpu"] == CPU
    assert members["paper"] == {
        "multinomial_compiled",
        "flashinfer_top_k_top_p",
        "flashinfer_gumbel",
        "matmul_only",
        "weight_stream",
    }
