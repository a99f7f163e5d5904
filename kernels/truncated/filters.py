"""The filters and penalties of a call, checked."""

from __future__ import annotations

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.checks.tensors import check_tensor
from fsbench.kernels.truncated.history import Penalties, TokenHistory

_LARGEST = torch.finfo(torch.float32).max


def check_fraction(name: str, value: object, B: int, device: torch.device) -> float | Tensor:
    """A number that is finite in fp32, or fp32 [B]."""
    if isinstance(value, torch.Tensor):
        return check_tensor(name, value, [torch.float32], [(B,)], device)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidType(f"{name}: expected a number or a tensor; got {type(value).__name__}")
    if not abs(value) <= _LARGEST:
        raise InvalidArgument(f"{name}: expected a finite number; got {value}")
    return float(value)


def check_penalties(penalties: object, B: int, device: torch.device) -> None:
    if not isinstance(penalties, Penalties):
        raise InvalidType(f"penalties: expected Penalties; got {type(penalties).__name__}")
    history = penalties.history
    if not isinstance(history, TokenHistory):
        raise InvalidType(
            f"penalties.history: expected a TokenHistory; got {type(history).__name__}"
        )
    if len(history.tokens) != B or history.tokens.device != device:
        raise InvalidArgument(
            f"penalties.history: expected {B} rows on {device}; got {len(history.tokens)} on "
            f"{history.tokens.device}"
        )
    for name in ("repetition", "presence", "frequency"):
        value = check_fraction(f"penalties.{name}", getattr(penalties, name), B, device)
        if name == "repetition" and isinstance(value, float) and value <= 0:
            raise InvalidArgument(f"penalties.repetition: expected a number > 0; got {value}")


def amounts(penalties: Penalties | None) -> dict[str, float | Tensor]:
    """The penalties by name, numbers as float; off if there are none."""
    if penalties is None:
        return {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    named = penalties._asdict()
    del named["history"]
    return {n: float(v) if isinstance(v, int | float) else v for n, v in named.items()}
