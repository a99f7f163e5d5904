"""Bugs that real samplers have had, or could have: each a correct sampler with one thing changed.

BUGS are found in the ci tier: bug -> (sampler, the check that must find it). A sampler is `planted`
or `filtered` (a launch), or `complete` or `contract` (a full call). RARE and IN_THE_FAR_TAIL need
as many draws as a GPU makes.
"""

from __future__ import annotations

import re
from dataclasses import replace

import planted_calls as calls
import planted_samplers as samplers
import torch
from planted_calls import complete, contract
from planted_races import closed, coarse, cut, race_of_levels
from planted_samplers import (
    argmax,
    by_inverse_cdf,
    filtered,
    fine_exponential,
    generator,
    gumbel,
    mixed,
    of_key,
    of_tiles,
    planted,
    whole_noise,
)
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
    stream = 12 * torch.arange(B)[:, None] + torch.arange(tiles)
    return streams[stream].flatten(1)[:, :V]


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


def row_137_colder(logits, T, noise):
    scale = torch.full((len(logits), 1), T)
    scale[137:138] /= 2
    return (logits + scale * noise).argmax(1)


def with_capabilities(sampler: Provider, **able: object) -> Provider:
    """The sampler with other capabilities."""
    return replace(sampler, capabilities=replace(sampler.capabilities, **able))


