"""Samplers in plain torch, honest or with one mistake planted: the parts of `planted_bugs`.

Makers of providers: `stepped` from a function of logits; `planted` from noise and a draw;
`filtered` with top-k and penalties; in planted_calls.py `contract` with the full call, `scorer`.
Each is honest by default, and a keyword names the part that a mistake replaces. Noise is a function
of (seed, step), the row and the token, drawn tile by tile from generators of numpy, which take a
quarter of the time of torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsbench import reference
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Provider

TILE = 128

Uniform = Callable[[np.random.Generator, tuple[int, ...]], Tensor]
Noise = Callable[..., Tensor]
"""(seed, step, B, V, uniform) -> Gumbel noise [B, V]."""
Change = Callable[..., Any]


def same(value: object, *_: object) -> object:
    return value


def mixed(*numbers: int) -> int:
    """A key of 63 bits that depends on all of the numbers."""
    key = 0x243F6A8885A308D3
    for number in numbers:
        key = (key ^ (number % 2**64)) * 0x9E3779B97F4A7C15 % 2**64
        key ^= key >> 29
    return key >> 1


def generator(key: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(key))


# Uniform numbers


def fine_exponential(source: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """-log of a Gumbel's exponential, from 53 bits: no tail is cut."""
    return torch.from_numpy(source.standard_exponential(shape)).float()


def own_exponential(like: Tensor) -> Tensor:
    """Return fp32 noise of a sampler that uses torch's generator, in the shape of `like`."""
    return fine_exponential(generator(int(torch.randint(2**62, ()))), tuple(like.shape))


def gumbel(exponential: Tensor) -> Tensor:
    return exponential.log_().neg_()


# Noise


def whole_noise(seed, step, B, V, uniform=fine_exponential):
    return gumbel(uniform(generator(mixed(seed, step)), (B, V)))


def of_key(change: Callable[[int, int], tuple[int, int]]) -> Noise:
    """whole_noise of another (seed, step)."""
    return lambda seed, step, *args: whole_noise(*change(seed, step), *args)


