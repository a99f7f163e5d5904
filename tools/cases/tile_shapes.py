"""Cases for `fsbench run`: calls with log-probabilities and filters, by kernel and tile shape.

    fsbench run --provider-path tools/cases/tile_shapes.py --provider logprob_g3v128 \
        --provider logprob_g2v128 --provider matmul_only --batch 129,160,192,256 --out OUT
    fsbench run --provider-path tools/cases/tile_shapes.py --provider filtered_g3v128 \
        --provider filtered_g2v128 --provider matmul_only --batch 208,256 --top-p 0.9 --out OUT

The sums that log-probabilities need and the logits that filters need are computed and stored in the
epilogue, so the fastest tiles of a plain call are not the fastest here (TILES_FOR in
kernels/configs/epilogue.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fsbench.kernels import flash_sample, truncated_sample
from fsbench.kernels.configs.choice import default_config, hopper_config
from fsbench.kernels.configs.hopper import ROWS, HopperConfig
from fsbench.kernels.flash_sampling_hopper import PROVIDER as HOPPER
from fsbench.kernels.flash_sampling_topk_topp import PROVIDER as FILTERED
from fsbench.kernels.providing.filters import filters_of
from fsbench.kernels.providing.launches import CallLaunch, variant
from fsbench.problem import Problem
from fsbench.provider import Launch, Provider

TILES = {
    "g3v128": HopperConfig(3, 128, 64, 5, False),
    "g2v128": HopperConfig(2, 128, 64, 7, False),
    "g2v256": HopperConfig(2, 256, 64, 4, True),
    "g3v256": HopperConfig(3, 256, 64, 4, True),
    "paired": HopperConfig(3, 256, 64, 4, True, paired=True),
    "rest16": HopperConfig(2, 256, 64, 4, False, extra_rows=16),
    "rest32": HopperConfig(2, 256, 64, 4, False, extra_rows=32),
}
CALLS: dict[str, tuple[Provider, Callable[..., Any], dict[str, Any]]] = {
    "plain": (HOPPER, flash_sample, {}),
    "logprob": (HOPPER, flash_sample, {"return_logprob": True}),
    "filtered": (FILTERED, truncated_sample, {}),
    "filtered_logprob": (FILTERED, truncated_sample, {"return_logprob": True}),
}
"""Name -> what provides the plain call, the function, and its options."""


def config_of(tiles: str, problem: Problem, weight: Any) -> Any:
    """Return the config of "chosen" (None), "portable", "hopper" or one of TILES."""
    if tiles == "portable":
        return default_config(problem.B, problem.D, weight.device, weight.element_size())
    if tiles == "hopper":
        return hopper_config(problem.B, problem.D, problem.V, weight.device)
    return TILES.get(tiles)


def build(problem: Problem, weight: Any, call: str, tiles: str) -> Launch:
    _, function, options = CALLS[call]
    filters = {} if function is flash_sample else filters_of(problem, weight.device)
    config = config_of(tiles, problem, weight)
    return CallLaunch(function, problem, weight, config=config, **filters, **options)


def unsupported_reason(problem: Problem, call: str, tiles: str) -> str | None:
    config, B = TILES.get(tiles), problem.B
    if config and not 2 * ROWS < B:
        return f"its tiles are for more than {2 * ROWS} rows, not {B}"
    if config and config.paired and B <= 4 * ROWS:
        return f"pairs of blocks are for more than {4 * ROWS} rows, not {B}"
    return CALLS[call][0].supports(problem)


PROVIDERS = tuple(
    variant(
        provider,
        f"{call}_{tiles}",
        f"{provider.label}: {call.replace('_', ', ')}, {tiles}",
        partial(build, call=call, tiles=tiles),
        partial(unsupported_reason, call=call, tiles=tiles),
    )
    for call, (provider, _, _) in CALLS.items()
    for tiles in ("chosen", "portable", "hopper", *TILES)
)
