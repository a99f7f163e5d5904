"""The device between measurements: wait for it, free its memory, see whether it still works."""

from __future__ import annotations

import gc

import torch

from fsbench.errors import DeviceUnavailable, describe
from fsbench.machine import hardware


def synchronize(device: str) -> None:
    """Wait for all that was launched."""
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str, generation: int = 2) -> None:
    """Give memory that nothing refers to back to the device. generation: see gc.collect."""
    gc.collect(generation)
    synchronize(device)
    if device == "cuda":
        torch.cuda.empty_cache()


def require_live_device(device: str, cause: BaseException) -> None:
    """A kernel that faulted leaves the CUDA context unusable: stop, or every cell would fail."""
    try:
        synchronize(device)
    except Exception as error:
        raise DeviceUnavailable(
            f"the GPU cannot be used any more in this process after {describe(cause)}; "
            "what was measured is kept: continue with --resume, without that sampler"
        ) from error


def nvml_index(device: int) -> int | None:
    """NVML's index of torch's CUDA device number `device`, which CUDA_VISIBLE_DEVICES renumbers.

    Matched by UUID. None if NVML does not list it (no NVML, or a MIG slice).
    """
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return next((gpu.index for gpu in hardware.gpus() if gpu.uuid == uuid), None)
