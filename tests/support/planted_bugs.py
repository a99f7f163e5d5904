"""Bugs that real samplers have had, or could have: each a correct sampler with one thing changed.

BUGS are found in the ci tier: bug -> (sampler, the check that must see it). A sampler is `planted`
or `filtered` (a launch), or `complete` or `contract` (a full call). RARE and IN_THE_FAR_TAIL take
the draws of a GPU. BIASED and NOT_GREEDY are steps (`stepped`) that the gate finds.
"""

from __future__ import annotations

import re

import planted_samplers as samplers
import torch
from planted_calls import complete, contract
from planted_samplers import (
    argmax,
    by_inverse_cdf,
    filtered,
    fine_exponential,
    generator,
    gumbel,
    mixed,
    noisy,
    of_key,
    of_tiles,
    planted,
    whole_noise,
)
from planted_since import SINCE
from torch import Tensor

from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Provider

# Noise: (seed, step, B, V, uniform) -> [B, V]


def two_rows_share(seed, step, B, V, uniform=fine_exponential):
    noise = whole_noise(seed, step, B, V, uniform)
    if B > 201:
        noise[201] = noise[37]
    return noise


def row_cut_to_8_bits(seed, step, B, V, uniform=fine_exponential):
    return whole_noise(seed, step, min(B, 256), V, uniform)[torch.arange(B) % 256]


