"""Hopper GPUs as the choice of a kernel sees them, on a machine without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fsbench.kernels.configs import choice

_PORTABLE_ROWS = {"NVIDIA H200": 64, "NVIDIA H100 80GB HBM3": 128}
"""Name -> choice.portable_rows, which needs the clocks of a GPU."""
H200, H100 = _PORTABLE_ROWS


def imitate_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> torch.device:
    """Make H200 or H100 the GPU of this test, and return its device.

    Choices are cached by device, so each GPU has an index that no other test uses.
    """
    facts = SimpleNamespace(
        name=name, shared_memory_per_block_optin=232448, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(choice, "portable_rows", lambda device: _PORTABLE_ROWS[name])
    return torch.device("cuda", 40 + list(_PORTABLE_ROWS).index(name))
