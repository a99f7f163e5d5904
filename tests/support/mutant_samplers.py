"""Planted bugs: samplers in plain torch, each with one mistake that a real one has had.

`honest(...)` is the sampler without a mistake; a mutant differs from it in the keyword that names
the mistake. Noise is a function of (seed, step) and of the place in the batch and vocabulary, drawn
from generators that are seeded by it, tile by tile, as kernels with counters do it. They are
numpy's, which take a quarter of the time of torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsbench import reference
from fsbench.kernels import flash_sample
from fsbench.problem import Problem
from fsbench.provider import OPTIONS, Capabilities, Kind, Provider

TILE = 128

Uniform = Callable[[np.random.Generator, tuple[int, ...]], Tensor]
Noise = Callable[..., Tensor]
"""(seed, step, B, V, uniform) -> Gumbel noise [B, V]."""
Change = Callable[..., Any]


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
    """Of a sampler with noise of its own, which follows torch's generator: fp32 as `like`."""
    return fine_exponential(generator(int(torch.randint(2**62, ()))), tuple(like.shape))


def coarse_exponential(source: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """From 24 bits: E is never below 2^-24, so no Gumbel exceeds 16.6."""
    u = torch.from_numpy(source.random(shape, dtype=np.float32))
    return u.clamp_(2**-24, 1 - 2**-24).log_().neg_()


def closed_exponential(source: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """u = (r + 1) / (2^32 + 1) in fp32: 128 of 2^32 codes round to 1, where -log u = 0."""
    r = source.integers(2**32, size=shape, dtype=np.uint32)
    return torch.from_numpy(r.astype(np.float32)).add_(1).mul_(1 / (2**32 + 1)).log_().neg_()


def gumbel(exponential: Tensor) -> Tensor:
    return exponential.log_().neg_()


# Noise


def whole_noise(seed, step, B, V, uniform=fine_exponential):
    return gumbel(uniform(generator(mixed(seed, step)), (B, V)))


def of_key(change: Callable[[int, int], tuple[int, int]]) -> Noise:
    """whole_noise of another (seed, step)."""
    return lambda seed, step, *rest: whole_noise(*change(seed, step), *rest)


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
    """Scores in steps of 1/2, and the last of equal ones."""
    scores = ((logits + T * noise) * 2).round()
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


def planted(
    noise: Noise = whole_noise,
    draw: Callable[[Tensor, float, Tensor], Tensor] = argmax,
    uniform: Uniform = fine_exponential,
    greedy: bool = False,
    **able: object,
) -> Provider:
    """A sampler of these parts. greedy: at T = 0 it takes the argmax, as it claims then."""

    def build(problem: Problem, weight: Tensor):
        def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
            logits = (hidden @ weight.T).float()
            B, V = logits.shape
            made = noise(int(seed), int(offset), B, V, uniform)
            return draw(logits, problem.temperature, made)

        return launch

    capabilities = Capabilities(("cpu",), ("fp32", "bf16"), zero_temperature=greedy, **able)
    return Provider("planted", "Planted", Kind.EXACT, build, capabilities=capabilities)


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


# The reference as a sampler, with the full call


def same(value: object, *_: object) -> object:
    return value


TOLD = ("scored", "entropy", "above", "order", "scored_top")


def told(logits: Tensor, tokens: Tensor, T: float | Tensor, top: int = 0, **mistakes: Change):
    """What is said of tokens [B, n] and rows: logprob, entropy, rank, top_tokens, top_logprob.

    mistakes: scored, the T [B, 1] of log-probabilities; entropy; above, whether a logit counts as
    larger, of (logits, the token's); order, of tokens by logit, and logits; scored_top.
    """
    inverse = reference.inverse_temperature(T, logits.device)
    scored = mistakes.get("scored", same)(inverse)
    logp = (logits.double() * scored).log_softmax(1)
    exact = (logits.double() * inverse).log_softmax(1)
    entropy = -(exact.exp() * exact.nan_to_num(neginf=0.0)).sum(1)
    above = mistakes.get("above", torch.gt)
    picked = logits.gather(1, tokens.clamp_min(0))
    rank = torch.stack([above(logits, each[:, None]).sum(1) for each in picked.T], 1)
    order = logits.sort(dim=1, descending=True, stable=True).indices
    order = mistakes.get("order", same)(order, logits)[:, :top]
    ignored = tokens == -100
    return SimpleNamespace(
        logprob=logp.gather(1, tokens.clamp_min(0)).masked_fill(ignored, 0.0),
        entropy=mistakes.get("entropy", same)(entropy),
        rank=rank.masked_fill(ignored, -1),
        top_tokens=order.masked_fill(logits.gather(1, order) == -torch.inf, -1),
        top_logprob=mistakes.get("scored_top", same)(exact.gather(1, order)),
    )


def contract(
    noise: str = "group", own: bool = False, noise_map=None, **mistakes: Change
) -> Provider:
    """The reference as a provider. A mistake is a function of what it replaces, and of more.

    own: it does not say that its noise is that of the contract, so its law is looked at.
    mistakes: seed, step; mask [B, V] and the seed and step; bias; temperature and the seed; sample,
        of (seed, number of the sample), tokens, logprob; those of `told`.
    """
    known = {"seed", "step", "mask", "bias", "temperature", "sample", "tokens", "logprob", *TOLD}
    assert set(mistakes) <= known, mistakes

    def wrong(name: str) -> Change:
        return mistakes.get(name, same)

    def sample(
        hidden, weight, *, seed, offset, temperature=1.0, bias=None, mask=None, num_samples=1,
        return_logprob=False, return_entropy=False, return_rank=False, return_top=0,
    ):  # fmt: skip
        seed, offset = wrong("seed")(seed), wrong("step")(offset)
        if mask is not None:
            mask = wrong("mask")(reference.logits.unpacked(mask, len(weight)), seed, offset)
        if bias is not None:
            bias = wrong("bias")(bias)
        temperature = wrong("temperature")(temperature, seed)
        logits = hidden.float() @ weight.float().T
        logits = reference.processed_logits(logits, bias=bias, mask=mask)
        drawn = []
        for number in range(num_samples):
            key, at = wrong("sample")((seed, number))
            drawn.append(
                reference.expect(logits, key, offset, temperature, noise, sample=at).tokens
            )
        tokens = wrong("tokens")(drawn[0] if num_samples == 1 else torch.stack(drawn, 1))
        if not (return_logprob or return_entropy or return_rank or return_top):
            return SimpleNamespace(tokens=tokens)
        of_told = {name: mistakes[name] for name in TOLD if name in mistakes}
        said = told(logits, tokens.view(len(logits), -1), temperature, return_top, **of_told)
        said.logprob = wrong("logprob")(said.logprob.view_as(tokens))
        said.rank = said.rank.view_as(tokens)
        return SimpleNamespace(tokens=tokens, **vars(said))

    def build(problem: Problem, weight: Tensor):
        def launch(hidden, seed, offset):
            T = problem.temperature
            return sample(hidden, weight, seed=seed, offset=offset, temperature=T).tokens

        return launch

    able = Capabilities(
        ("cpu",),
        ("fp32", "bf16"),
        noise=None if own else noise,  # type: ignore[arg-type]
        zero_temperature=True,
        batch_invariant=True,
        **dict.fromkeys(OPTIONS, True),
    )
    return Provider(
        "contract", "Contract", Kind.EXACT, build, capabilities=able, sample=sample,
        noise_map=noise_map,
    )  # fmt: skip


# flash_sample, called wrongly


def one_offset_forever(hidden, weight, *, offset, **options):
    return flash_sample(hidden, weight, offset=torch.zeros_like(offset), **options)


def tokens_by_the_host(hidden, weight, **options):
    result = flash_sample(hidden, weight, **options)
    return result._replace(tokens=result.tokens.cpu().to(hidden.device))


def options_by_the_host(hidden, weight, *, temperature=1.0, **options):
    """A launch does well: its temperature is a number."""
    if isinstance(temperature, Tensor) and not temperature.any():
        temperature = 0.0
    return flash_sample(hidden, weight, temperature=temperature, **options)


def logits_stored(hidden, weight, **options):
    result = flash_sample(hidden, weight, **options)
    return result._replace(tokens=result.tokens + (hidden @ weight.T)[:, 0].long())
