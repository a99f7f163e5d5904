"""Bugs that real samplers have had, or could have: each a correct sampler with one thing changed.

`SURVIVORS` are those that the battery of version 0.1.0 let pass, `FIELD` those of public issues:
bug -> (sampler, the check that must see it). A sampler is `planted` or `filtered` (a launch), or
`complete` (a full call).
"""

from __future__ import annotations

import mutant_samplers as samplers
import torch
from mutant_samplers import (
    argmax,
    contract,
    fine_exponential,
    generator,
    gumbel,
    mixed,
    of_key,
    planted,
    whole_noise,
)  # fmt: skip
from torch import Tensor

from fsbench import reference
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Provider

# Noise: (seed, step, B, V, uniform) -> [B, V]


repeats_every_256_steps = of_key(lambda seed, step: (seed, step % 256))
seed_cut_to_33_bits = of_key(lambda seed, step: (seed & (2**33 - 1), step))


def two_rows_share(seed, step, B, V, uniform=fine_exponential):
    noise = whole_noise(seed, step, B, V, uniform)
    if B > 201:
        noise[201] = noise[37]
    return noise


def row_cut_to_8_bits(seed, step, B, V, uniform=fine_exponential):
    return whole_noise(seed, step, min(B, 256), V, uniform)[torch.arange(B) % 256]


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


def race_in_fp32(logits, T, noise):
    """p / E with p and E of 24 bits: no E below 2^-24."""
    E = torch.exp(-noise).clamp_min_(2.0**-24)
    return (torch.softmax(logits / T, 1) / E).argmax(1)


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


def filtered(
    second_seed=lambda seed: mixed(seed, 2), neighbours=False, keeps_ties=False, **able
) -> Provider:
    """Top-k by two races: among all tokens; where the winner is cut off, among the kept.

    second_seed: of the second race. neighbours: its noise depends on the largest k of the batch.
    keeps_ties: of tokens equal to the kth all are kept, though it is said that the first are.
    """

    def build(problem: Problem, weight: Tensor):
        filters = torch.tensor(problem.row_filters(), dtype=torch.float64)

        def launch(hidden, seed, offset):
            logits = (hidden @ weight.T).double()
            B, V = logits.shape
            kept = reference.truncate(
                logits, problem.temperature, top_k=filters[:, 0], keeps_ties=keeps_ties
            ).kept
            seed, step = int(seed), int(offset)
            salt = int(filters[:B, 0].sum()) if neighbours else 0
            first, second = (
                argmax(scores, problem.temperature, whole_noise(key + salt, step, B, V))
                for scores, key in (
                    (logits, seed),
                    (logits.masked_fill(~kept, -torch.inf), second_seed(seed)),
                )
            )
            return torch.where(kept.gather(1, first[:, None])[:, 0], first, second)

        return launch

    capabilities = Capabilities(
        ("cpu",), ("fp32", "bf16"), filters=("top_k",), mixed_filters=True, **able
    )
    return Provider("filtered", "Filtered", Kind.TRUNCATED, build, capabilities=capabilities)


# Of the full call: what `contract` gives to a mistake -> what is used instead


def forbidden_once_in_17000(allowed: Tensor, seed: Tensor, step: Tensor) -> Tensor:
    """One row in 17,000 has a token that is masked."""
    u = generator(mixed(int(seed[0]), int(step), 3)).random(len(allowed))
    return allowed ^ (torch.from_numpy(u) < 1 / 17_000)[:, None]


def of_row_xor(bit: int) -> samplers.Change:
    """The temperature of another row, where T is a tensor."""

    def change(T: float | Tensor, seed: Tensor) -> float | Tensor:
        if not isinstance(T, Tensor):
            return T
        rows = torch.arange(len(T))
        return T[torch.where(rows ^ bit < len(T), rows ^ bit, rows)]

    return change


def complete(**mistake: samplers.Change) -> Provider:
    """A sampler with the full call that does not say whose noise it has."""
    return contract(own=True, **mistake)


SURVIVORS = {
    "noise repeats every 256 steps": (planted(repeats_every_256_steps), "steps"),
    "two rows share their noise": (planted(two_rows_share), "rows"),
    "row number cut to 8 bits": (planted(row_cut_to_8_bits), "rows"),
    "seed bits 33 to 63 ignored": (planted(seed_cut_to_33_bits), "seeds"),
    "the last V mod 32 tokens 18 % too rare": (planted(draw=last_block_rarer), "blocks"),
    "T twice from row 8 on": (planted(draw=temperature_twice_from_row_8), "fit"),
    "T of row b xor 8": (complete(temperature=of_row_xor(8)), "call"),
    "log-probability 0": (complete(logprob=torch.zeros_like), "call"),
    "samples 4, 5, .. are 0, 1, ..": (complete(sample=lambda of: (of[0], of[1] % 4)), "samples"),
    "second race with the noise of seed + 1": (
        filtered(second_seed=lambda seed: seed + 1),
        "truncated draws",
    ),
}
RARE = {"tokens 0 mod 128 0.3 % too often": (first_of_blocks_likelier(), "blocks")}
"""Found where 2^25 draws are affordable: on a GPU, and in the full tier."""

FIELD = {
    "masked tokens emitted rarely (SGLang 33423)": (
        complete(mask=forbidden_once_in_17000),
        "filters",
    ),
    "a neighbour's top-k changes a token (SGLang 35697)": (
        filtered(neighbours=True, batch_invariant=True),
        "invariance",
    ),
    "another law with seeds (sglang-omni 1239)": (
        complete(temperature=lambda T, seed: T if len(seed) == 1 else 0.8 * T),
        "call",
    ),
    "ties at the boundary over-accepted (FlashInfer 3774)": (
        filtered(keeps_ties=True),
        "truncation",
    ),
    "a graph repeats its samples (vllm-omni 4261)": (frozen_at_capture(), "steps"),
    "streams of tiles collide (FlashSampling 362e45c)": (planted(rows_12_tiles_apart), "rows"),
}
