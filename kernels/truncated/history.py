"""What a row has seen: the distinct tokens of its prompt and output, for penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType


class TokenHistory:
    """Distinct tokens of B rows and how often each occurs in the output, on the device.

    Penalties touch these tokens alone. `append` adds the tokens of a step; it neither waits for the
    GPU nor allocates state, so it may be part of a captured graph.

    tokens: int32 [B, capacity]. counts: int32 [B, capacity], 0 for a token of the prompt only.
    lengths: int32 [B], how many of a row's places are in use. overflowed: bool [B], rows that had
    no place for a token, which is then not penalised: make the capacity larger.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device | str):
        for name, value in (("rows", rows), ("capacity", capacity)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidType(f"{name}: expected an integer; got {type(value).__name__}")
            if value < 1:
                raise InvalidArgument(f"{name}: expected at least 1; got {value}")
        self.tokens = torch.full((rows, capacity), -1, dtype=torch.int32, device=device)
        self.counts = torch.zeros_like(self.tokens)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.overflowed = torch.zeros(rows, dtype=torch.bool, device=device)

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        capacity: int,
        device: torch.device | str,
    ) -> TokenHistory:
        """The history of rows whose prompts and outputs so far are these token ids.

        Raises:
            InvalidArgument: unequal numbers of rows, a negative id, or more distinct tokens in a
                row than `capacity`.
        """
        if len(prompts) != len(outputs):
            raise InvalidArgument(
                f"outputs: expected one for each of {len(prompts)} prompts; got {len(outputs)}"
            )
        history = cls(len(prompts), capacity, "cpu")
        for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            counts = Counter(map(int, output))
            distinct = list(dict.fromkeys([*map(int, prompt), *counts]))
            if distinct and min(distinct) < 0:
                raise InvalidArgument(f"row {row}: expected token ids >= 0; got {min(distinct)}")
            n = len(distinct)
            if n > capacity:
                raise InvalidArgument(
                    f"capacity: expected at least {n}, the distinct tokens of row {row}; "
                    f"got {capacity}"
                )
            history.tokens[row, :n] = torch.tensor(distinct, dtype=torch.int32)
            history.counts[row, :n] = torch.tensor(
                [counts[token] for token in distinct], dtype=torch.int32
            )
            history.lengths[row] = n
        for name in ("tokens", "counts", "lengths", "overflowed"):
            setattr(history, name, getattr(history, name).to(device))
        return history

    def append(self, tokens: Tensor) -> None:
        """Count the tokens [B] of a step as output; ids below 0 (rows without a draw) are not."""
        new = tokens[:, None].to(torch.int32)
        drawn = new[:, 0] >= 0
        same = (self.tokens == new) & drawn[:, None]
        self.counts += same
        capacity = self.tokens.shape[1]
        fresh = drawn & ~same.any(1)
        self.overflowed |= fresh & (self.lengths >= capacity)
        place = torch.arange(capacity, device=self.tokens.device)
        here = (place == self.lengths[:, None]) & fresh[:, None]
        self.tokens.copy_(torch.where(here, new, self.tokens))
        self.counts += here
        self.lengths += here.any(1)

    def dense(self, V: int) -> tuple[Tensor, Tensor]:
        """(occurs at all, occurrences in the output) of every token: int64 [B, V] each."""
        used = torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]
        used &= self.tokens < V
        at = torch.where(used, self.tokens, 0).long()
        seen = torch.zeros(len(at), V, dtype=torch.int64, device=at.device)
        seen.scatter_add_(1, at, used.long())
        counts = torch.zeros_like(seen).scatter_add_(
            1, at, torch.where(used, self.counts, 0).long()
        )
        return seen, counts


class Penalties(NamedTuple):
    """Penalties on the tokens of a history, as engines apply them (fsbench.reference.penalised).

    repetition: > 0; a seen token's logit is divided by it if positive, else multiplied.
    presence, frequency: subtracted once, and for every occurrence in the output.

    Numbers, or fp32 [B].
    """

    history: TokenHistory
    repetition: float | Tensor = 1.0
    presence: float | Tensor = 0.0
    frequency: float | Tensor = 0.0
