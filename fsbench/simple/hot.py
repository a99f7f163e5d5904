"""Which tokens are hot, and how much of the probability they cover: from traces of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.interpolate import PchipInterpolator

from fsbench.errors import InvalidArgument

GRID = 24
"""Numbers of hot tokens at which the covered share is counted, spaced evenly in log H."""


def read_trace(path: Path, V: int) -> np.ndarray:
    """Token ids of a file, int64 [documents, tokens]: .npy, or text with one document per line.

    Documents are cut to the shortest one's length. Raises InvalidArgument for anything else.
    """
    try:
        if path.suffix == ".npy":
            tokens = np.atleast_2d(np.load(path))
        else:
            lines = [np.fromstring(line, dtype=np.int64, sep=" ")
                     for line in path.read_text().splitlines() if line.strip()]  # fmt: skip
            shortest = min(map(len, lines), default=0)
            tokens = np.array([line[:shortest] for line in lines])
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"--trace: expected token ids; got {path}: {error}") from error
    if tokens.ndim != 2 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
        raise InvalidArgument(f"--trace: expected token ids, a document per row; got {path}")
    if tokens.min() < 0 or tokens.max() >= V:
        raise InvalidArgument(f"--trace: expected ids in [0, {V}); got {path}")
    return tokens.astype(np.int64)


def halves(trace: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A trace's documents, every other one: to order tokens by, and to count coverage on.

    Counted on the tokens that gave the order, coverage would look better than it is.
    """
    if len(trace) < 2:
        middle = trace.shape[1] // 2
        return trace[:, :middle], trace[:, middle:]
    return trace[::2], trace[1::2]


def order_of(trace: np.ndarray, V: int) -> np.ndarray:
    """Tokens by how often they occur, the most frequent first: a permutation, int64 [V]."""
    return np.argsort(-np.bincount(trace.ravel(), minlength=V), kind="stable")


@dataclass(frozen=True)
class Coverage:
    """Share of tokens that are among the H hottest: at sizes [n], mean and 10th percentile.

    The percentile is over documents: what a document that the hot set does not suit gets.
    """

    V: int
    sizes: np.ndarray
    mean: np.ndarray
    low: np.ndarray

    def at(self, H: np.ndarray | float) -> np.ndarray:
        """The mean share at any H in [0, V], monotone: PCHIP in log H, 0 at 0 and 1 at V."""
        return self._curve(np.log1p(H))

    def slope(self, H: np.ndarray | float) -> np.ndarray:
        """Its derivative by H."""
        return self._curve(np.log1p(H), 1) / (1 + np.asarray(H))

    @property
    def _curve(self) -> PchipInterpolator:
        sizes = np.concatenate([[0], self.sizes])
        return PchipInterpolator(np.log1p(sizes), np.concatenate([[0.0], self.mean]))


def coverage(order: np.ndarray, trace: np.ndarray, grid: int = GRID) -> Coverage:
    """Coverage of a trace [documents, tokens] by the heads of an order of tokens [V]."""
    V = len(order)
    rank = np.empty(V, dtype=np.int64)
    rank[order] = np.arange(V)
    ranks = np.sort(rank[trace], axis=1)
    sizes = np.unique(np.geomspace(min(16, V), V, grid).round().astype(np.int64))
    shares = np.stack([np.searchsorted(row, sizes) / len(row) for row in ranks])
    return Coverage(V, sizes, shares.mean(0), np.quantile(shares, 0.1, axis=0))
