"""The device a kernel runs on: CUDA, or the CPU where Triton's interpreter stands in for it."""

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
"""What devices are compared with: to ask one for its type makes a string, which takes longer."""

_CURRENT = nullcontext()
_binding = threading.RLock()
_INTERPRETED_MULTIPROCESSORS = 4  # enough for programs to share the work, few enough to be quick
_HOPPER_OPERATIONS = 4096  # of a multiprocessor in a cycle: bf16, dense, an addition is one


def runs_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels run on tensors of this device and dtype, if need be in the interpreter.

    Triton's interpreter is wrong in bf16.
    """
    if device.type == "cuda":
        return True
    return triton is not None and triton.knobs.runtime.interpret and dtype != torch.bfloat16


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the current one: Triton launches on that, not on the tensors' device."""
    if device == CPU or device.index == torch.cuda.current_device():
        return _CURRENT  # a device's context would cost some microseconds
    return torch.cuda.device(device)


def bind_and_launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> Any:
    """Launch a Triton or Gluon kernel on the current device; returns what Triton compiled.

    In the interpreter nothing is compiled, and None is returned. All launches of our kernels are
    made here, or repeat one that was (launch.launch_cache). So two things hold for all of them:

    - a product and a sum are fused into one operation, whatever the default of Triton's version
      (3.10 changes it): otherwise the bits of logits would depend on that version;
    - one thread at a time compiles, or interprets: Triton's interpreter has state of the process.
    """
    with _binding:
        return kernel[grid](*arguments, **named, enable_fp_fusion=True)


def stream_handle(device: torch.device) -> int:
    """The current stream of a GPU, as CUDA knows it; torch makes an object of it, more slowly."""
    handle: int = triton.runtime.driver.active.get_current_stream(device.index)
    return handle


def multiprocessors(device: torch.device) -> int:
    """How many programs run at a time, at one program per multiprocessor."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def operations_per_byte(device: torch.device) -> float | None:
    """bf16 operations of a Hopper GPU per byte that its memory delivers, at the highest clocks.

    None where torch does not tell the clocks.
    """
    found: Any = torch.cuda.get_device_properties(device)  # torch's types lack properties
    told = (
        getattr(found, name, None)
        for name in ("clock_rate", "memory_clock_rate", "memory_bus_width")
    )
    clock, memory_clock, bits = told
    if not (clock and memory_clock and bits):
        return None
    operations = found.multi_processor_count * clock * _HOPPER_OPERATIONS
    return float(operations / (2 * memory_clock * bits / 8))  # two bits per cycle and line
