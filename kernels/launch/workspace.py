"""Workspaces of the last-program-done reduction: packed keys and counters in device memory.

A kernel resets its workspace at its end, so no launch has to clear it. Two launches in flight must
not share a workspace, and no launch may use one between two launches of another call, as another
thread could. So each stream has a workspace in each thread, and each captured launch keeps one for
the life of the process: its graph may be replayed at any time on any stream. Captured launches
take workspaces from a pool, which launches outside of captures refill, because clearing new memory
would add a kernel to the graph.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from fsbench.errors import CaptureError
from fsbench.kernels.configs.gpu import CPU, stream_handle
from fsbench.kernels.noise import keys as noise_keys

LOWEST_KEY: int = noise_keys.LOWEST_KEY.value
_MIN_ROWS = 256  # rows of a stream's workspace
_POOL_ROWS = 32_768  # 384 KiB: enough for a graph of every batch size up to 248


@dataclass(frozen=True)
class Workspace:
    """Memory of a launch: keys, int64 [rows], and arrivals, int32 [rows].

    Between calls all keys are LOWEST_KEY and all arrivals 0.
    """

    keys: torch.Tensor
    arrivals: torch.Tensor

    def __len__(self) -> int:
        return self.keys.shape[0]

    def split(self, rows: int) -> tuple[Workspace, Workspace]:
        """Return the first `rows` rows, and the other rows."""
        keys, arrivals = self.keys, self.arrivals
        return Workspace(keys[:rows], arrivals[:rows]), Workspace(keys[rows:], arrivals[rows:])


_lock = threading.Lock()
_by_stream: dict[tuple[object, ...], Workspace] = {}
_pool: dict[torch.device, Workspace] = {}
_full_pools: dict[torch.device, list[Workspace]] = {}
"""Pools that were replaced: captured graphs have addresses in them, and keep no tensor alive."""
_held: dict[torch.device, int] = {}


def _allocate(rows: int, device: torch.device) -> Workspace:
    keys = torch.full((rows,), LOWEST_KEY, dtype=torch.int64, device=device)
    arrivals = torch.zeros(rows, dtype=torch.int32, device=device)
    _held[device] = _held.get(device, 0) + keys.nbytes + arrivals.nbytes
    return Workspace(keys, arrivals)


def workspace(rows: int, device: torch.device) -> Workspace:
    """Return at least `rows` keys and counters for a launch on the current stream.

    `device` must be the current device (launching_on). The first call on a device waits for it, and
    so does a call that finds the pool half used.

    Raises:
        CaptureError: the pool has too few rows for a launch that is captured.
    """
    rows = -(-rows // 16) * 16  # keeps the alignment that Triton compiles for
    if device == CPU:  # in the interpreter the launches of a thread run one after the other
        return _of_stream(device, 0, rows)
    capturing = torch.cuda.is_current_stream_capturing()
    pool = _pool.get(device)
    if capturing or pool is None or len(pool) < max(_POOL_ROWS // 2, rows):
        with _lock:
            if capturing:
                return _cut_from_pool(device, rows)
            if pool is not None:
                _full_pools.setdefault(device, []).append(pool)
            _pool[device] = _allocate(max(_POOL_ROWS, rows), device)
            # Any stream may use the pool next, so clearing must be complete.
            torch.cuda.current_stream().synchronize()
    return _of_stream(device, stream_handle(device), rows)


def _cut_from_pool(device: torch.device, rows: int) -> Workspace:
    pool = _pool.get(device)
    if pool is None or len(pool) < rows:
        raise CaptureError(
            f"the workspaces for captured launches on {device} are used up: launch "
            "once outside of a capture, at this batch size, to have more"
        )
    captured, _pool[device] = pool.split(rows)
    return captured


def _of_stream(device: torch.device, stream: int, rows: int) -> Workspace:
    size = max(_MIN_ROWS, 1 << (rows - 1).bit_length())
    key = (device, stream, threading.get_ident(), size)
    cached = _by_stream.get(key)
    if cached is None:
        with _lock:
            cached = _by_stream[key] = _allocate(size, device)
    return cached


def forget_workspaces() -> None:
    """Drop all workspaces. No launch may be in flight, and no captured graph may be replayed."""
    for cache in (_by_stream, _pool, _full_pools, _held):
        cache.clear()


def held_bytes(device: torch.device) -> int:
    """Return the bytes of all workspaces on a device, including the pool for captures."""
    return _held.get(device, 0)