def rank_missing(seed, step, B, V, uniform=fine_exponential):
    """Two ranks of a sharded vocabulary with one seed: the second repeats the first's noise."""
    return whole_noise(seed, step, B, -(-V // 2), uniform).repeat(1, 2)[:, :V]


def rows_12_tiles_apart(seed, step, B, V, uniform=None):
    """Tile t of row b has stream 12 b + t: the 13th tile is the next row's first."""
    tiles = -(-V // samplers.TILE)
    source = generator(mixed(seed, step))
    streams = gumbel(fine_exponential(source, (12 * B + tiles, samplers.TILE)))
    own = 12 * torch.arange(B)[:, None] + torch.arange(tiles)
    return streams[own].flatten(1)[:, :V]


# Draws: (logits, T, noise) -> tokens


def last_block_rarer(logits, T, noise):
    logits[:, len(logits[0]) // 32 * 32 :] -= 0.2 * T  # e^-0.2 = 0.82
    return argmax(logits, T, noise)


def temperature_twice_from_row_8(logits, T, noise):
    per_row = torch.full((len(logits), 1), T)
    per_row[8:] *= T
    return (logits + per_row * noise).argmax(1)


def step_100_greedy(logits, T, seed, offset):
    noise = whole_noise(int(seed), int(offset), *logits.shape)
    return argmax(logits, T, noise * (int(offset) != 100))


# Launches


def first_of_blocks_likelier() -> Provider:
    """Tokens 0, 128, .. 0.3 % too often. By inverse CDF, made once: 2^25 draws take seconds."""

    def build(problem: Problem, weight: Tensor):
        odds = torch.ones(problem.V, dtype=torch.float64)
        odds[::128] = 1.003
        law = odds * (weight.T.double() / problem.temperature).softmax(1)  # [D, V]
        cdf = (law / law.sum(1, keepdim=True)).cumsum(1)

        def launch(hidden, seed, offset):
            u = torch.from_numpy(generator(mixed(int(seed), int(offset))).random(len(hidden)))
            ends = cdf[int(hidden[0].argmax())]  # `blocks` has equal rows
            return torch.searchsorted(ends, u, right=True).clamp_max(problem.V - 1)

        return launch

    capabilities = Capabilities(("cpu",), ("fp32",))
    return Provider("blocks", "Blocks", Kind.EXACT, build, capabilities=capabilities)


def frozen_at_capture() -> Provider:
    """A captured step whose generator does not advance: each replay gives the first one's noise."""
    honest = planted()

    def build(problem: Problem, weight: Tensor):
        launch, captured = honest.build(problem, weight), {}

        def replay(hidden, seed, offset):
            return launch(hidden, seed, captured.setdefault(int(seed), offset.clone()))

        return replay

    return Provider("frozen", "Frozen", Kind.EXACT, build, capabilities=honest.capabilities)


# Of the full call: what `contract` gives to a mistake -> what is used instead


def forbidden_once_in_17000(allowed: Tensor, seed: Tensor, step: Tensor) -> Tensor:
    """One row in 17,000 has a token that is masked."""
    u = generator(mixed(int(seed[0]), int(step[0]), 3)).random(len(allowed))
    return allowed ^ (torch.from_numpy(u) < 1 / 17_000)[:, None]


def of_row_xor(bit: int) -> samplers.Change:
    """The temperature of another row, where T is a tensor."""

    def change(T: float | Tensor, *_: object) -> float | Tensor:
        if not isinstance(T, Tensor):
            return T
        rows = torch.arange(len(T))
        return T[torch.where(rows ^ bit < len(T), rows ^ bit, rows)]

    return change


def last_of_equals_first(order: Tensor, logits: Tensor) -> Tensor:
    """The tokens by logit, of equal ones the higher first."""
    order = logits.flip(1).sort(dim=1, descending=True, stable=True).indices
    return logits.shape[1] - 1 - order


BUGS = {
    # Draws.
    "noise sign flipped": (planted(draw=lambda y, T, g: (y - T * g).argmax(1)), "fit"),
    "temperature ignored": (planted(draw=lambda y, T, g: (y + g).argmax(1)), "fit"),
    "T twice from row 8 on": (planted(draw=temperature_twice_from_row_8), "fit"),
    "fp16 scores": (planted(draw=lambda y, T, g: (y + T * g).half().argmax(1)), "fit"),
    # What is missing of 1 goes to the last token.
    "CDF draw falls on the last token": (
        planted(draw=by_inverse_cdf(lambda p: (0.99 * p).cumsum(1))),
        "fit",
    ),
    "CDF summed in bf16": (
        planted(draw=by_inverse_cdf(lambda p: p.bfloat16().cumsum(1))),
        "variation",
    ),
    "top-p where none was asked for": (planted(draw=samplers.crossing_token_dropped), "fit"),
    "ties to the last": (planted(draw=samplers.ties_to_the_last), "tiles"),
    "the last V mod 32 tokens 18 % too rare": (planted(draw=last_block_rarer), "blocks"),
    "padding with 0 for -inf": (planted(draw=samplers.padded_with_zero), "edges"),
    "padding returned": (planted(draw=samplers.padding_returned), "edges"),
    "T = 0 sampled": (
        planted(draw=lambda y, T, g: argmax(y, max(T, 0.3), g), greedy=True),
        "greedy",
    ),
    # Noise.
    "same noise for all rows": (
        planted(lambda seed, step, B, V, u: whole_noise(seed, step, 1, V, u).expand(B, V)),
        "rows",
    ),
    "two rows share their noise": (planted(two_rows_share), "rows"),
    "row number cut to 8 bits": (planted(row_cut_to_8_bits), "rows"),
    "streams of tiles collide (FlashSampling 362e45c)": (planted(rows_12_tiles_apart), "rows"),
    "same noise at every step": (planted(of_key(lambda seed, step: (seed, 0))), "steps"),
    "noise repeats every 256 steps": (
        planted(of_key(lambda seed, step: (seed, step % 256))),
        "steps",
    ),
    "step 100 is greedy": (samplers.stepped(step_100_greedy, zero_temperature=False), "steps"),
    "a graph repeats its samples (vllm-omni 4261)": (frozen_at_capture(), "steps"),
    "same noise in every tile": (
        planted(of_tiles(lambda seed, step, tile: mixed(seed, step))),
        "tiles",
    ),
    "rank term missing": (planted(rank_missing), "tiles"),
    # FlashSampling's public kernel until July 2026: seed + 100 tiles repeats a shifted row.
    "key + 100 x tile": (
        planted(of_tiles(lambda seed, step, tile: mixed(seed + 100 * tile, step))),
        "seeds",
    ),
    # (seed, step) and (seed + 1, step - 1) are one stream.
    "key = seed + step": (
        planted(of_tiles(lambda seed, step, tile: mixed(seed + step, tile))),
        "seeds",
    ),
    "seed ignored": (planted(of_key(lambda seed, step: (0, step))), "seeds"),
    "seed cut to 32 bits": (planted(of_key(lambda seed, step: (seed % 2**32, step))), "seeds"),
    "seed bits 33 to 63 ignored": (
        planted(of_key(lambda seed, step: (seed % 2**33, step))),
        "seeds",
    ),
    "few different rows of noise": (planted(samplers.few_keys), "collisions"),
    "the noise of one seed in eight is 0.8 of what it should be": (
        planted(lambda seed, *of: whole_noise(seed, *of) * (0.8 if seed % 8 == 3 else 1.0)),
        "fit of seeds",
    ),
    "tile number keys the noise, B sets the tile": (
        planted(samplers.tile_of_the_batch_size, batch_invariant=True),
        "invariance",
    ),
    # Filters.
    "second race with the noise of seed + 1": (
        filtered(second_seed=lambda seed: seed + 1),
        "truncated draws",
    ),
    "a neighbor's top-k changes a token (SGLang 35697)": (
        filtered(neighbors=True, batch_invariant=True),
        "invariance",
    ),
    "ties at the boundary over-accepted (FlashInfer 3774)": (
        filtered(keeps_ties=True),
        "truncation",
    ),
    "another way for few rows keeps one token more": (
        filtered(k_of=lambda k, B, V: k + (B < 8)),
        "requests",
    ),
    "another way for large vocabularies keeps one token more": (
        filtered(k_of=lambda k, B, V: k + (V > 2000)),
        "requests",
    ),
    # The full call.
    "greedy rows sampled": (
        contract(temperature=lambda T, *_: T.clamp_min(0.3) if isinstance(T, Tensor) else T),
        "masks",
    ),
    "mask ignored": (contract(mask=lambda allowed, *_: allowed | True), "masks"),
    "masked tokens emitted rarely (SGLang 33423)": (
        complete(mask=forbidden_once_in_17000),
        "masks",
    ),
    "mask of the neighbor": (
        contract(mask=lambda a, *_: a & a.roll(1, 0) | ~a.any(1, keepdim=True)),
        "invariance",
    ),
    "seeds of requests cut to 32 bits": (complete(seed=lambda seed, _: seed % 2**32), "call"),
    "request keyed by its row": (
        contract(seed=lambda seed, _: seed + torch.arange(len(seed))),
        "invariance",
    ),
    "T of row b xor 8": (complete(temperature=of_row_xor(8)), "call"),
    "the noise of a request depends on how many rows its step has": (
        contract(seed=lambda seed, _: seed + len(seed)),
        "speculation",
    ),
    "another law with seeds (sglang-omni 1239)": (
        complete(temperature=lambda T, seed, _: T if len(seed) == 1 else 0.8 * T),
        "call",
    ),
    "log-probability 0": (complete(logprob=torch.zeros_like), "call"),
    # What is said of tokens.
    "log-probabilities without T": (complete(scored=torch.ones_like), "score"),
    "log-probabilities by the T of the next row": (
        complete(scored=lambda x: x.roll(1, 0)),
        "score",
    ),
    "entropy 0.1 % too large": (complete(entropy=lambda H: 1.001 * H), "score"),
    "entropy in bits": (complete(entropy=lambda H: H / 0.6931), "score"),
    "ranks count ties": (complete(above=torch.ge), "score"),
    "ranks from 1 on": (
        complete(above=lambda y, own: (y > own) | (y == y.amax(1, keepdim=True))),
        "score",
    ),
    "largest tokens by id": (complete(order=lambda order, _: order.sort(1).values), "score"),
    "of equal logits the last token first": (
        complete(order=last_of_equals_first),
        "score",
    ),
    "the largest one out of order": (complete(order=lambda order, _: order.roll(1, 1)), "score"),
    "log-probabilities of the largest shifted": (
        complete(scored_top=lambda logp: logp.roll(1, 1)),
        "score",
    ),
    "samples 4, 5, .. are 0, 1, ..": (complete(sample=lambda of: (of[0], of[1] % 4)), "samples"),
    "sample added to the seed": (contract(sample=lambda of: (sum(of), 0)), "samples"),
    "offset one ahead": (contract(step=lambda offset: offset + 1), "oracle"),
    "offset cut to 31 bits": (contract(step=lambda offset: offset & 0x7FFFFFFF), "oracle"),
    "NaN rows drawn": (contract(tokens=lambda tokens, *_: tokens.clamp_min(0)), "undefined rows"),
    "noise map not monotone": (contract(noise_map=samplers.rounded_map), "noise map"),
    "noise map not finite": (contract(noise_map=samplers.closed_map), "noise map"),
}
BUGS |= SINCE
RARE = {"tokens 0 mod 128 0.3 % too often": (first_of_blocks_likelier(), "blocks")}
"""Found where 2^25 draws are affordable: on a GPU, and in the full tier."""

IN_THE_FAR_TAIL = {
    "a race in fp32 (vLLM 43150)": (
        planted(uniform=samplers.clamped_exponential),
        "tail 18",
        2**31,
    ),
    "24-bit u (vLLM 51367)": (planted(uniform=samplers.coarse_exponential), "tail 18", 3 * 2**29),
    "u = 1 gives +inf": (planted(uniform=samplers.closed_exponential), "tail 20", 2**29),
}
"""And the random numbers that these need, of the full tier's 2^31."""

KNOWN = {bug for bug in {**BUGS, **IN_THE_FAR_TAIL} if re.search(r"\(.* [0-9a-f]+\)$", bug)}
"""Those that were in released samplers, by the project and the number of the issue or commit."""


# For the gate


def without_first(step: samplers.Step) -> samplers.Step:
    """The first token is not looked at."""
    return lambda y, *of: step(y[:, 1:], *of) + 1 if y.shape[1] > 1 else y.argmax(1)


def without_last(step: samplers.Step) -> samplers.Step:
    return lambda y, *of: step(y[:, : max(1, y.shape[1] - 1)], *of)


def greedy(logits, T, seed, offset):
    return logits.argmax(1)


honest = noisy(argmax)


BIASED: dict[str, samplers.Step] = {
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


def second_best(logits, T, seed, offset):
    return logits.topk(min(2, logits.shape[1]), 1).indices[:, -1]


def of_many(step: samplers.Step) -> samplers.Step:
    """A mistake of more than one tile of 128 tokens."""
    return lambda y, *of: (step if y.shape[1] > 128 else greedy)(y, *of)


NOT_GREEDY: dict[str, samplers.Step] = {
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
