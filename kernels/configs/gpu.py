"""The device of a kernel: CUDA, or the CPU with Triton's interpreter."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

try:
    import triton
except ModuleNotFoundError:  # it exists for Linux only
    triton = None

CPU = torch.device("cpu")
"""Compare devices with it: the attribute `type` makes a string, which takes longer."""

_CURRENT = nullcontext()
_binding = threading.RLock()
_INTERPRETED_MULTIPROCESSORS = 4  # enough for programs to share the work, few enough to be quick
_HOPPER_OPERATIONS = 4096  # bf16, dense, of a multiprocessor in a cycle; an addition is one


def runs_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels run on tensors of this device and dtype, in the interpreter or not.

    Triton's interpreter is wrong in bf16.
    """
    if device.type == "cuda":
        return True
    return triton is not None and triton.knobs.runtime.interpret and dtype != torch.bfloat16


def is_hopper(device: torch.device) -> bool:
    """Return whether a device is a GPU of compute capability 9.0."""
    if device.type != "cuda" or torch.version.hip is not None:  # an MI250 is 9.0, too
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one: Triton launches on that, not on the tensors' device."""
    if device == CPU or device.index == torch.cuda.current_device():
        return _CURRENT  # a device's context would cost some microseconds
    return torch.cuda.device(device)


def bind_and_launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> Any:
    """Launch a Triton or Gluon kernel on the current device; return the compiled kernel.

    The interpreter compiles nothing and returns None. All launches of our kernels are made here, or
    repeat such a launch (launch.launch_cache). So for all of them:

    - A product and a sum are fused into one operation, whatever the default of Triton's version
      (3.10 changes it); otherwise the bits of logits would depend on that version.
    - One thread at a time compiles or interprets: Triton's interpreter has state of the process.
    """
    with _binding:
        return kernel[grid](*arguments, **named, enable_fp_fusion=True)


def stream_handle(device: torch.device) -> int:
    """Return CUDA's handle of the current stream; torch's object of it takes longer to make."""
    handle: int = triton.runtime.driver.active.get_current_stream(device.index)
    return handle


def multiprocessors(device: torch.device) -> int:
    """Return the number of programs that run at a time, with one per multiprocessor."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def operations_per_byte(device: torch.device) -> float | None:
    """Return a Hopper GPU's bf16 operations per byte of memory traffic, at the highest clocks.

    None if torch does not report the clocks.
    """
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types lack properties
    clock, memory_clock, bits = (
        getattr(properties, name, None)
        for name in ("clock_rate", "memory_clock_rate", "memory_bus_width")
    )
    if not (clock and memory_clock and bits):
        return None
    operations = properties.multi_processor_count * clock * _HOPPER_OPERATIONS
    return float(operations / (2 * memory_clock * bits / 8))  # two bits per cycle and line
