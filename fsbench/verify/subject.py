"""A sampler under test, and the draws that several checks share, made when needed."""

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
    """Sampler, setting and effort of a check. gate: only the gate's filters are checked."""

    provider: Provider
    setting: Setting
    effort: Effort
    gate: bool = False

    @property
    def able(self) -> Capabilities:
        return self.provider.capabilities

    @property
    def shapes(self) -> Shapes:
        return self.effort.shapes if self.able.noise else self.effort.any_shapes

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.effort.sizes if self.able.noise else self.effort.any_sizes

    @cached_property
    def small(self) -> Draws:
        """500 tokens with normal logits: `row`, and with all logits `negative` or `positive`, near
        -1000 and 1000 (of a quantized head 16).

        The logits scale with T, so the law is much the same at every T; the first and the last
        token are likely ones. Also all equal (`flat`), and the rows of `block_classes`. At the
        second temperature: here its neglect shows, and the large problem has the first.
        """
        B, V = _SMALL
        T = self.setting.second_temperature
        row = 2.0 * torch.randn(V, generator=torch.Generator().manual_seed(5))
        row[[0, -1]] = 4.0
        scale = min(T, 1e3)  # fp16 ends at 65504
        # Of one byte, a token that has -1000 in one row has steps of 8 in the others.
        shift = min(16.0 if self.setting.weights else 1000.0, 5e4 / scale)
        rows = {"negative": scale * (row - shift), "positive": scale * (row + shift)}
        rows |= {"row": scale * row, "flat": torch.zeros(V)}
        for name, classes in block_classes(V).items():
            rows[name] = -scale * classes.bincount()[classes].log()
        return Draws(self.provider, self.setting.problem(B, V, T), rows)

    @cached_property
    def tokens(self) -> Tensor:
        """Tokens [steps, B] of `row` of the small problem."""
        self.small.seed(FIT_SEED)
        return self.small.draw("row", math.ceil(self.effort.fit_draws / _SMALL[0]))

    @cached_property
    def large(self) -> Draws:
        """V tokens: all equal (`flat`), Zipf's law, shuffled (`zipf`), one leader (`gap 16`)."""
        V, drawn = self.effort.vocabulary, self.setting.sampled_temperature
        T = min(drawn, 1e3)
        order = torch.randperm(V, generator=torch.Generator().manual_seed(7))
        zipf = -torch.log(torch.arange(1, V + 1, dtype=torch.float64))
        rows = {"flat": torch.zeros(V), "zipf": (T * zipf)[order]}
        for gap in self.effort.gaps:
            rows[f"gap {gap:g}"] = torch.full((V,), -T * gap)
            rows[f"gap {gap:g}"][V // 3] = 0.0
        return Draws(self.provider, self.setting.problem(_LARGE_ROWS, V, drawn), rows)

    @cached_property
    def flat(self) -> Tensor:
        """Tokens [steps, B] of `flat` of the large problem."""
        self.large.seed(SEED)
        return self.large.draw("flat", self.effort.joint_steps)


def block_classes(V: int) -> dict[str, Tensor]:
    """The class int64 [V] of each token: `blocks`, the first and the last of 128, and the others;
    `ends`, where V is no multiple of 128, 64, .. 2: its last tokens, by the smallest that has them.

    Each class has the same probability, so that a little of it shows that is lost or gained.
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
