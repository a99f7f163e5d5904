"""Bringing the L2 cache of a GPU to a known state before each iteration.

A decode step of a serving engine finds the LM head's weight outside the cache, because the layers
before it went through. `cold` imitates that by *reading* a buffer of four times the L2, which
leaves the cache full of clean lines. Writing the buffer (`cold-write`, what most harnesses do)
leaves dirty lines, and they are written back to memory inside the timed window. `warm` does
nothing. Lines that a kernel marked persisting may outlive any of them.
"""

from __future__ import annotations

import torch

_FLUSH_FACTOR = 4  # bytes touched per byte of L2; replacement is not LRU, so 1 would leave some
_ROW = 4096  # floats summed by one thread block: rows are plenty, so no second reduction pass


class L2Flush:
    """Call it to bring the L2 of `device` to `state`; `buffer` is held as long as this lives."""

    def __init__(self, state: str, device: str) -> None:
        self.state = state
        if state == "warm":
            return
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        rows = -(-_FLUSH_FACTOR * l2_bytes // (_ROW * 4))
        self.buffer = torch.zeros(rows, _ROW, dtype=torch.float32, device=device)
        self._sums = torch.empty(rows, dtype=torch.float32, device=device)

    def __call__(self) -> None:
        """Queue the flush on the current stream. Allocates nothing."""
        if self.state == "cold":
            torch.sum(self.buffer, dim=1, out=self._sums)
        elif self.state == "cold-write":
            self.buffer.zero_()
