"""Checks of numbers, flags, names and configs.

A check returns the value, or raises InvalidType for a wrong type and InvalidArgument otherwise. The
message names the argument, the expected and the actual value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.configs.screen import HopperScreenConfig, ResolveConfig, ScreenConfig

ScreenConfigs = tuple[ScreenConfig | HopperScreenConfig, ResolveConfig]
NOISE = ("auto", "token", "group")
KERNELS = ("auto", "hopper", "portable")
MAX_SAMPLES = 2**16 - 1
MAX_TOP = 20
MAX_SUPPORT = 1024
MAX_V = 2**20
"""The most tokens whose group maxima fit a program's registers."""
LARGEST_NUMBER = torch.finfo(torch.float32).max


def check_integer(name: str, value: object, lowest: int, highest: int) -> int:
    """Return value if it is an int in [lowest, highest]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(f"{name}: expected an integer; got {type(value).__name__}")
    if not lowest <= value <= highest:
        raise InvalidArgument(f"{name}: expected {lowest} to {highest}; got {value}")
    return value


def check_number(name: str, value: object, *, positive: bool = False) -> float:
    """Return value as a float if it is a number >= 0 (> 0 if `positive`) and finite in fp32."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidType(f"{name}: expected a number; got {type(value).__name__}")
    if not 0 <= value <= LARGEST_NUMBER or (positive and value == 0):
        bound = "> 0" if positive else ">= 0"
        raise InvalidArgument(f"{name}: expected a finite number {bound}; got {value}")
    return float(value)


def check_flag(name: str, value: object) -> bool:
    """Return value if it is True or False."""
    if not isinstance(value, bool):
        raise InvalidType(f"{name}: expected True or False; got {type(value).__name__}")
    return value


def check_noise(value: object) -> str:
    """Return the form of noise, "group" or "token"; "auto" is "group"."""
    if not isinstance(value, str):
        raise InvalidType(f"noise: expected a string; got {type(value).__name__}")
    if value not in NOISE:
        raise InvalidArgument(f"noise: expected {either(NOISE)}; got {value!r}")
    return "group" if value == "auto" else value


def check_screened_noise(value: object) -> str:
    """Return "token", the only noise of a ScreenedHead, if value is "token" or "auto"."""
    if value == "auto" or check_noise(value) == "token":
        return "token"
    raise InvalidArgument(
        f"noise: expected auto or token with a ScreenedHead; got {value!r}: a screened head draws "
        "with token noise; for group noise pass the weight itself (head.weight)"
    )


def check_kernel(value: object, config: object) -> str:
    """Return the kernel, "auto", "hopper" or "portable"; that of the config if value is "auto"."""
    if not isinstance(value, str):
        raise InvalidType(f"kernel: expected a string; got {type(value).__name__}")
    if value not in KERNELS:
        raise InvalidArgument(f"kernel: expected {either(KERNELS)}; got {value!r}")
    if config is None:
        return value
    if not isinstance(config, TileConfig | HopperConfig):
        raise InvalidType(
            f"config: expected a TileConfig or HopperConfig; got {type(config).__name__}"
        )
    of_config = "hopper" if isinstance(config, HopperConfig) else "portable"
    if value not in ("auto", of_config):
        raise InvalidArgument(f"config: expected one of the {value} kernel; got {config!r}")
    return of_config


def check_screen_configs(value: object) -> ScreenConfigs | None:
    """Return value if it is None, or the tile shapes of the screen and the exact computation."""
    if value is None:
        return None
    if not isinstance(value, tuple):
        raise InvalidType(f"configs: expected a tuple; got {type(value).__name__}")
    if len(value) != 2:
        raise InvalidArgument(f"configs: expected two, one for each launch; got {len(value)}")
    screen, resolve = value
    if not isinstance(screen, ScreenConfig | HopperScreenConfig):
        raise InvalidType(
            f"configs: expected a ScreenConfig or HopperScreenConfig first; "
            f"got {type(screen).__name__}"
        )
    if not isinstance(resolve, ResolveConfig):
        raise InvalidType(f"configs: expected a ResolveConfig second; got {type(resolve).__name__}")
    return screen, resolve


def either(options: Sequence[object]) -> str:
    """Join options with "or" for a message."""
    return " or ".join(str(option) for option in options)
