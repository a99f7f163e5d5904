"""Device memory that the last-program-done reduction needs: one packed key per row, one counter.

A kernel leaves its workspace as it found it, so no launch has to clear it. What must not happen is
that two launches in flight share one: each stream has its own, and each captured launch keeps one
for as long as the process lives, because its graph may be replayed at any time on any stream.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LOWEST_KEY = -(2**63)
_MIN_ROWS = 256
_SPARES = 32  # set aside per device and size before a capture can need them


@dataclass(frozen=True)
class Workspace:
    """keys: int64 [rows], all LOWEST_KEY between calls; arrivals: int32 [rows], all 0 between calls."""

    keys: torch.Tensor
    arrivals: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Device memory it holds, bytes."""
        return self.keys.nbytes + self.arrivals.nbytes


_lock = threading.Lock()
_by_stream: dict[tuple[object, ...], Workspace] = {}
_spares: dict[tuple[object, ...], list[Workspace]] = {}


def _allocate(rows: int, device: torch.device, count: int) -> list[Workspace]:
    import torch

    keys = torch.full((count, rows), LOWEST_KEY, dtype=torch.int64, device=device)
    arrivals = torch.zeros((count, rows), dtype=torch.int32, device=device)
    return [Workspace(keys[i], arrivals[i]) for i in range(count)]


def workspace(B: int, device: torch.device) -> Workspace:
    """The workspace for a launch of B rows on the current stream of `device`.

    Raises:
        RuntimeError: during CUDA-graph capture, if no call of this batch size was made before it
            (clearing fresh memory would add a kernel to the graph), or all spares are taken.
    """
    import torch

    rows = max(_MIN_ROWS, 1 << (B - 1).bit_length())
    size = (device, rows)
    if device.type == "cpu":  # the interpreter: launches run one after the other
        with _lock:
            return _by_stream.setdefault(size, _allocate(rows, device, 1)[0])
    with torch.cuda.device(device), _lock:
        if torch.cuda.is_current_stream_capturing():
            if not _spares.get(size):
                raise RuntimeError(
                    f"no workspace is left to capture a launch of B={B}: call it once outside of "
                    "the capture, on the same device, before each capture"
                )
            return _spares[size].pop()
        stream = (size, torch.cuda.current_stream().cuda_stream)
        if stream not in _by_stream:
            _by_stream[stream] = _allocate(rows, device, 1)[0]
        if len(_spares.setdefault(size, [])) < _SPARES // 2:
            _spares[size] += _allocate(rows, device, _SPARES)
            # A capture or another stream may use a spare at once: it must be cleared by then.
            torch.cuda.current_stream().synchronize()
        return _by_stream[stream]
