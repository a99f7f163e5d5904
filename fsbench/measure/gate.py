"""The gate: what a sampler must pass before it is timed, at a dtype and temperature."""

from __future__ import annotations

from collections.abc import Callable

from fsbench import verify
from fsbench.problem import Problem
from fsbench.provider import Provider
from fsbench.verify.check import Setting


def setting_of(problem: Problem) -> Setting:
    """What of a problem the gate asks: with filters, it is verified with the same, whichever."""
    truncated = bool(problem.filters or problem.penalties)
    return Setting(
        problem.device, problem.dtype, problem.temperature, truncated, weights=problem.weights
    )


def gate(
    provider: Provider, problem: Problem, checked: Callable[[str], None] = lambda name: None
) -> str:
    """What the sampler failed, "" if in nothing. checked: called after each check.

    Raises: as verify.verify.
    """
    failed = []
    for check in verify.verify(provider, setting_of(problem)):
        checked(check.name)
        if not check.passed:
            failed.append(f"{check.name}: {check.detail}")
    return "; ".join(failed)
