"""Order tokens by frequency in a trace, and count the share that the hottest cover."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.interpolate import PchipInterpolator

from fsbench.errors import InvalidArgument

GRID = 24
"""Number of H at which the covered share is counted, spaced evenly in log H."""


def read_trace(path: Path, V: int) -> np.ndarray:
    """Read token ids, int64 [documents, tokens], from .npy or from text with a document per line.

    Documents are cut to the length of the shortest.

    Raises:
        InvalidArgument: The file cannot be read or has no ids in [0, V).
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
    """Split a trace by documents: one half to order tokens by, one half to count coverage on.

    On the tokens that gave the order, coverage would be too high.
    """
    if len(trace) < 2:
        middle = trace.shape[1] // 2
        return trace[:, :middle], trace[:, middle:]
    return trace[::2], trace[1::2]


def order_of(trace: np.ndarray, V: int) -> np.ndarray:
    """Return the tokens sorted by frequency, the most frequent first: a permutation, int64 [V]."""
    return np.argsort(-np.bincount(trace.ravel(), minlength=V), kind="stable")


@dataclass(frozen=True)
class Coverage:
    """Share of a trace's tokens that are among the H hottest.

    Attributes:
        sizes: int64 [n], values of H.
        mean: float64 [n], mean of the share over documents.
    """

    V: int
    sizes: np.ndarray
    mean: np.ndarray

    def share(self, H: np.ndarray | float) -> np.ndarray:
        """Return the mean share at any H in [0, V], by PCHIP in log H: 0 at 0, 1 at V, monotone."""
        return self._curve(np.log1p(H))

    def slope(self, H: np.ndarray | float) -> np.ndarray:
        """Return the derivative of `share` by H."""
        return self._curve(np.log1p(H), 1) / (1 + np.asarray(H))

    @property
    def _curve(self) -> PchipInterpolator:
        sizes = np.concatenate([[0], self.sizes])
        return PchipInterpolator(np.log1p(sizes), np.concatenate([[0.0], self.mean]))


def coverage(order: np.ndarray, trace: np.ndarray, grid: int = GRID) -> Coverage:
    """Return the coverage of a trace [documents, tokens] by the first tokens of an order [V]."""
    V = len(order)
    rank = np.empty(V, dtype=np.int64)
    rank[order] = np.arange(V)
    ranks = np.sort(rank[trace], axis=1)
    sizes = np.unique(np.geomspace(min(16, V), V, grid).round().astype(np.int64))
    shares = np.stack([np.searchsorted(row, sizes) / len(row) for row in ranks])
    return Coverage(V, sizes, shares.mean(0))