BY_CHECK: dict[str, dict[str, Provider]] = {
    "fit": {
        "noise sign flipped": planted(draw=lambda y, T, g: (y - T * g).argmax(1)),
        "temperature ignored": planted(draw=lambda y, T, g: (y + g).argmax(1)),
        "T twice from row 8 on": planted(draw=temperature_twice_from_row_8),
        "fp16 scores": planted(draw=lambda y, T, g: (y + T * g).half().argmax(1)),
        # What is missing of 1 is assigned to the last token.
        "CDF draw falls on the last token": planted(
            draw=by_inverse_cdf(lambda p: (0.99 * p).cumsum(1))
        ),
        "top-p where none was asked for": planted(draw=samplers.crossing_token_dropped),
        "logits / T in bf16": planted(draw=lambda y, T, g: ((y / T).bfloat16() + g).argmax(1)),
        "T rounded to eighths": planted(
            draw=lambda y, T, g: argmax(y, max(round(8 * T), 1) / 8, g)
        ),
        "scores end at 80": planted(draw=lambda y, T, g: argmax(y.clamp_max(80), T, g)),
    },
    "variation": {
        "CDF summed in bf16": planted(draw=by_inverse_cdf(lambda p: p.bfloat16().cumsum(1))),
        "T above 1 counts as 1": planted(draw=lambda y, T, g: argmax(y, min(T, 1.0), g)),
    },
    "edges": {
        "padding with 0 for -inf": planted(draw=samplers.padded_with_zero),
        "padding returned": planted(draw=samplers.padding_returned),
    },
    "greedy": {
        "T = 0 sampled": planted(draw=lambda y, T, g: argmax(y, max(T, 0.3), g), greedy=True),
        "the last of equal logits at T = 0": contract(tokens=calls.last_of_equals),
    },
    "blocks": {"the last V mod 32 tokens 18 % too rare": planted(draw=last_block_rarer)},
    "rows": {
        "same noise for all rows": planted(
            lambda seed, step, B, V, u: whole_noise(seed, step, 1, V, u).expand(B, V)
        ),
        "two rows share their noise": planted(two_rows_share),
        "row number cut to 8 bits": planted(row_cut_to_8_bits),
        "streams of tiles collide (FlashSampling 362e45c)": planted(rows_12_tiles_apart),
        "row 137 has half of T": planted(draw=row_137_colder),
        "every second row takes 1 - u": planted(antithetic(True)),
    },
    "steps": {
        "same noise at every step": planted(of_key(lambda seed, step: (seed, 0))),
        "noise repeats every 256 steps": planted(of_key(lambda seed, step: (seed, step % 256))),
        "step 100 is greedy": samplers.stepped(step_100_greedy, zero_temperature=False),
        "a graph repeats its samples (vllm-omni 4261)": frozen_at_capture(),
        "every second step takes 1 - u": planted(antithetic(False)),
    },
    "tiles": {
        "ties to the last": planted(draw=samplers.ties_to_the_last),
        "same noise in every tile": planted(of_tiles(lambda seed, step, tile: mixed(seed, step))),
        "rank term missing": planted(rank_missing),
    },
    "seeds": {
        # FlashSampling's public kernel until July 2026: seed + 100 tiles repeats a shifted row.
        "key + 100 x tile": planted(
            of_tiles(lambda seed, step, tile: mixed(seed + 100 * tile, step))
        ),
        # (seed, step) and (seed + 1, step - 1) are one stream.
        "key = seed + step": planted(of_tiles(lambda seed, step, tile: mixed(seed + step, tile))),
        "seed ignored": planted(of_key(lambda seed, step: (0, step))),
        "seed cut to 32 bits": planted(of_key(lambda seed, step: (seed % 2**32, step))),
        "seed bits 33 to 63 ignored": planted(of_key(lambda seed, step: (seed % 2**33, step))),
    },
    "collisions": {"few different rows of noise": planted(samplers.few_keys)},
    "fit of seeds": {
        "the noise of one seed in eight is 0.8 of what it should be": planted(
            lambda seed, *args: whole_noise(seed, *args) * (0.8 if seed % 8 == 3 else 1.0)
        ),
    },
    "invariance": {
        "tile number keys the noise, B sets the tile": planted(
            samplers.tile_of_the_batch_size, batch_invariant=True
        ),
        "a neighbor's top-k changes a token (SGLang 35697)": filtered(
            neighbors=True, batch_invariant=True
        ),
        "mask of the neighbor": contract(
            mask=lambda a, *_: a & a.roll(1, 0) | ~a.any(1, keepdim=True)
        ),
        "request keyed by its row": contract(seed=lambda seed, _: seed + torch.arange(len(seed))),
    },
    "truncation": {
        "ties at the boundary over-accepted (FlashInfer 3774)": filtered(keeps_ties=True),
        "penalties ignore the output": filtered(penalize=calls.output_ignored),
        "penalties count the prompt as output": filtered(penalize=calls.prompt_counted),
        "repetition divides logits below 0": filtered(penalize=calls.always_divided),
    },
    "truncated draws": {
        "second race with the noise of seed + 1": filtered(second_seed=lambda seed: seed + 1),
        "top-k above 1024 counts as 1024": filtered(k_of=lambda k, B, V: k.clamp_max(1024)),
    },
    "requests": {
        "another way for few rows keeps one token more": filtered(k_of=lambda k, B, V: k + (B < 8)),
        "another way for large vocabularies keeps one token more": filtered(
            k_of=lambda k, B, V: k + (V > 2000)
        ),
    },
    "masks": {
        "greedy rows sampled": contract(
            temperature=lambda T, *_: T.clamp_min(0.3) if isinstance(T, Tensor) else T
        ),
        "mask ignored": contract(mask=lambda allowed, *_: allowed | True),
        "masked tokens emitted rarely (SGLang 33423)": complete(mask=calls.forbidden_once_in_17000),
        "seeds are ignored where there is a mask": with_capabilities(
            complete(seed=lambda seed, mask: seed if mask is None else seed[:1]),
            batch_invariant=False,
        ),
        "bias ignored but for -inf": complete(
            bias=lambda bias, T: bias.where(bias == -torch.inf, 0.0)
        ),
        "bias added after the division by T": complete(
            bias=lambda b, T: b * torch.as_tensor(T).clamp_min(1e-3).reshape(-1, 1)
        ),
        "bias of all rows ignored": complete(
            bias=lambda bias, _: torch.zeros_like(bias) if bias.ndim == 1 else bias
        ),
        "masked rows take another row's T above 100 rows": complete(
            temperature=calls.masked_rows_swapped
        ),
        # The 256 words of a mask that come first count again for the words after 8,192 tokens.
        "packed mask words wrong from token 8192 on": complete(
            mask=lambda mask, *_: mask[:, torch.arange(mask.shape[1]) % 8192]
        ),
        "samples 1, 2, .. have no mask": complete(
            drawn_from=lambda y, T, number, plain: (plain if number else y, T)
        ),
    },
    "call": {
        "seeds of requests cut to 32 bits": complete(seed=lambda seed, _: seed % 2**32),
        "T of row b xor 8": complete(temperature=calls.of_row_xor(8)),
        "another law with seeds (sglang-omni 1239)": complete(
            temperature=lambda T, seed, _: T if len(seed) == 1 else 0.8 * T
        ),
        "log-probability 0": complete(logprob=torch.zeros_like),
        "seeds of requests share noise by twos": complete(seed=calls.per_request(lambda s: s // 2)),
        "seeds of requests lose their sign": complete(seed=calls.per_request(torch.abs)),
        "only the first seed is read": with_capabilities(
            complete(seed=lambda seed, _: seed[:1]), batch_invariant=False
        ),
        "only the first offset is read": complete(step=lambda offset: offset[:1]),
        "offsets of requests modulo 256": complete(
            step=lambda offset: offset % 256 if len(offset) > 1 else offset
        ),
        # A request with seed 0 gets a random seed.
        "seed 0 counts as none": complete(
            seed=lambda s, _: torch.where(s == 0, torch.randint(2**62, s.shape), s)
        ),
        "the last row of odd batches above 100 has another seed": complete(
            tokens=calls.other_seed_for_the_last
        ),
        "samples 1, 2, .. have T = 1": complete(
            drawn_from=lambda y, T, number, plain: (y, 1.0 if number else T)
        ),
    },
    "speculation": {
        "the noise of a request depends on how many rows its step has": contract(
            seed=lambda seed, _: seed + len(seed)
        ),
        "a quarter of wrong drafts is accepted": contract(accept=calls.eager_acceptance),
        "drafts behind a wrong one are accepted": contract(accept=calls.behind_the_first_wrong),
    },
    "score": {
        "log-probabilities without T": complete(scored=torch.ones_like),
        "log-probabilities by the T of the next row": complete(scored=lambda x: x.roll(1, 0)),
        "entropy 0.1 % too large": complete(entropy=lambda H: 1.001 * H),
        "entropy in bits": complete(entropy=lambda H: H / 0.6931),
        "ranks count ties": complete(above=torch.ge),
        "ranks from 1 on": complete(above=lambda y, x: (y > x) | (y == y.amax(1, keepdim=True))),
        "largest tokens by id": complete(order=lambda order, _: order.sort(1).values),
        "of equal logits the last token first": complete(order=calls.last_of_equals_first),
        "the largest one out of order": complete(order=lambda order, _: order.roll(1, 1)),
        "log-probabilities of the largest shifted": complete(
            scored_top=lambda logp: logp.roll(1, 1)
        ),
        "log-probabilities of all samples are the first's": complete(
            logprob=lambda p: p[:, :1].expand_as(p) if p.ndim == 2 else p
        ),
        "log-probabilities without the bias": complete(scored_from=lambda y, masked: masked),
    },
    "samples": {
        "samples 4, 5, .. are 0, 1, ..": complete(sample=lambda key: (key[0], key[1] % 4)),
        "sample added to the seed": contract(sample=lambda key: (sum(key), 0)),
    },
    "oracle": {
        "offset one ahead": contract(step=lambda offset: offset + 1),
        "offset cut to 31 bits": contract(step=lambda offset: offset & 0x7FFFFFFF),
    },
    "undefined rows": {"NaN rows drawn": contract(tokens=lambda tokens, *_: tokens.clamp_min(0))},
    "noise map": {
        "noise map not monotone": contract(noise_map=samplers.rounded_map),
        "noise map not finite": contract(noise_map=samplers.closed_map),
    },
}
"""Check -> the bugs that it must find."""

BUGS = {bug: (sampler, check) for check, bugs in BY_CHECK.items() for bug, sampler in bugs.items()}

RARE = {"tokens 0 mod 128 0.3 % too often": (first_of_blocks_likelier(), "blocks")}
"""Found with 2^25 draws: on a GPU, and in the full tier."""

IN_THE_FAR_TAIL = {
    "a race in fp32 (vLLM 43150)": (race_of_levels(cut), "tail 18", 2**31),
    "24-bit u (vLLM 51367)": (race_of_levels(coarse), "tail 18", 2**31),
    "u = 1 gives +inf": (race_of_levels(closed), "tail 20", 2**29),
}
"""Bug -> (sampler, check, random numbers that it needs, of the full tier's 2^31)."""

KNOWN = {bug for bug in {**BUGS, **IN_THE_FAR_TAIL} if re.search(r"\(.* [0-9a-f]+\)$", bug)}
"""Bugs of released samplers: the name ends with the project and the issue or commit."""
