"""Mean clock of the multiprocessors during a round, from their cycle counters.

NVML reports a clock between rounds only. Here each multiprocessor's cycle counter and the GPU's
nanosecond timer are read before a round and after it: cycles / time is the mean clock of the
round. Nothing runs in between, so no timed step is disturbed.
"""

from __future__ import annotations

from statistics import median

import torch
import triton
import triton.language as tl
from torch import Tensor

_SLOTS = 1024  # more than any GPU has multiprocessors


@triton.jit
def read_kernel(out_ptr, SLOTS: tl.constexpr):
    """Write (cycles, ns) of this program's multiprocessor to its place in out [SLOTS, 2] int64."""
    sm = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    cycles = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    ns = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    place = out_ptr + 2 * sm
    tl.store(place, cycles, mask=sm < SLOTS)
    tl.store(place + 1, ns, mask=sm < SLOTS)


class SmClock:
    """Reads the counters of the current CUDA device."""

    def __init__(self) -> None:
        device = torch.cuda.current_device()
        self._programs = 4 * torch.cuda.get_device_properties(device).multi_processor_count
        self.read()  # compiled now

    def read(self) -> Tensor:
        """Queue a reading on the current stream: [SLOTS, 2] int64, 0 where no program was."""
        counters = torch.zeros(_SLOTS, 2, dtype=torch.int64, device="cuda")
        read_kernel[(self._programs,)](out_ptr=counters, SLOTS=_SLOTS, num_warps=1)
        return counters


def mean_mhz(before: Tensor, after: Tensor) -> float | None:
    """Return the mean clock between two readings (median of SMs), None if unknown."""
    pairs = zip(before.tolist(), after.tolist(), strict=True)
    clocks = [
        1e3 * (to_cycles - cycles) / (to_ns - ns)
        for (cycles, ns), (to_cycles, to_ns) in pairs
        if 0 < ns < to_ns and 0 < cycles < to_cycles
    ]
    return median(clocks) if clocks else None
