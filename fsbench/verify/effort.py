"""Amount of work of each check, by tier and device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

Shapes = tuple[tuple[int, int], ...]

SHAPES: Shapes = ((1, 1), (3, 2), (17, 127), (1, 129), (16, 1000), (65, 5003))
"""(B, V) of the gate: tiny, odd, just above and below tile sizes, many rows."""


@dataclass(frozen=True)
class Effort:
    """Amount of work of each check.

    vocabulary: V of the large problem.
    fit_draws: draws of `fit`, `rows` and `steps`; at least 256 launches.
    block_draws: draws of `blocks`.
    seeds, seed_draws: seeds of `fit of seeds`, and draws of each.
    variation_draws: draws of `variation` by cost class (`distribution.cost`). 25 million draws
        bound the total variation by 0.002.
    gaps, tail_tokens: gaps of `tail`, and random numbers for each.
    joint_steps, other_steps: launches of 256 equal rows with the first seed, and with each other.
    call_steps: launches of `call`.
    filtered, filter_steps: (B, V) of `masks`, and launches for each filter.
    truncated_draws: draws from each distribution of `truncation`; draws of `truncated draws`.
    request_draws, request_launches: most draws and launches for each request of `requests`.
    request_sizes: batch sizes of `requests`.
    codes: random words of `noise map`.
    maxima: rows of `maximum` by form of noise.
    shapes: (B, V) of `oracle`, `greedy` and `edges`.
    sizes: batch sizes of `invariance`.
    any_shapes, any_sizes: the same for samplers with other noise than the contract's, which may
        take seconds to compile for each.
    """

    vocabulary: int
    fit_draws: int
    block_draws: int
    seeds: int
    seed_draws: int
    variation_draws: dict[str, int]
    gaps: tuple[float, ...]
    tail_tokens: int
    joint_steps: int
    other_steps: int
    call_steps: int
    filtered: tuple[int, int]
    filter_steps: int
    truncated_draws: int
    request_draws: int
    request_launches: int
    request_sizes: tuple[int, ...]
    codes: int
    maxima: dict[str, int]
    shapes: Shapes
    sizes: tuple[int, ...]
    any_shapes: Shapes
    any_sizes: tuple[int, ...]


def _draws(group: int, token: int, chunks: int) -> dict[str, int]:
    return {"group": group, "token": token, "stored": token, "chunks": chunks}


_B = (1, 3, 16, 17, 64, 65, 256, 300)
_V = (1, 2, 127, 128, 129, 1000, 50257, 151936)
_PAIRED_SHAPES = tuple(zip(_B, reversed(_V), strict=True))
_ALL_SHAPES = tuple((B, V) for B in _B for V in _V)
_ODD_SHAPES = ((1, 1000), (3, 1), (16, 129), (17, 2))
_SIZES_3, _SIZES_5, _SIZES_6 = (1, 17, 129), (1, 17, 64, 129, 256), (1, 2, 16, 17, 65, 257)
_SIZES_13 = (1, 2, 3, 15, 16, 17, 33, 64, 65, 129, 255, 256, 257)
_GAPS = (16, 18, 20)

_TABLE: dict[str, tuple[Any, ...]] = {
    # Columns: ci and full on a CPU, ci and full on a GPU. 9001 ends in a partial tile, and has more
    # than one chunk of the online samplers.
    "vocabulary": (9001, 151_936, 151_936, 151_936),
    "fit_draws": (300 * 264, 2**20, 2**20, 2**20),
    "block_draws": (2**15, 2**25, 2**25, 2**27),
    "seeds": (8, 64, 8, 64),
    "seed_draws": (2**13, 2**16, 2**18, 2**18),
    "variation_draws": (
        *(_draws(6144, 6144, 6144), _draws(2**15, 2**15, 2**15)),
        *(_draws(2**24, 2**21, 2**19), _draws(10**8, 25 * 10**6, 2**21)),
    ),
    "gaps": ((10, 12), _GAPS, _GAPS, _GAPS),
    "tail_tokens": (2**25, 2**31, 2**34, 2**36),
    "joint_steps": (48, 64, 512, 4096),
    "other_steps": (12, 16, 128, 1024),
    "call_steps": (32, 256, 128, 1024),
    "filtered": ((256, 300), (256, 300), (256, 151_936), (256, 151_936)),
    "filter_steps": (80, 256, 128, 1024),
    "truncated_draws": (2**12, 2**16, 2**16, 2**20),
    "request_draws": (2**11, 2**16, 2**16, 2**18),
    "request_launches": (2**7, 2**11, 2**11, 2**13),
    "request_sizes": ((1, 5, 64), (1, 5, 64, 256), (1, 5, 64, 256), (1, 5, 64, 256)),
    "codes": (2**18, 2**22, 2**26, 2**32),
    "maxima": tuple(
        {"token": 2**token, "group": 2**group}
        for token, group in ((9, 12), (10, 14), (11, 14), (14, 16))
    ),
    "shapes": (
        (*SHAPES, (64, 128), (300, 2)),
        *[(*SHAPES, *_PAIRED_SHAPES)] * 2,
        _ALL_SHAPES,
    ),
    "sizes": (_SIZES_6, _SIZES_13, _SIZES_6, tuple(range(1, 258))),
    "any_shapes": (_ODD_SHAPES, _PAIRED_SHAPES) * 2,
    "any_sizes": (_SIZES_3, _SIZES_5) * 2,
}
EFFORTS = {
    (tier, device): Effort(**{name: row[2 * (device == "cuda") + (tier == "full")]
                              for name, row in _TABLE.items()})
    for device in ("cpu", "cuda")
    for tier in ("ci", "full")
}  # fmt: skip
for _device, _fit, _truncated in (("cpu", 2**16, 2**12), ("cuda", 2**20, 2**16)):
    EFFORTS["gate", _device] = replace(
        EFFORTS["ci", _device],
        fit_draws=_fit,
        truncated_draws=_truncated,
        shapes=SHAPES,
        any_shapes=SHAPES,
    )
