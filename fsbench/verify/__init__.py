"""Does a sampler draw what it should? `verify` runs every check that applies to a provider."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fsbench.errors import ProviderUnavailable, UnsupportedProblem, describe, is_out_of_memory
from fsbench.provider import Kind, Provider

if TYPE_CHECKING:
    from fsbench.verify.checks import Check, Setting

FIT_DRAWS = {"cuda": 2**20, "cpu": 2**16}
"""Draws of the goodness-of-fit test by device type: a few seconds on either."""


def verify(provider: Provider, setting: Setting) -> Iterator[Check]:
    """The checks that apply to a provider, run one by one as they are asked for.

    An exception in a check is a failed check: a sampler that crashes is not verified. Three say
    nothing about the sampler and are raised: UnsupportedProblem (it cannot do what the checks
    ask), ProviderUnavailable and lack of memory.
    """
    from fsbench.verify import checks

    able = provider.capabilities
    todo: list[tuple[str, Callable[[], Check]]] = []
    if able.noise is not None:
        todo.append(("oracle", lambda: checks.check_oracle(provider, setting)))
        todo.append(("undefined rows", lambda: checks.check_undefined_rows(provider, setting)))
    if provider.kind is Kind.GREEDY or (provider.kind is Kind.EXACT and able.zero_temperature):
        todo.append(("greedy", lambda: checks.check_greedy(provider, setting)))
    if provider.kind is Kind.EXACT:
        draws = FIT_DRAWS[setting.device]
        todo.append(("fit", lambda: checks.check_fit(provider, setting, draws)))
    for name, check in todo:
        try:
            yield check()
        except (UnsupportedProblem, ProviderUnavailable):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            yield checks.Check(name, False, describe(error))
