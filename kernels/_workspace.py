"""Device memory that the last-program-done reduction needs: one packed key per row, one counter.

A kernel leaves its workspace as it found it, so no launch has to clear it. What must not happen is
that two launches in flight share one: each stream has its own, and each captured launch keeps one
for as long as the process lives, because its graph may be replayed at any time on any stream.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsbench.errors import CaptureError
from fsbench.kernels import _helper

if TYPE_CHECKING:
    import torch

LOWEST_KEY: int = _helper.LOWEST_KEY.value
_MIN_ROWS = 256
_SPARES = 16  # set aside per device and size before a capture can need them


@dataclass(frozen=True)
class Workspace:
    """keys: int64 [rows], arrivals: int32 [rows]; between calls all LOWEST_KEY and all 0."""

    keys: torch.Tensor
    arrivals: torch.Tensor


_lock = threading.Lock()
_by_stream: dict[tuple[object, ...], Workspace] = {}
_spares: dict[tuple[object, ...], list[Workspace]] = {}
_held: dict[torch.device, int] = {}


def _allocate(rows: int, device: torch.device, count: int) -> list[Workspace]:
    import torch

    keys = torch.full((count, rows), LOWEST_KEY, dtype=torch.int64, device=device)
    arrivals = torch.zeros((count, rows), dtype=torch.int32, device=device)
    _held[device] = _held.get(device, 0) + keys.nbytes + arrivals.nbytes
    return [Workspace(keys[i], arrivals[i]) for i in range(count)]


def workspace(B: int, device: torch.device) -> Workspace:
    """The workspace for a launch of B rows on the current stream of `device`.

    Raises:
        CaptureError: during CUDA-graph capture, if no spare is left: no launch of this batch size
            was made before (clearing fresh memory would add a kernel to the graph).
    """
    import torch

    rows = max(_MIN_ROWS, 1 << (B - 1).bit_length())
    size = (device, rows)
    with _lock:
        if device.type == "cpu":  # the interpreter: launches run one after the other
            return _resting((size, 0), rows, device)
        with torch.cuda.device(device):
            spares = _spares.setdefault(size, [])
            if torch.cuda.is_current_stream_capturing():
                if not spares:
                    raise CaptureError(
                        f"no workspace is left to capture a launch of B={B} on {device}: launch "
                        "once outside of a capture first"
                    )
                return spares.pop()
            if len(spares) < _SPARES // 2:
                spares += _allocate(rows, device, _SPARES)
                # Any stream may use a spare next, so it must be cleared by then.
                torch.cuda.current_stream().synchronize()
            return _resting((size, torch.cuda.current_stream().cuda_stream), rows, device)


def _resting(key: tuple[object, ...], rows: int, device: torch.device) -> Workspace:
    if key not in _by_stream:
        (_by_stream[key],) = _allocate(rows, device, 1)
    return _by_stream[key]


def held_bytes(device: torch.device) -> int:
    """Device memory of all workspaces on a device, those set aside for captures included."""
    return _held.get(device, 0)
