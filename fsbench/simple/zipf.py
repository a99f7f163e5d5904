"""A seeded model of text: the logits of decode steps, and the tokens drawn from them.

Words of any language have a Zipf distribution with a steeper tail beyond a few thousand words
(Ferrer i Cancho and Sole, 2001): p(rank) ~ 1 / rank up to `knee`, ~ rank^-tail beyond. A document
draws a share of its tokens from a topic, a Zipf distribution over a selection from the commoner
quarter of the vocabulary, so no hot set covers all documents equally. Within a document a step is
peaked: part of its probability is on a few candidates, drawn from the document's distribution. So
the tokens of a document have that distribution, and the hot mass, averaged over steps, is its mass.
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
    """Text of V tokens; all random numbers follow from `seed`."""

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
        return self._scattered(p / p.sum(), self._by_rank)

    @cached_property
    def _by_rank(self) -> np.ndarray:
        return self._generator(0).permutation(self.V)

    def _scattered(self, p: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        distribution = np.zeros(self.V)
        distribution[tokens] = p
        return distribution

    def _generator(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *stream))

    def distribution(self, document: int) -> np.ndarray:
        """Return the probabilities of a document's tokens, float64 [V]."""
        generator = self._generator(1, document % self.topics)
        common = self._by_rank[: -(-self.V // 4)]
        size = min(_TOPIC_TOKENS, len(common))
        p = 1 / np.arange(1, size + 1)
        topic = self._scattered(p / p.sum(), generator.choice(common, size, replace=False))
        return (1 - self.topic_share) * self._common + self.topic_share * topic

    def trace(self, documents: range, length: int = 1024) -> np.ndarray:
        """Draw the tokens of documents, int64 [documents, length]."""
        rows = []
        for document in documents:
            cdf = self.distribution(document).cumsum()
            u = self._generator(2, document).random(length) * cdf[-1]
            rows.append(np.searchsorted(cdf, u, side="right"))
        return np.stack(rows)

    def logits(self, rows: int, first: int = 0) -> Tensor:
        """Return logits [rows, V] fp32, log p of one step of each document from `first` on."""
        out = torch.empty(rows, self.V, dtype=torch.float32)
        weight = 0.5 ** np.arange(_CANDIDATES)
        for row in range(rows):
            p = self.distribution(first + row)
            generator = self._generator(3, first + row)
            peak = generator.random()
            candidates = np.searchsorted(p.cumsum(), generator.random(_CANDIDATES))
            p *= 1 - peak
            np.add.at(p, candidates.clip(max=self.V - 1), peak * weight / weight.sum())
            out[row] = torch.from_numpy(np.log(p))
        return out
