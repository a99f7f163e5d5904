"""Samplers for the gate: honest ones, and what a sampler may get wrong."""

from __future__ import annotations

from collections.abc import Callable

import mutant_samplers as samplers
import torch
from mutant_samplers import own_exponential
from torch import Tensor

from fsbench import reference
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Provider
from fsbench.verify.check import Setting

SETTING = Setting("cpu", "fp32", 0.7)  # a temperature whose neglect shows

Step = Callable[[Tensor, float, Tensor, Tensor], Tensor]
"""(logits [B, V] fp32, temperature, seed, offset) -> tokens [B]."""


def provider(step: Step, kind: Kind = Kind.EXACT, fused: bool = False, **able) -> Provider:
    def build(problem: Problem, weight: Tensor):
        def launch(hidden, seed, offset):
            return step((hidden @ weight.T).float(), problem.temperature, seed, offset)

        return launch

    able = {"zero_temperature": True, "fused": fused, **able}
    capabilities = Capabilities(("cpu",), ("bf16", "fp16", "fp32"), **able)
    return Provider("made_up", "Made up", kind, build, capabilities=capabilities)


# With noise of their own


def noisy(draw: Callable[[Tensor, float, Tensor], Tensor]) -> Step:
    """A step of a draw of mutant_samplers, with Gumbel noise."""
    return lambda y, T, seed, offset: draw(y, T, -own_exponential(y).log())


def without_first(step: Step) -> Step:
    """The first token is not looked at."""
    return lambda y, *of: step(y[:, 1:], *of) + 1 if y.shape[1] > 1 else y.argmax(1)


def without_last(step: Step) -> Step:
    return lambda y, *of: step(y[:, : max(1, y.shape[1] - 1)], *of)


def greedy(logits, T, seed, offset):
    return logits.argmax(1)


honest = noisy(samplers.argmax)


BIASED: dict[str, Step] = {
    "temperature ignored": noisy(lambda y, T, g: (y + g).argmax(1)),
    "temperature squared": noisy(lambda y, T, g: (y + T * T * g).argmax(1)),
    "noise sign flipped": noisy(lambda y, T, g: (y - T * g).argmax(1)),
    "last token never drawn": without_last(honest),
    "first token never drawn": without_first(honest),
    "shifted by one": lambda y, *of: (honest(y, *of) + 1) % y.shape[1],
    "outside the vocabulary": lambda y, *of: honest(y, *of).sub(1) % (y.shape[1] + 1),
    "negative ids": lambda y, *of: honest(y, *of) - 1,
    "always the same token": lambda y, *of: torch.full((len(y),), 3 % y.shape[1]),
    "greedy": greedy,
    "uniform": lambda y, *of: torch.randint(y.shape[1], (len(y),)),
    "noise capped": noisy(lambda y, T, g: (y + T * g.clamp_max(5)).argmax(1)),
}


# With token noise


def token_noise(**mistakes) -> Step:
    """The documented noise, or with a mistake: what to compute in place of an argument of it."""
    replace = {"seed": int, "offset": int, "scale": lambda T: T, **mistakes}

    def step(logits, T, seed, offset):
        rows = torch.arange(len(logits))
        if "rows" in mistakes:
            rows = replace["rows"](rows)
        seed = torch.tensor([replace["seed"](seed)])
        offset = torch.tensor([replace["offset"](offset)])
        noise = reference.token_noise(logits.shape[1], seed, offset, rows)
        if "noise" in mistakes:
            noise = replace["noise"](noise)
        return (logits.double() + replace["scale"](T) * noise).argmax(1)

    return step


# Greedy


def second_best(logits, T, seed, offset):
    return logits.topk(min(2, logits.shape[1]), 1).indices[:, -1]


def of_many(step: Step) -> Step:
    """A mistake of more than one tile of 128 tokens."""
    return lambda y, *of: (step if y.shape[1] > 128 else greedy)(y, *of)


NOT_GREEDY: dict[str, Step] = {
    "second best": second_best,
    "padding wins over negative logits": lambda y, *of: (
        torch.nn.functional.pad(y, (0, -y.shape[1] % 64)).argmax(1).clamp_max(y.shape[1] - 1)
    ),
    "last token unseen": without_last(greedy),
    "first token unseen": without_first(greedy),
    "last of many unseen": of_many(without_last(greedy)),
    "first of many unseen": of_many(without_first(greedy)),
    "rows beyond 16 lost": lambda y, *of: y.argmax(1).where(torch.arange(len(y)) < 16, 0),
    **{
        name: BIASED[name]
        for name in (
            "shifted by one",
            "outside the vocabulary",
            "always the same token",
            "temperature ignored",
        )
    },
}
