"""torch operators for the launches of public calls, in one form for all families of kernels.

torch.compile and fake tensors see a launch as one opaque node. The public call has checked the
arguments and allocated the results. An operator takes tensors and numbers only, so the named values
of a call are packed into lists and unpacked again. An eager call does not use the operator: torch's
dispatch of a Python operator takes the host longer than the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, is_dataclass
from typing import Any

import torch
from torch import Tensor

from fsbench.kernels.checks.identity import Keyed, by_key
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.configs.screen import HopperScreenConfig, ResolveConfig, ScreenConfig

Run = Callable[[dict[str, Any], dict[str, Tensor]], None]
"""(values by name, without None; the tensors to write to, by name) -> None: launch."""

CONFIGS: dict[str, Callable[..., Any]] = {
    config.__name__: config
    for config in (TileConfig, HopperConfig, ScreenConfig, HopperScreenConfig, ResolveConfig)
}


def is_traced(tensor: Tensor) -> bool:
    """Return whether torch traces a call on this tensor: torch compiles, or the tensor is fake."""
    return torch.compiler.is_compiling() or type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def as_operator(name: str, run: Run) -> Run:
    """Register `run` as torch.ops.fsbench.<name> and return a function that calls the operator.

    Values may be tensors, floats, integers, flags, strings without separators, configs, objects
    with a key (checks.identity), and None, which is skipped.
    """

    def carry_out(
        layout: str,
        tensors: Sequence[Tensor],
        floats: Sequence[float],
        integers: Sequence[int],
        results: Sequence[Tensor],
    ) -> None:
        names, values = layout.split("|")
        run(
            unpack(values, tensors, floats, integers),
            dict(zip(names.split(";"), results, strict=True)),
        )

    operator = torch.library.custom_op(f"fsbench::{name}", mutates_args=("results",))(carry_out)

    @operator.register_fake
    def _(*arguments: object) -> None:
        """Do nothing: the results are the caller's tensors."""

    def call(values: dict[str, Any], results: dict[str, Tensor]) -> None:
        operator(*arguments_of(values, results))

    return call


def arguments_of(values: dict[str, Any], results: dict[str, Tensor]) -> tuple[Any, ...]:
    """Return the operator's arguments for these values and results."""
    layout, *packed = pack(values)
    return f"{';'.join(results)}|{layout}", *packed, list(results.values())


def pack(values: dict[str, Any]) -> tuple[str, list[Tensor], list[float], list[int]]:
    """Return the layout, "name:kind" or "name:kind:text" of each value, and the numbers."""
    parts: list[str] = []
    tensors: list[Tensor] = []
    floats: list[float] = []
    integers: list[int] = []
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, Tensor):
            kind = "tensor"
            tensors.append(value)
        elif isinstance(value, str):
            kind = f"text:{value}"
        elif isinstance(value, bool):
            kind = f"flag:{int(value)}"
        elif isinstance(value, float):
            kind = "float"
            floats.append(value)
        elif isinstance(value, Keyed):
            kind = f"key:{value.key}"
        elif is_dataclass(value) and not isinstance(value, type):
            numbers = ",".join([str(int(field)) for field in astuple(value)])
            kind = f"config:{type(value).__name__},{numbers}"
        else:
            kind = "integer"
            integers.append(value)
        parts.append(f"{name}:{kind}")
    return ";".join(parts), tensors, floats, integers


def unpack(
    layout: str, tensors: Sequence[Tensor], floats: Sequence[float], integers: Sequence[int]
) -> dict[str, Any]:
    """Return the values by name; the inverse of `pack`."""
    numbered = {"tensor": iter(tensors), "float": iter(floats), "integer": iter(integers)}
    values: dict[str, Any] = {}
    for part in layout.split(";"):
        name, kind, *text = part.split(":")
        if kind in numbered:
            values[name] = next(numbered[kind])
        elif kind == "text":
            values[name] = text[0]
        elif kind == "flag":
            values[name] = text[0] == "1"
        elif kind == "key":
            values[name] = by_key(text[0], Keyed)
        else:
            config, *numbers = text[0].split(",")
            values[name] = CONFIGS[config](*map(int, numbers))
    return values
