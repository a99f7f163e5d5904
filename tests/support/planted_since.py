"""Bugs that the ci tier of fsbench 0.2.0 passed in bf16, each with the check that finds it now.

SINCE is a part of planted_bugs.BUGS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import planted_samplers as samplers
import torch
from planted_calls import complete, contract
from planted_samplers import argmax, filtered, fine_exponential, planted, whole_noise
from torch import Tensor

from fsbench import reference
from fsbench.kernels import verify_drafts
from fsbench.provider import Provider


def other_seed_for_the_last(tokens, logits, T, seed, step):
    """The last row of odd batches above 100 is drawn with another seed."""
    if len(logits) <= 100 or len(logits) % 2 == 0:
        return tokens
    tokens = tokens.clone()
    T, seed, step = (x[-1:] if isinstance(x, Tensor) else x for x in (T, seed, step))
    tokens[-1:] = reference.expect(logits[-1:], seed + 1, step, T, "group").tokens.view(
        1, *[1] * (tokens.ndim - 1)
    )
    return tokens


def last_of_equals(tokens, logits, T, *_):
    """T = 0 takes the last of equal logits."""
    T = torch.as_tensor(T).expand(len(logits))
    last = logits.shape[1] - 1 - logits.flip(1).argmax(1)
    greedy = ((T == 0) & (tokens.view(len(tokens), -1)[:, 0] >= 0)).view(
        -1, *[1] * (tokens.ndim - 1)
    )
    return torch.where(greedy, last.view(greedy.shape), tokens)


def masked_rows_swapped(T, seed, mask):
    """Above 100 rows, where there is a mask, a row has the T of the row before."""
    if mask is None or not isinstance(T, Tensor) or len(T) <= 100:
        return T
    swapped = T.roll(1)
    return torch.where((swapped == 0) | (T == 0), T, swapped)


def words_wrong_from_8192(mask, *_):
    """The 256 words of a mask that come first count again for what follows."""
    return mask[:, torch.arange(mask.shape[1]) % 8192]


def frozen_seed(change: Callable[[Tensor], Tensor]) -> samplers.Change:
    """A hook of seeds that are one per request."""
    return lambda seed, _: change(seed) if len(seed) > 1 else seed


def eager_acceptance(sampled: Tensor, drafts: Tensor):
    """A quarter of wrong drafts are accepted: those whose token is a multiple of 4."""
    tokens = sampled.clone()
    tokens[:, :-1] = torch.where(drafts % 4 == 0, drafts, tokens[:, :-1])
    return verify_drafts(tokens, drafts)


def behind_the_first_wrong(sampled: Tensor, drafts: Tensor):
    """Drafts that are right behind a wrong one count as accepted."""
    found = verify_drafts(sampled, drafts)
    return found._replace(num_accepted=(sampled[:, :-1] == drafts).sum(1))


def output_ignored(logits, prompts, outputs, **penalties):
    return reference.penalized(logits, prompts, torch.zeros_like(outputs), **penalties)


def prompt_counted(logits, prompts, outputs, **penalties):
    return reference.penalized(logits, prompts, prompts + outputs, **penalties)


def always_divided(logits, prompts, outputs, **penalties):
    """The repetition penalty divides logits below 0, too, which makes them likelier."""
    seen, repeated = (prompts + outputs) > 0, logits / penalties.pop("repetition")
    return reference.penalized(torch.where(seen, repeated, logits), prompts, outputs, **penalties)


def antithetic(of_rows: bool) -> samplers.Noise:
    """Every second row, or step, takes 1 - u where the one before took u."""

    def noise(seed, step, B, V, uniform=fine_exponential):
        if of_rows:
            first = whole_noise(seed, step, -(-B // 2), V).repeat_interleave(2, 0)[:B]
            turned = (torch.arange(B) % 2 == 1)[:, None]
        else:
            first = whole_noise(seed, step // 2, B, V)
            turned = torch.tensor(step % 2 == 1)
        u = torch.exp(-torch.exp(-first.double()))
        return torch.where(turned, -torch.log(-torch.log1p(-u)), first.double()).float()

    return noise


def seed_0_is_none(seed: Tensor, _: object) -> Tensor:
    """A request with seed 0 gets a seed at random."""
    return torch.where(seed == 0, torch.randint(2**62, seed.shape), seed)


def row_137_colder(logits, T, noise):
    scale = torch.full((len(logits), 1), T)
    scale[137:138] /= 2
    return (logits + scale * noise).argmax(1)


def replace_able(sampler: Provider, **able: object) -> Provider:
    """The sampler with other capabilities."""
    return replace(sampler, capabilities=replace(sampler.capabilities, **able))


SINCE = {
    # Of seeds and offsets.
    "seeds of requests share noise by twos": (complete(seed=frozen_seed(lambda s: s // 2)), "call"),
    "seeds of requests lose their sign": (complete(seed=frozen_seed(torch.abs)), "call"),
    "only the first seed is read": (
        replace_able(complete(seed=lambda seed, _: seed[:1]), batch_invariant=False),
        "call",
    ),
    "only the first offset is read": (complete(step=lambda offset: offset[:1]), "call"),
    "offsets of requests modulo 256": (
        complete(step=lambda offset: offset % 256 if len(offset) > 1 else offset),
        "call",
    ),
    "seed 0 counts as none": (complete(seed=seed_0_is_none), "call"),
    "seeds are ignored where there is a mask": (
        replace_able(
            complete(seed=lambda seed, mask: seed if mask is None else seed[:1]),
            batch_invariant=False,
        ),
        "masks",
    ),
    "the last row of odd batches above 100 has another seed": (
        complete(tokens=other_seed_for_the_last),
        "call",
    ),
    # Of logits and temperatures.
    "logits / T in bf16": (planted(draw=lambda y, T, g: ((y / T).bfloat16() + g).argmax(1)), "fit"),
    "T rounded to eighths": (
        planted(draw=lambda y, T, g: argmax(y, max(round(8 * T), 1) / 8, g)),
        "fit",
    ),
    "T above 1 counts as 1": (planted(draw=lambda y, T, g: argmax(y, min(T, 1.0), g)), "variation"),
    "scores end at 80": (planted(draw=lambda y, T, g: argmax(y.clamp_max(80), T, g)), "fit"),
    "the last of equal logits at T = 0": (contract(tokens=last_of_equals), "greedy"),
    "row 137 has half of T": (planted(draw=row_137_colder), "rows"),
    "every second row takes 1 - u": (planted(antithetic(True)), "rows"),
    "every second step takes 1 - u": (planted(antithetic(False)), "steps"),
    # Of biases and masks.
    "bias ignored but for -inf": (
        complete(bias=lambda bias, T: bias.where(bias == -torch.inf, 0.0)),
        "masks",
    ),
    "bias added after the division by T": (
        complete(bias=lambda b, T: b * torch.as_tensor(T).clamp_min(1e-3).reshape(-1, 1)),
        "masks",
    ),
    "bias of all rows ignored": (
        complete(bias=lambda bias, _: torch.zeros_like(bias) if bias.ndim == 1 else bias),
        "masks",
    ),
    "masked rows take another row's T above 100 rows": (
        complete(temperature=masked_rows_swapped),
        "masks",
    ),
    "packed mask words wrong from token 8192 on": (complete(mask=words_wrong_from_8192), "masks"),
    # Of samples and what is said of them.
    "samples 1, 2, .. have no mask": (
        complete(drawn_from=lambda y, T, number, plain: (plain if number else y, T)),
        "masks",
    ),
    "samples 1, 2, .. have T = 1": (
        complete(drawn_from=lambda y, T, number, plain: (y, 1.0 if number else T)),
        "call",
    ),
    "log-probabilities of all samples are the first's": (
        complete(logprob=lambda p: p[:, :1].expand_as(p) if p.ndim == 2 else p),
        "score",
    ),
    "log-probabilities without the bias": (complete(scored_from=lambda y, masked: masked), "score"),
    # Of penalties and filters.
    "penalties ignore the output": (filtered(penalize=output_ignored), "truncation"),
    "penalties count the prompt as output": (filtered(penalize=prompt_counted), "truncation"),
    "repetition divides logits below 0": (filtered(penalize=always_divided), "truncation"),
    "top-k above 1024 counts as 1024": (
        filtered(k_of=lambda k, B, V: k.clamp_max(1024)),
        "truncated draws",
    ),
    # Of drafts.
    "a quarter of wrong drafts is accepted": (contract(accept=eager_acceptance), "speculation"),
    "drafts behind a wrong one are accepted": (
        contract(accept=behind_the_first_wrong),
        "speculation",
    ),
}
