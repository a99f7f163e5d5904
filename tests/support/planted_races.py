"""Races of exponentials with planted rounding, as quick at 2^31 random numbers as at few."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from planted_samplers import generator, mixed
from torch import Tensor

from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Provider


def race_of_levels(exponential: Callable[[Tensor], Tensor]) -> Provider:
    """A race of the tokens' exponentials, computed by monotone rounding of uniform numbers.

    Of n tokens with equal logits the one with the largest number wins, which is u^(1/n) of one
    number. So 2^31 numbers of a row with two levels of logits take a second. All rows are equal.
    """

    def build(problem: Problem, weight: Tensor):
        @cache
        def levels(column: int) -> tuple[Tensor, Tensor, Tensor]:
            levels, level, sizes = weight[:, column].unique(return_inverse=True, return_counts=True)
            return levels.double() / problem.temperature, level.argsort(stable=True), sizes

        def launch(hidden, seed, offset):
            scores, tokens, sizes = levels(int(hidden[0].argmax()))
            source = generator(mixed(int(seed), int(offset)))
            u = torch.from_numpy(source.random((2, len(hidden), len(sizes))))
            race = scores - exponential(u[0] ** (1 / sizes)).double().log()
            best = race.argmax(1)
            member = (u[1].gather(1, best[:, None])[:, 0] * sizes[best]).long()
            return tokens[(sizes.cumsum(0) - sizes)[best] + member]

        return launch

    capabilities = Capabilities(("cpu",), ("fp32",))
    return Provider("race", "Race", Kind.EXACT, build, capabilities=capabilities)


def cut(u: Tensor) -> Tensor:
    """No exponential is below 2^-24, as in a race of p / E in fp32."""
    return u.log().neg().clamp_min(2.0**-24)


def coarse(u: Tensor) -> Tensor:
    """From 24 bits: no exponential is below 2^-24, so no Gumbel exceeds 16.6."""
    u = (u * 2.0**24).floor() * 2.0**-24
    return u.float().clamp(2.0**-24, 1 - 2.0**-24).log().neg()


def closed(u: Tensor) -> Tensor:
    """u = (r + 1) / (2^32 + 1) in fp32: 128 of 2^32 codes round to 1, where -log u = 0."""
    r = (u * 2.0**32).floor().float()
    return r.add(1).mul(1 / (2**32 + 1)).log().neg()


HONEST = race_of_levels(lambda u: u.log().neg())
"""A correct sampler of the same form."""
