"""Device memory that the last-program-done reduction needs: packed keys and counters.

A kernel leaves its workspace as it found it, so no launch has to clear it. What must not happen is
that two launches in flight share one, or that one enters between two launches of a call, which a
thread may do: each stream has its own in each thread, and each captured launch keeps one for as
long as the process lives, because its graph may be replayed at any time on any stream.
Those of captured launches are cut from a stock that launches outside of captures fill up, since
clearing fresh memory would add a kernel to the graph.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from fsbench.errors import CaptureError
from fsbench.kernels.configs.gpu import CPU, stream_handle
from fsbench.kernels.noise import keys as noise_keys

LOWEST_KEY: int = noise_keys.LOWEST_KEY.value
_MIN_ROWS = 256  # of a stream's workspace
_STOCK_ROWS = 32_768  # 384 KiB: enough for a graph of every batch size up to 248


@dataclass(frozen=True)
class Workspace:
    """keys: int64 [rows], arrivals: int32 [rows]; between calls all LOWEST_KEY and all 0."""

    keys: torch.Tensor
    arrivals: torch.Tensor

    def __len__(self) -> int:
        return self.keys.shape[0]

    def split(self, rows: int) -> tuple[Workspace, Workspace]:
        """The first `rows` rows, and the rest."""
        keys, arrivals = self.keys, self.arrivals
        return Workspace(keys[:rows], arrivals[:rows]), Workspace(keys[rows:], arrivals[rows:])


_lock = threading.Lock()
_by_stream: dict[tuple[object, ...], Workspace] = {}
_stock: dict[torch.device, Workspace] = {}
_held: dict[torch.device, int] = {}


def _allocate(rows: int, device: torch.device) -> Workspace:
    keys = torch.full((rows,), LOWEST_KEY, dtype=torch.int64, device=device)
    arrivals = torch.zeros(rows, dtype=torch.int32, device=device)
    _held[device] = _held.get(device, 0) + keys.nbytes + arrivals.nbytes
    return Workspace(keys, arrivals)


def workspace(rows: int, device: torch.device) -> Workspace:
    """At least `rows` keys and counters for a launch on the current stream of `device`.

    `device` is the current one (launching_on).

    The first call on a device waits for it; so does one that finds the stock half used up.

    Raises:
        CaptureError: during CUDA-graph capture, if the stock does not suffice.
    """
    rows = -(-rows // 16) * 16  # keeps the alignment that Triton compiles for
    if device == CPU:  # the interpreter: launches of a thread run one after the other
        return _of_stream(device, 0, rows)
    capturing = torch.cuda.is_current_stream_capturing()
    stock = _stock.get(device)
    if capturing or stock is None or len(stock) < max(_STOCK_ROWS // 2, rows):
        with _lock:
            if capturing:
                return _cut_from_stock(device, rows)
            _stock[device] = _allocate(max(_STOCK_ROWS, rows), device)
            # Any stream may use it next, so it must be cleared by then.
            torch.cuda.current_stream().synchronize()
    return _of_stream(device, stream_handle(device), rows)


def _cut_from_stock(device: torch.device, rows: int) -> Workspace:
    stock = _stock.get(device)
    if stock is None or len(stock) < rows:
        raise CaptureError(
            f"the workspaces for captured launches on {device} are used up: launch "
            "once outside of a capture, at this batch size, to have more"
        )
    own, _stock[device] = stock.split(rows)
    return own


def _of_stream(device: torch.device, stream: int, rows: int) -> Workspace:
    size = max(_MIN_ROWS, 1 << (rows - 1).bit_length())
    key = (device, stream, threading.get_ident(), size)
    found = _by_stream.get(key)
    if found is None:
        with _lock:
            found = _by_stream[key] = _allocate(size, device)
    return found


def forget_workspaces() -> None:
    """Drop all workspaces. No launch may be in flight, and no captured graph may be replayed."""
    for cache in (_by_stream, _stock, _held):
        cache.clear()


def held_bytes(device: torch.device) -> int:
    """Device memory of all workspaces on a device, those set aside for captures included."""
    return _held.get(device, 0)
