"""A seeded model of text: what a decode step's logits look like, and the tokens drawn from them.

Words of any language follow Zipf's law, with a steeper tail beyond some thousand words (Ferrer i
Cancho and Sole, 2001): p(rank) ~ 1 / rank up to `knee`, ~ rank^-tail beyond. A document draws a
share of its tokens from a topic, a Zipf law over a selection from the commoner quarter of the
vocabulary, so no hot set covers all documents alike. Within a document a step is peaked: part of
its probability is on a few candidates, themselves drawn from the document's law. So the tokens of a
document follow that law, and the hot mass, averaged over steps, is that of the law.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

_CANDIDATES = 8  # of a step, with weights 1, 1/2, 1/4, ...
_TOPIC_TOKENS = 8192


@dataclass(frozen=True)
class ZipfText:
    """V tokens; every number that is drawn follows from `seed`."""

    V: int
    seed: int = 0
    knee: int = 8192
    tail: float = 2.0
    topics: int = 64
    topic_share: float = 0.1

    @cached_property
    def _common(self) -> np.ndarray:
        rank = np.arange(1, self.V + 1, dtype=np.float64)
        p = np.where(rank <= self.knee, 1 / rank, self.knee ** (self.tail - 1) / rank**self.tail)
        return self._placed(p / p.sum(), self._by_rank)

    @cached_property
    def _by_rank(self) -> np.ndarray:
        return self._generator(0).permutation(self.V)

    def _placed(self, p: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        law = np.zeros(self.V)
        law[tokens] = p
        return law

    def _generator(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *stream))

    def law(self, document: int) -> np.ndarray:
        """Probabilities of a document's tokens, float64 [V]."""
        generator = self._generator(1, document % self.topics)
        known = self._by_rank[: -(-self.V // 4)]
        size = min(_TOPIC_TOKENS, len(known))
        p = 1 / np.arange(1, size + 1)
        topic = self._placed(p / p.sum(), generator.choice(known, size, replace=False))
        return (1 - self.topic_share) * self._common + self.topic_share * topic

    def trace(self, documents: range, length: int = 1024) -> np.ndarray:
        """Tokens of documents, int64 [documents, length]."""
        return np.stack([self._draw(document, length) for document in documents])

    def _draw(self, document: int, length: int) -> np.ndarray:
        cdf = self.law(document).cumsum()
        u = self._generator(2, document).random(length) * cdf[-1]
        return np.searchsorted(cdf, u, side="right")

    def logits(self, rows: int, first: int = 0) -> Tensor:
        """Logits [rows, V] fp32, each a step of another document: log p of the step."""
        out = torch.empty(rows, self.V, dtype=torch.float32)
        weight = 0.5 ** np.arange(_CANDIDATES)
        for row in range(rows):
            law = self.law(first + row)
            generator = self._generator(3, first + row)
            peak = generator.random()
            candidates = np.searchsorted(law.cumsum(), generator.random(_CANDIDATES))
            p = (1 - peak) * law
            np.add.at(p, candidates.clip(max=self.V - 1), peak * weight / weight.sum())
            out[row] = torch.from_numpy(np.log(p))
        return out
