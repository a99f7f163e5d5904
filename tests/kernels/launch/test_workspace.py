"""Workspaces of captured launches, on a CPU that passes for a GPU."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fsbench.kernels.launch import workspace as workspaces

DEVICE = torch.device("cpu:0")  # not equal to torch.device("cpu")


@pytest.fixture
def capture(monkeypatch):
    """A function that says whether the current stream is capturing from now on."""
    for name in ("_by_stream", "_pool", "_full_pools", "_held"):
        monkeypatch.setattr(workspaces, name, {})
    monkeypatch.setattr(workspaces, "stream_handle", lambda device: 0)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)

    def set_capturing(capturing: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    set_capturing(False)
    return set_capturing


def test_a_new_pool_leaves_captured_launches_their_memory(capture, monkeypatch):
    """A graph holds addresses only: memory that is freed would get another tensor's numbers."""
    memory = []

    def allocate(rows, device):
        keys = np.zeros(rows, np.int64)
        memory.append(weakref.ref(keys))
        return workspaces.Workspace(torch.from_numpy(keys), torch.zeros(rows, dtype=torch.int32))

    monkeypatch.setattr(workspaces, "_allocate", allocate)
    workspaces.workspace(16, DEVICE)
    pool = memory[0]
    capture(True)
    workspaces.workspace(workspaces._POOL_ROWS - 32, DEVICE)
    capture(False)
    workspaces.workspace(16, DEVICE)  # the pool is used up: a new one
    assert len(workspaces._pool[DEVICE]) == workspaces._POOL_ROWS
    assert pool() is not None
    workspaces.forget_workspaces()
    assert pool() is None


def test_captured_launches_have_workspaces_of_their_own(capture):
    workspaces.workspace(16, DEVICE)
    capture(True)
    addresses = set()
    for rows in (16, 17, 300):
        work = workspaces.workspace(rows, DEVICE)
        assert len(work) >= rows
        addresses |= set(range(work.keys.data_ptr(), work.keys.data_ptr() + 8 * len(work), 8))
    assert len(addresses) == 16 + 32 + 304
