"""Lower bound: read the weight once. No sampler that looks at every weight can be faster.

A persistent grid sums the weight. Each program takes every num_programs-th tile of consecutive
elements, brings it in by 16-byte asynchronous copies, several tiles ahead, and stores one partial
sum, which lets a test prove that every element was read.

By Little's law 4.5 TB/s at about 1 us of loaded latency needs 34 KB in flight on each SM of an
H200. Tiles of 16 KB, NUM_STAGES - 1 of them ahead in each of PROGRAMS_PER_SM programs, are 96 KB:
ample, and both programs still fit the 100 KB of shared memory of the smallest SMs since Ampere.
Asynchronous copies, because ptxas delays part of the plain loads until registers are free.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fsbench.problem import DTYPES, Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, Tensor

NUM_WARPS = 8
LOADS = 4
LOAD_BYTES = 16
NUM_STAGES = 4
PROGRAMS_PER_SM = 2


@triton.jit(do_not_specialize=["num_elements"])
def _weight_stream_kernel(
    weight_ptr,  # [num_elements], 16-byte aligned
    partial_ptr,  # [num_programs] fp32
    num_elements,
    LOADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Store the sum of tiles pid, pid + num_programs, ... of LOADS * BLOCK elements each."""
    TILE: tl.constexpr = LOADS * BLOCK
    num_elements = num_elements.to(tl.int64)  # V * D reaches 2^31
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    offs = tl.arange(0, LOADS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [LOADS, BLOCK]
    acc = tl.zeros([BLOCK], dtype=tl.float32)

    # Whole tiles carry no mask: one that depends on num_elements would split the 16-byte loads.
    num_whole = num_elements // TILE
    for tile in tl.range(pid, num_whole, num_programs, num_stages=NUM_STAGES):
        values = tl.load(weight_ptr + tile * TILE + offs)
        acc += tl.sum(values.to(tl.float32), axis=0)

    if pid == num_whole % num_programs:  # the next program in turn sums the partial tile
        for start in range(num_whole * TILE, num_elements, BLOCK):
            offs_tail = start + tl.arange(0, BLOCK)
            values = tl.load(weight_ptr + offs_tail, mask=offs_tail < num_elements, other=0.0)
            acc += values.to(tl.float32)

    tl.store(partial_ptr + pid, tl.sum(acc))


def weight_stream(weight: Tensor, partial: Tensor) -> Tensor:
    """Sum weight [V, D], contiguous, into partial [num_programs] fp32; return partial."""
    block = NUM_WARPS * 32 * LOAD_BYTES // weight.element_size()
    _weight_stream_kernel[(partial.numel(),)](
        weight,
        partial,
        weight.numel(),
        LOADS=LOADS,
        BLOCK=block,
        NUM_STAGES=NUM_STAGES,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return partial


def build(problem: Problem, weight: Tensor) -> Launch:
    import torch

    num_sms = torch.cuda.get_device_properties(weight.device).multi_processor_count
    partial = torch.empty(num_sms * PROGRAMS_PER_SM, dtype=torch.float32, device=weight.device)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        """Return the partial sums, not tokens."""
        return weight_stream(weight, partial)

    return launch


PROVIDER = Provider(
    name="weight_stream",
    label="Weight read once",
    kind=Kind.LOWER_BOUND,
    build=build,
    requires=("triton",),
    capabilities=Capabilities(dtypes=tuple(DTYPES), zero_temperature=True, host_sync_free=True),
    presets=("paper", "lean"),
)