def tiles(key: Callable[[int], int], B: int, V: int, size: int = TILE) -> Tensor:
    """Noise of tile t from a generator with key(t)."""
    parts = [
        fine_exponential(generator(key(first // size)), (B, size))[:, : V - first]
        for first in range(0, V, size)
    ]
    return gumbel(torch.cat(parts, 1))


def of_tiles(key: Callable[[int, int, int], int]) -> Noise:
    """Noise of tile t from a generator with key(seed, step, t)."""
    return lambda seed, step, B, V, *_: tiles(lambda tile: key(seed, step, tile), B, V)


by_tile = of_tiles(mixed)
"""Honest: seed, step and tile are all of the key."""


def tile_of_the_batch_size(seed, step, B, V, uniform=None):
    """Keyed by the tile's number, where the size of tiles follows B: batch-dependent."""
    return tiles(lambda tile: mixed(seed, step, tile), B, V, 128 if B > 16 else 256)


def few_keys(seed, step, B, V, uniform=fine_exponential):
    """16 bits of a hash as the key: 256 rows and steps soon meet the same noise again."""
    rows = [uniform(generator(mixed(mixed(seed, step, row) % 2**12)), (1, V)) for row in range(B)]
    return gumbel(torch.cat(rows))


def salted(salt: int) -> Noise:
    """Honest, and another for every salt."""
    return of_key(lambda seed, step: (mixed(seed, salt), step))


# Draws


def argmax(logits: Tensor, T: float, noise: Tensor) -> Tensor:
    """Honest."""
    return torch.add(logits, noise, alpha=T).argmax(1)


def padded_with_zero(logits, T, noise):
    """The last tile's padding counts as logits of 0; its noise is that of the first tokens."""
    missing = -logits.shape[1] % TILE
    padded = torch.nn.functional.pad(logits + T * noise, (0, missing))
    return padded.argmax(1).clamp_max(logits.shape[1] - 1)


def padding_returned(logits, T, noise):
    missing = -logits.shape[1] % TILE
    return torch.nn.functional.pad(logits + T * noise, (0, missing)).argmax(1)


def ties_to_the_last(logits, T, noise):
    """Scores / T in steps of 0.7, and the last of equal ones."""
    scores = ((logits / T + noise) / 0.7).round()
    return scores.shape[1] - 1 - scores.flip(1).argmax(1)


def crossing_token_dropped(logits, T, noise):
    """Top-p of 0.999 where none was asked for: the tail is left out."""
    p, order = (logits / T).softmax(1).sort(1, descending=True)
    dropped = (p.cumsum(1) > 0.999).gather(1, order.argsort(1))
    dropped &= logits < logits.amax(1, keepdim=True)
    return (logits + T * noise).masked_fill(dropped, -torch.inf).argmax(1)


def by_inverse_cdf(cdf_of: Callable[[Tensor], Tensor]) -> Change:
    """A draw by the running sums that cdf_of makes of the softmax; above them, the last token."""

    def draw(logits: Tensor, T: float, noise: Tensor) -> Tensor:
        u = torch.exp(-torch.exp(-noise[:, :1].double()))
        cdf = cdf_of((logits / T).softmax(1)).double()
        return torch.searchsorted(cdf, u, right=True)[:, 0].clamp_max(logits.shape[1] - 1)

    return draw


def exact_cdf(p: Tensor) -> Tensor:
    """Honest."""
    return p.double().cumsum(1) / p.double().sum(1, keepdim=True)


Step = Callable[[Tensor, float, Tensor, Tensor], Tensor]
"""(logits [B, V] fp32, temperature, seed, offset) -> tokens [B]."""


def stepped(
    step: Step, kind: Kind = Kind.EXACT, fused: bool = False, name: str = "made_up", **able: object
) -> Provider:
    """A sampler whose launch is the matmul and `step`."""

    def build(problem: Problem, weight: Tensor):
        def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
            return step((hidden @ weight.T).float(), problem.temperature, seed, offset)

        return launch

    able = {"zero_temperature": True, "fused": fused, **able}
    capabilities = Capabilities(("cpu",), ("bf16", "fp16", "fp32"), **able)
    return Provider(name, name, kind, build, capabilities=capabilities)


def planted(
    noise: Noise = whole_noise,
    draw: Callable[[Tensor, float, Tensor], Tensor] = argmax,
    uniform: Uniform = fine_exponential,
    greedy: bool = False,
    **able: object,
) -> Provider:
    """A sampler of these parts. greedy: at T = 0 it takes the argmax, as it claims then."""

    def step(logits: Tensor, T: float, seed: Tensor, offset: Tensor) -> Tensor:
        return draw(logits, T, noise(int(seed), int(offset), *logits.shape, uniform))

    return stepped(step, name="planted", zero_temperature=greedy, **able)


def noisy(draw: Callable[[Tensor, float, Tensor], Tensor]) -> Step:
    """A step of a draw, with Gumbel noise that follows torch's generator."""
    return lambda y, T, seed, offset: draw(y, T, -own_exponential(y).log())


def token_noise(**mistakes: Change) -> Step:
    """The token noise of the contract, or with a mistake: what to compute from an argument."""
    replace = {"seed": int, "offset": int, "scale": lambda T: T, **mistakes}

    def step(logits: Tensor, T: float, seed: Tensor, offset: Tensor) -> Tensor:
        rows = replace.get("rows", same)(torch.arange(len(logits)))
        seed = torch.tensor([replace["seed"](seed)])
        offset = torch.tensor([replace["offset"](offset)])
        noise = reference.token_noise(logits.shape[1], seed, offset, rows)
        noise = replace.get("noise", same)(noise)
        return (logits.double() + replace["scale"](T) * noise).argmax(1)

    return step


def filtered(
    second_seed: Callable[[int], int] = lambda seed: mixed(seed, 2),
    neighbors: bool = False,
    keeps_ties: bool = False,
    k_of: Callable[[Tensor, int, int], Tensor] = lambda k, B, V: k,
    penalize: Callable[..., Tensor] = reference.penalized,
    **able: object,
) -> Provider:
    """Penalties, then top-k by two races: among all tokens, else among the kept.

    second_seed: of the second race. neighbors: its noise depends on the largest k of the batch.
    keeps_ties: of tokens equal to the kth all are kept, though it is said that the first are.
    k_of: (k of each row, B, V) -> the k that it applies.
    """

    def build(problem: Problem, weight: Tensor):
        filters = torch.tensor(problem.row_filters(), dtype=torch.float64)
        if problem.penalties:
            histories = zip(*problem.row_histories(), strict=True)
            counts = [reference.token_counts(tokens, problem.V) for tokens in histories]
        last = logits = kept = torch.empty(0)  # most launches repeat the hidden states of the last

        def prepare(hidden: Tensor) -> tuple[Tensor, Tensor]:
            logits = (hidden @ weight.T).double()
            if problem.penalties:
                logits = penalize(
                    logits,
                    *counts,
                    repetition=problem.repetition_penalty,
                    presence=problem.presence_penalty,
                    frequency=problem.frequency_penalty,
                )
            k = filters[:, 0]
            top_k = torch.where(k > 0, k_of(k, *logits.shape), 0)
            kept = reference.truncate(
                logits, problem.temperature, top_k=top_k, keeps_ties=keeps_ties
            ).kept
            return logits, kept

        def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
            nonlocal last, logits, kept
            if not torch.equal(hidden, last):
                last, (logits, kept) = hidden.clone(), prepare(hidden)
            B, V = logits.shape
            seed, step = int(seed), int(offset)
            salt = int(filters[:B, 0].sum()) if neighbors else 0
            first, second = (
                argmax(scores, problem.temperature, whole_noise(key + salt, step, B, V))
                for scores, key in (
                    (logits, seed),
                    (logits.masked_fill(~kept, -torch.inf), second_seed(seed)),
                )
            )
            return torch.where(kept.gather(1, first[:, None])[:, 0], first, second)

        return launch

    able = {"filters": ("top_k",), "mixed_filters": True, "penalties": True, **able}
    capabilities = Capabilities(("cpu",), ("fp32", "bf16"), **able)
    return Provider("filtered", "Filtered", Kind.TRUNCATED, build, capabilities=capabilities)


# Maps from random bits to noise


def honest_map(codes: Tensor) -> tuple[Tensor, Tensor]:
    return reference.exponential(codes).float(), reference.gumbel(codes).float()


def closed_map(codes: Tensor) -> tuple[Tensor, Tensor]:
    u = (codes + 1).float() * (1 / (2**32 + 1))
    return -torch.log1p(-u), -torch.log(-torch.log1p(-u))


def rounded_map(codes: Tensor) -> tuple[Tensor, Tensor]:
    """The complement of u in fp32, without the care for small u."""
    exponential, gumbel = honest_map(codes)
    return exponential, torch.where(codes % 1000 == 0, gumbel + 1e-3, gumbel)


# Steps that the gate of `fsbench run` must reject


def without_first(step: Step) -> Step:
    """The first token is not looked at."""
    return lambda y, *args: step(y[:, 1:], *args) + 1 if y.shape[1] > 1 else y.argmax(1)


def without_last(step: Step) -> Step:
    return lambda y, *args: step(y[:, : max(1, y.shape[1] - 1)], *args)


def greedy(logits, T, seed, offset):
    return logits.argmax(1)


honest = noisy(argmax)


BIASED: dict[str, Step] = {
    "temperature ignored": noisy(lambda y, T, g: (y + g).argmax(1)),
    "temperature squared": noisy(lambda y, T, g: (y + T * T * g).argmax(1)),
    "noise sign flipped": noisy(lambda y, T, g: (y - T * g).argmax(1)),
    "last token never drawn": without_last(honest),
    "first token never drawn": without_first(honest),
    "shifted by one": lambda y, *args: (honest(y, *args) + 1) % y.shape[1],
    "outside the vocabulary": lambda y, *args: honest(y, *args).sub(1) % (y.shape[1] + 1),
    "negative ids": lambda y, *args: honest(y, *args) - 1,
    "always the same token": lambda y, *args: torch.full((len(y),), 3 % y.shape[1]),
    "greedy": greedy,
    "uniform": lambda y, *args: torch.randint(y.shape[1], (len(y),)),
    "noise capped": noisy(lambda y, T, g: (y + T * g.clamp_max(5)).argmax(1)),
}


def second_best(logits, T, seed, offset):
    return logits.topk(min(2, logits.shape[1]), 1).indices[:, -1]


def of_many(step: Step) -> Step:
    """A mistake of more than one tile of 128 tokens."""
    return lambda y, *args: (step if y.shape[1] > 128 else greedy)(y, *args)


NOT_GREEDY: dict[str, Step] = {
    "second best": second_best,
    "padding wins over negative logits": lambda y, *args: (
        torch.nn.functional.pad(y, (0, -y.shape[1] % 64)).argmax(1).clamp_max(y.shape[1] - 1)
    ),
    "last token unseen": without_last(greedy),
    "first token unseen": without_first(greedy),
    "last of many unseen": of_many(without_last(greedy)),
    "first of many unseen": of_many(without_first(greedy)),
    "rows beyond 16 lost": lambda y, *args: y.argmax(1).where(torch.arange(len(y)) < 16, 0),
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
