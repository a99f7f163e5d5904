"""The gate: checks that a sampler must pass before it is timed, once per dtype and temperature."""

from __future__ import annotations

from collections.abc import Callable

from fsbench import verify
from fsbench.problem import Problem
from fsbench.provider import Provider
from fsbench.verify.check import Setting

GateKey = tuple[str, Setting]
"""Name of a sampler, and the setting it is verified for."""


def setting_of(problem: Problem) -> Setting:
    """Return the setting of `verify` for a problem. All filters share one setting."""
    has_filters = bool(problem.filters or problem.penalties)
    return Setting(
        problem.device, problem.dtype, problem.temperature, has_filters, weights=problem.weights
    )


def failed_checks(
    provider: Provider, problem: Problem, begin: Callable[[str], None] = lambda name: None
) -> str:
    """Verify a sampler for a problem; return the failed checks with details, "" if it passes.

    Args:
        begin: called with the name of each check before it runs.

    Raises:
        Whatever verify.verify raises.
    """
    checks = verify.verify(provider, setting_of(problem), begin=begin)
    return "; ".join(f"{check.name}: {check.detail}" for check in checks if not check.passed)
