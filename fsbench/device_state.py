"""The device between measurements: wait for it, free its memory, see whether it still works."""

from __future__ import annotations

import gc

from fsbench.errors import DeviceUnavailable, describe


def synchronize(device: str) -> None:
    """Wait for all that was launched."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    """Give memory that nothing refers to back to the device."""
    gc.collect()
    synchronize(device)
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


def require_live_device(device: str, cause: Exception) -> None:
    """A kernel that faulted leaves the CUDA context unusable: stop, or every cell would fail."""
    try:
        synchronize(device)
    except Exception as error:
        raise DeviceUnavailable(
            f"the GPU cannot be used any more in this process after {describe(cause)}; "
            "what was measured is kept: continue with --resume, without that sampler"
        ) from error
