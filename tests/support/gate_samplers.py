"""Samplers for the gate: honest ones, and what a sampler may get wrong."""

from __future__ import annotations

from collections.abc import Callable

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


def gumbel(logits: Tensor) -> Tensor:
    return -own_exponential(logits).log()


def honest(logits, T, seed, offset):
    return (logits + T * gumbel(logits)).argmax(1)


def temperature_ignored(logits, T, seed, offset):
    return (logits + gumbel(logits)).argmax(1)


def temperature_squared(logits, T, seed, offset):
    return (logits + T * T * gumbel(logits)).argmax(1)


def noise_sign_flipped(logits, T, seed, offset):
    return (logits - T * gumbel(logits)).argmax(1)


def last_token_never_drawn(logits, T, seed, offset):
    return honest(logits[:, :-1], T, seed, offset) if logits.shape[1] > 1 else logits.argmax(1)


def first_token_never_drawn(logits, T, seed, offset):
    if logits.shape[1] == 1:
        return logits.argmax(1)
    return honest(logits[:, 1:], T, seed, offset) + 1


def shifted_by_one(logits, T, seed, offset):
    return (honest(logits, T, seed, offset) + 1) % logits.shape[1]


def outside_the_vocabulary(logits, T, seed, offset):
    tokens = honest(logits, T, seed, offset)
    return torch.where(tokens == 0, logits.shape[1], tokens)


def negative_ids(logits, T, seed, offset):
    tokens = honest(logits, T, seed, offset)
    return torch.where(tokens == 0, -1, tokens)


def always_the_same_token(logits, T, seed, offset):
    return torch.full((logits.shape[0],), 3 % logits.shape[1])


def greedy(logits, T, seed, offset):
    return logits.argmax(1)


def uniform(logits, T, seed, offset):
    return torch.randint(logits.shape[1], (logits.shape[0],))


def rows_share_the_noise(logits, T, seed, offset):
    return (logits + T * gumbel(logits[:1])).argmax(1)


def steps_share_the_noise(logits, T, seed, offset):
    generator = torch.Generator().manual_seed(5)
    noise = -torch.empty_like(logits).exponential_(generator=generator).log()
    return (logits + T * noise).argmax(1)


def padding_has_logit_zero(logits, T, seed, offset):
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[1] % 64))
    return honest(padded, T, seed, offset).clamp_max(logits.shape[1] - 1)


def noise_capped(logits, T, seed, offset):
    return (logits + T * gumbel(logits).clamp_max(5)).argmax(1)


def rare_tokens_left_out(logits, T, seed, offset):
    """Top-p 0.9: what filters do."""
    p, order = (logits / T).softmax(1).sort(1, descending=True)
    dropped = (p.cumsum(1) - p > 0.9).gather(1, order.argsort(1))
    return honest(logits.masked_fill(dropped, -torch.inf), T, seed, offset)


BIASED = [
    temperature_ignored,
    temperature_squared,
    noise_sign_flipped,
    last_token_never_drawn,
    first_token_never_drawn,
    shifted_by_one,
    outside_the_vocabulary,
    negative_ids,
    always_the_same_token,
    greedy,
    uniform,
    rows_share_the_noise,
    steps_share_the_noise,
    padding_has_logit_zero,
    noise_capped,
    rare_tokens_left_out,
]


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


def padding_wins_over_negative_logits(logits, T, seed, offset):
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[1] % 64))
    return padded.argmax(1).clamp_max(logits.shape[1] - 1)


def last_token_unseen(logits, T, seed, offset):
    return logits[:, : max(1, logits.shape[1] - 1)].argmax(1)


def first_token_unseen(logits, T, seed, offset):
    return logits.argmax(1) if logits.shape[1] == 1 else logits[:, 1:].argmax(1) + 1


def last_of_many_unseen(logits, T, seed, offset):
    """A partial tile that ends one token early."""
    return logits[:, : -1 if logits.shape[1] > 128 else None].argmax(1)


def first_of_many_unseen(logits, T, seed, offset):
    return logits[:, 1:].argmax(1) + 1 if logits.shape[1] > 128 else logits.argmax(1)


def rows_beyond_16_lost(logits, T, seed, offset):
    return logits.argmax(1).where(torch.arange(len(logits)) < 16, 0)
