"""Tile shapes that `fsbench tune` times, and the tables that it writes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache, partial
from glob import escape
from typing import TYPE_CHECKING, Any

from fsbench.kernels.configs import hopper, portable, screen
from fsbench.kernels.configs.tables import KERNELS, sizes_of
from fsbench.kernels.providing.launches import FlashSampling
from fsbench.kernels.providing.screened import ScreenedLaunch
from fsbench.problem import Problem
from fsbench.provider import Launch, Tuning

if TYPE_CHECKING:
    from torch import Tensor

    from fsbench.kernels.screened.head import ScreenedHead


def tuning(kernel: str) -> Tuning:
    """Return the Tuning of a kernel of configs.tables.KERNELS."""
    return Tuning(
        kernel=kernel,
        buckets=KERNELS[kernel][1],
        configs=partial(_configs, kernel),
        build=partial(_build, kernel),
        text=partial(text, kernel),
    )


def _configs(kernel: str, problem: Problem) -> list[Any]:
    import torch

    from fsbench.kernels.configs.choice import default_config, hopper_config
    from fsbench.kernels.configs.screen_choice import default_configs

    device = torch.device("cuda", torch.cuda.current_device())
    B, D, V = problem.B, problem.D, problem.V
    if kernel == "hopper":
        return list(dict.fromkeys([hopper_config(B, D, V, device), *hopper.space(B)]))
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types lack a property
    limit = properties.shared_memory_per_block_optin - 2048
    if kernel == "screened":
        configs: list[Any] = [default_configs(B, D, device)[0], *screen.space(B, limit)]
        if (properties.major, properties.minor) == (9, 0):
            configs += screen.hopper_space(B)
        return list(dict.fromkeys(configs))
    default = default_config(B, D, device, 2, _noise(kernel))
    return list(dict.fromkeys([default, *portable.space(B, limit)]))


def _noise(kernel: str) -> str:
    return "token" if kernel == "portable-token" else "group"


def _build(kernel: str, problem: Problem, weight: Tensor, config: Any) -> Launch:
    if kernel == "screened":
        return ScreenedLaunch(problem, _prepared(weight), config=config)
    return FlashSampling(problem, weight, _noise(kernel), config=config)


@lru_cache(maxsize=1)  # one copy of a weight serves all configs
def _prepared(weight: Tensor) -> ScreenedHead:
    from fsbench.kernels.screened.head import prepare_head

    return prepare_head(weight)


def text(
    kernel: str, gpu_name: str, record: str, rows: Iterable[tuple[int, int | None, Any]]
) -> str:
    """Return a table for one GPU as text for `tables.read`; rows are (bucket, max_d, config)."""
    head = {"kernels": [kernel], "gpus": [escape(gpu_name)], "record": record}
    # JSON and TOML write strings, integers, truth values and lists of them in the same way.
    lines = ["[[tiles]]", *(f"{name} = {json.dumps(value)}" for name, value in head.items())]
    lines.append("configs = [")
    for bucket, max_d, config in rows:
        sizes = {name: getattr(config, name) for name in sizes_of(config)}
        optional = {name: getattr(config, name) or None for name in sizes_of(config, optional=True)}
        entry = {"bucket": bucket, "max_d": max_d, **sizes, **optional}
        pairs = [
            f"{name} = {json.dumps(value)}" for name, value in entry.items() if value is not None
        ]
        lines.append(f"    {{ {', '.join(pairs)} }},")
    return "\n".join([*lines, "]", ""])
