"""What flash_sample's kernels offer to `fsbench tune`: configs to time, and tables to write."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from glob import escape
from typing import TYPE_CHECKING, Any

from fsbench.kernels.configs import hopper, portable
from fsbench.kernels.configs.tables import KERNELS, sizes_of
from fsbench.kernels.providing.launches import FlashSampling
from fsbench.problem import Problem
from fsbench.provider import Launch, Tuning

if TYPE_CHECKING:
    from torch import Tensor


def tuning(kernel: str) -> Tuning:
    """What `fsbench tune` needs of a kernel of configs.tables.KERNELS."""
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

    device = torch.device("cuda", torch.cuda.current_device())
    B, D, V = problem.B, problem.D, problem.V
    if kernel == "hopper":
        return list(dict.fromkeys([hopper_config(B, D, V, device), *hopper.space(B)]))
    in_use = default_config(B, D, device, 2, _noise(kernel))
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types lack a property
    limit = properties.shared_memory_per_block_optin - 2048
    return list(dict.fromkeys([in_use, *portable.space(B, limit)]))


def _noise(kernel: str) -> str:
    return "token" if kernel == "portable-token" else "group"


def _build(kernel: str, problem: Problem, weight: Tensor, config: Any) -> Launch:
    return FlashSampling(problem, weight, _noise(kernel), config=config)


def text(
    kernel: str, gpu_name: str, record: str, rows: Iterable[tuple[int, int | None, Any]]
) -> str:
    """A table for one GPU that `read` understands; rows are (bucket, max_d, config)."""
    head = {"kernels": [kernel], "gpus": [escape(gpu_name)], "record": record}
    # Strings, integers, truth values and lists of them are written alike in JSON and in TOML.
    lines = ["[[tiles]]", *(f"{name} = {json.dumps(value)}" for name, value in head.items())]
    lines.append("configs = [")
    for bucket, max_d, config in rows:
        sizes = {name: getattr(config, name) for name in sizes_of(config)}
        entry = {"bucket": bucket, "max_d": max_d, **sizes}
        pairs = [
            f"{name} = {json.dumps(value)}" for name, value in entry.items() if value is not None
        ]
        lines.append(f"    {{ {', '.join(pairs)} }},")
    return "\n".join([*lines, "]", ""])
