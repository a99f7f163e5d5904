"""A sampler under test, with draws that several checks share, made at their first use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fsbench.provider import Capabilities, Provider
from fsbench.verify.check import Setting
from fsbench.verify.drawing import Draws
from fsbench.verify.effort import Effort, Shapes

FIT_SEED = 11
SEED = 2**40 + 19
_SMALL = (300, 500)  # B, V; a row number takes more than 8 bits
_LARGE_ROWS = 256


@dataclass(frozen=True)
class Subject:
    """Sampler, setting and effort of a check. gate: check only the filters of the gate."""

    provider: Provider
    setting: Setting
    effort: Effort
    gate: bool = False

    @property
    def caps(self) -> Capabilities:
        return self.provider.capabilities

    @property
    def shapes(self) -> Shapes:
        return self.effort.shapes if self.caps.noise else self.effort.any_shapes

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.effort.sizes if self.caps.noise else self.effort.any_sizes

    @cached_property
    def small(self) -> Draws:
        """Return draws of 300 rows and 500 tokens, at the second temperature.

        Rows of logits:
            row: normal; the first and the last token are likely.
            negative, positive: the same minus and plus 1000 (16 for a quantized head).
            flat: all equal.
            blocks, ends: see `block_classes`.

        Logits scale with T, so the distribution is about the same at every T.
        """
        B, V = _SMALL
        T = self.setting.second_temperature
        row = 2.0 * torch.randn(V, generator=torch.Generator().manual_seed(5))
        row[[0, -1]] = 4.0
        scale = min(T, 1e3)  # fp16 ends at 65504
        # In one byte, a token with -1000 in one row would have a resolution of 8 in the others.
        shift = min(16.0 if self.setting.weights else 1000.0, 5e4 / scale)
        rows = {"negative": scale * (row - shift), "positive": scale * (row + shift)}
        rows |= {"row": scale * row, "flat": torch.zeros(V)}
        for name, classes in block_classes(V).items():
            rows[name] = -scale * classes.bincount()[classes].log()
        return Draws(self.provider, self.setting.problem(B, V, T), rows)

    @cached_property
    def tokens(self) -> Tensor:
        """Return tokens [steps, B] of `row` of the small problem."""
        self.small.seed(FIT_SEED)
        return self.small.draw("row", math.ceil(self.effort.fit_draws / _SMALL[0]))

    @cached_property
    def large(self) -> Draws:
        """Return draws of 256 rows from the large vocabulary, at the first temperature.

        Rows of logits: `flat`, all equal; `zipf`, Zipf's distribution, shuffled; `gap 16`, one
        token 16 T above all others.
        """
        V, temperature = self.effort.vocabulary, self.setting.sampled_temperature
        T = min(temperature, 1e3)
        order = torch.randperm(V, generator=torch.Generator().manual_seed(7))
        zipf = -torch.log(torch.arange(1, V + 1, dtype=torch.float64))
        rows = {"flat": torch.zeros(V), "zipf": (T * zipf)[order]}
        for gap in self.effort.gaps:
            rows[f"gap {gap:g}"] = torch.full((V,), -T * gap)
            rows[f"gap {gap:g}"][V // 3] = 0.0
        return Draws(self.provider, self.setting.problem(_LARGE_ROWS, V, temperature), rows)

    @cached_property
    def flat(self) -> Tensor:
        """Return tokens [steps, B] of `flat` of the large problem."""
        self.large.seed(SEED)
        return self.large.draw("flat", self.effort.joint_steps)


def block_classes(V: int) -> dict[str, Tensor]:
    """Return the class int64 [V] of each token, for two rows of logits.

    blocks: the first token of each block of 128, the last one, and the others.
    ends: the last partial blocks of 128, 64, .. 2 tokens, a token by its smallest one; the others.

    Each class has the same probability, so that a small loss or gain of it shows.
    """
    token = torch.arange(V)
    blocks = 2 * (token % 128 == 0).long() + (token % 128 == 127).long()
    ends = torch.zeros(V, dtype=torch.int64)
    for bit in range(8):
        ends[V >> bit << bit :] += 1
    return {
        name: classes.unique(return_inverse=True)[1]
        for name, classes in (("blocks", blocks), ("ends", ends))
    }
