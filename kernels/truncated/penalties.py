"""Penalties on the tokens that a row has seen, and the checks of filters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.checks.tensors import check_tensor
from fsbench.kernels.checks.values import check_integer

_LARGEST_ID = 2**31 - 1


class TokenHistory:
    """Distinct tokens of B rows and how often each occurs in the output, on the device.

    Penalties change only the logits of these tokens. `append` adds the tokens of a step; it neither
    waits for the GPU nor allocates state, so it may be part of a captured graph.

    tokens: int32 [B, capacity]. counts: int32 [B, capacity], 0 for a token of the prompt only.
    lengths: int32 [B], the number of a row's distinct tokens. overflowed: bool [B], rows that had
    no place for a token, which is then not penalized: use a larger capacity.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device | str):
        check_integer("rows", rows, 0, _LARGEST_ID)
        check_integer("capacity", capacity, 1, _LARGEST_ID)
        device = _usable(device)
        self.tokens = torch.full((rows, capacity), -1, dtype=torch.int32, device=device)
        self.counts = torch.zeros_like(self.tokens)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.overflowed = torch.zeros(rows, dtype=torch.bool, device=device)

    @classmethod
    def from_tokens(
        cls,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        capacity: int,
        device: torch.device | str,
    ) -> TokenHistory:
        """Return the history of rows with these token ids in prompts and in outputs so far.

        Raises:
            InvalidType: an id is not an integer.
            InvalidArgument: unequal numbers of rows, an id below 0 or of 2^31 or more, or more
                distinct tokens in a row than `capacity`.
        """
        if len(prompts) != len(outputs):
            raise InvalidArgument(
                f"outputs: expected one for each of {len(prompts)} prompts; got {len(outputs)}"
            )
        device = _usable(device)
        history = cls(len(prompts), capacity, "cpu")
        for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            counts = Counter(_ids("outputs", row, output))
            distinct = list(dict.fromkeys([*_ids("prompts", row, prompt), *counts]))
            n = len(distinct)
            if n > capacity:
                raise InvalidArgument(
                    f"capacity: expected at least {n}, the distinct tokens of row {row}; "
                    f"got {capacity}"
                )
            columns = [distinct, [counts[token] for token in distinct]]
            history.tokens[row, :n], history.counts[row, :n] = torch.tensor(
                columns, dtype=torch.int32, device="cpu"
            )
            history.lengths[row] = n
        for name in ("tokens", "counts", "lengths", "overflowed"):
            setattr(history, name, getattr(history, name).to(device))
        return history

    def append(self, tokens: Tensor) -> None:
        """Count the tokens of a step as output: int64 or int32 [B], on the history's device.

        Ids below 0 (rows without a draw) are not counted.

        Raises:
            InvalidType, InvalidArgument: another dtype, shape or device; on a CPU also an id of
                2^31 or more. On a GPU, whose values the host does not read, such a row is marked in
                `overflowed`.
        """
        checkable = tokens.contiguous() if isinstance(tokens, Tensor) else tokens
        dtypes, shapes = [torch.int64, torch.int32], [tuple(self.lengths.shape)]
        check_tensor("tokens", checkable, dtypes, shapes, self.tokens.device)
        if tokens.device.type == "cpu" and len(tokens) and int(tokens.max()) > _LARGEST_ID:
            raise InvalidArgument(f"tokens: expected ids below 2^31; got {int(tokens.max())}")
        fits = tokens <= _LARGEST_ID
        self.overflowed |= ~fits
        drawn = (tokens >= 0) & fits
        new = torch.where(drawn, tokens, -1).to(torch.int32)[:, None]
        same = (self.tokens == new) & drawn[:, None]
        self.counts += same
        capacity = self.tokens.shape[1]
        fresh = drawn & ~same.any(1)
        self.overflowed |= fresh & (self.lengths >= capacity)
        place = torch.arange(capacity, device=self.tokens.device)
        new_place = (place == self.lengths[:, None]) & fresh[:, None]
        self.tokens.copy_(torch.where(new_place, new, self.tokens))
        self.counts += new_place
        self.lengths += new_place.any(1)

    def dense(self, V: int) -> tuple[Tensor, Tensor]:
        """Return (whether every token occurs, its count in the output): int64 [B, V] each."""
        used = torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]
        used &= self.tokens < V
        token = torch.where(used, self.tokens, 0).long()
        seen = torch.zeros(len(token), V, dtype=torch.int64, device=token.device)
        seen.scatter_add_(1, token, used.long())
        counts = torch.where(used, self.counts, 0).long()
        return seen, torch.zeros_like(seen).scatter_add_(1, token, counts)


def _usable(device: object) -> torch.device:
    """Return the device, if torch can put a tensor on it.

    Raises:
        InvalidType: not a device or a name. InvalidArgument: this machine has no such device.
    """
    if not isinstance(device, str | torch.device):
        raise InvalidType(f"device: expected a torch.device or its name; got {device!r}")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        reason = str(error).splitlines()[0]
        raise InvalidArgument(
            f"device: expected one of this machine; got {device}: {reason}"
        ) from None


def _ids(name: str, row: int, tokens: Sequence[int]) -> list[int]:
    """Return the token ids of a row as ints."""
    try:
        ids = [index(token) for token in tokens]
    except TypeError:
        types = sorted({type(token).__name__ for token in tokens})
        raise InvalidType(
            f"{name}: expected integers in row {row}; got {', '.join(types)}"
        ) from None
    for wrong in (token for token in ids if not 0 <= token <= _LARGEST_ID):
        raise InvalidArgument(
            f"{name}: expected token ids from 0 to 2^31 - 1 in row {row}; got {wrong}"
        )
    return ids


class Penalties(NamedTuple):
    """Penalties on the tokens of a history, as engines apply them (fsbench.reference.penalized).

    repetition: > 0. A seen token's logit is divided by it if positive, else multiplied by it.
    presence, frequency: subtracted once, and for every occurrence in the output.

    Each is a number, or fp32 [B]. A row has no draw if its value in a tensor is not finite, or if
    its repetition is 0 or below.
    """

    history: TokenHistory
    repetition: float | Tensor = 1.0
    presence: float | Tensor = 0.0
    frequency: float | Tensor = 0.0


_LARGEST_FP32 = torch.finfo(torch.float32).max


def check_fraction(name: str, value: object, B: int, device: torch.device) -> float | Tensor:
    """Return a number that is finite in fp32, as a float, or a tensor fp32 [B]."""
    if isinstance(value, torch.Tensor):
        return check_tensor(name, value, [torch.float32], [(B,)], device)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidType(f"{name}: expected a number or a tensor; got {type(value).__name__}")
    if not abs(value) <= _LARGEST_FP32:
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
    """Return the penalties by name, numbers as float; None gives those that change no logit."""
    if penalties is None:
        return {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    named = penalties._asdict()
    del named["history"]
    return {n: float(v) if isinstance(v, int | float) else v for n, v in named.items()}
