"""The Hopper screen: TMA, int8 wgmma and warp specialization, in Gluon.

A program has one loader warp (hopper.loader) and up to four warpgroups that compute. The loader
copies tiles of the int8 copy and of the codes of hidden into a ring of stages, and runs ahead while
the others record tokens that may win. A warpgroup has 32 rows of hidden, whose high and low bytes
are 64 rows of its instruction. Two warpgroups may have the same rows and half of a tile's tokens
each. All warpgroups run the same code: with a copy for each, a program would not fit into the
instruction cache.

The results are those of screened.portable, for requests without bias, mask and soft cap; other
requests run there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fsbench.kernels.configs.screen import HopperScreenConfig
from fsbench.kernels.device.hopper_epilogue import ROWS
from fsbench.kernels.device.hopper_mainloop import next_stage
from fsbench.kernels.device.mainloop import touch
from fsbench.kernels.device.rows import offsets_of_rows, seeds_of_rows
from fsbench.kernels.launch.launch_cache import Launch
from fsbench.kernels.launch.operands import Address
from fsbench.kernels.noise.contract import temperatures
from fsbench.kernels.screened.hopper.loader import COLUMNS, allocated_ring, load, tiles
from fsbench.kernels.screened.hopper.records import (
    leave_records,
    list_remaining,
    slots_of,
    word_layout,
)
from fsbench.kernels.screened.lower_bounds import (
    bound_of_word,
    local_bounds,
    raise_bounds,
    steps_of_rows,
)
from fsbench.kernels.screened.rounding import (
    both_bytes,
    round_claimed_rows,
    wait_for_rows,
)
from fsbench.kernels.screened.score_bounds import (
    ABSOLUTE_SLACK,
    LARGEST_TEMPERATURE,
    LOWEST_BOUND,
    ROUGH_SLACK,
    larger,
)

SCREEN_LOADER_REGISTERS = gl.constexpr(40)
FEW_TILES = gl.constexpr(6)
"""Tiles of a program below which it loads the rows' bounds again before it makes the lists."""


@gluon.constexpr_function
def _sums_layout(ROWS, SPLIT, N):
    """Return the layout of the sums of ROWS rows of hidden, by instructions for N tokens."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[ROWS // 8, SPLIT], instr_shape=[16, N, 32]
    )


@gluon.jit
def _screen(ring, share, request, vectors, state, sizes, NOISE: gl.constexpr,
            SEED_PER_ROW: gl.constexpr, OFFSET_PER_ROW: gl.constexpr,
            TEMPERATURE_PER_ROW: gl.constexpr, RANKS: gl.constexpr, ROOM: gl.constexpr,
            LIST: gl.constexpr, ROUNDED_AT_ONCE: gl.constexpr, ROWS: gl.constexpr,
            SPLIT: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_D: gl.constexpr,
            STAGES: gl.constexpr):  # fmt: skip
    """Run the computing warpgroups: the records and then the lists of the program's rows."""
    b0, pid_v, programs_v = share
    seed_ptr, offset_ptr, temperature, first_token, line = request
    (hidden_ptr, codes_ptr, numbers_ptr, counters_ptr, lower_ptr, listed_ptr, records_ptr, list_ptr,
     found_ptr) = state  # fmt: skip
    B, V, D, gamma, norm_inflation, root = sizes
    FLAT: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    cols = gl.arange(0, ROUNDED_AT_ONCE, FLAT)
    round_claimed_rows(
        hidden_ptr, codes_ptr, numbers_ptr, found_ptr, counters_ptr, cols, B, D, gamma,
        norm_inflation, root, True,
    )  # fmt: skip
    wait_for_rows(counters_ptr, B, True)
    SLOTS: gl.constexpr = slots_of(SPLIT)
    LAYOUT: gl.constexpr = word_layout(SLOTS, ROWS, SPLIT)
    rows = b0 + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    in_bounds = rows < B
    column = rows[:, None]
    offset = offsets_of_rows(
        offset_ptr[0] if len(offset_ptr) > 0 else None, column, column < B, OFFSET_PER_ROW
    )
    seed, row = seeds_of_rows(seed_ptr, column, column < B, SEED_PER_ROW)
    if TEMPERATURE_PER_ROW:
        T = gl.load(temperature + column, mask=in_bounds[:, None], other=0.0)
    else:
        T = (column * 0).to(gl.float32) + temperature
    T, inverse_temperature = temperatures(T)
    step = gl.load(numbers_ptr + rows, mask=in_bounds, other=0.0)[:, None]
    reach = gl.load(numbers_ptr + B + rows, mask=in_bounds, other=0.0)[:, None]
    spread = gl.load(numbers_ptr + 2 * B + rows, mask=in_bounds, other=0.0)[:, None]
    sane = T <= LARGEST_TEMPERATURE  # False for NaN
    extra = gl.where(sane, T * ROUGH_SLACK + 2 * ABSOLUTE_SLACK, float("inf"))
    T = gl.where(sane, T, 0.0)
    noise = (row, seed, offset)
    bounds = (T, inverse_temperature, extra, reach, spread)
    shared = (local_bounds(lower_ptr, line), steps_of_rows(rows, in_bounds, line), line)

    count = gl.full([ROWS, SLOTS], 0, gl.int32, LAYOUT)
    limit = gl.full([ROWS, SLOTS], LOWEST_BOUND, gl.float32, LAYOUT)
    records = records_ptr + (pid_v * B + rows).to(gl.int64) * (SLOTS * 2 * ROOM)
    position = (0, 0)
    slots = (limit, count)
    rounds, tail = tiles(share, V, BLOCK_V)
    has_tail = tail < V
    # From here on V and tokens refer to the whole vocabulary; all tiles are this rank's.
    first = 0
    if len(first_token) > 0:
        first = first_token[0]
        tail += first
        V += first
    for r in range(rounds):
        v0 = first + (pid_v + r * programs_v) * BLOCK_V
        position, slots = _screen_tile(
            ring, position, v0, shared, rows, step, vectors, noise, bounds, slots, records, B, V, D,
            NOISE, RANKS, ROOM, ROWS, SPLIT, BLOCK_V, BLOCK_D, STAGES,
        )  # fmt: skip
    if BLOCK_V > 128:  # noqa: SIM102 (one is decided at compile time)
        if has_tail:
            position, slots = _screen_tile(
                ring, position, tail, shared, rows, step, vectors, noise, bounds, slots, records, B,
                V, D, NOISE, RANKS, ROOM, ROWS, SPLIT, 128, BLOCK_D, STAGES,
            )  # fmt: skip
    # After more tiles the bound that the last tile began with is tight enough.
    list_remaining(
        rows, in_bounds, slots, rounds < FEW_TILES, records, shared[0], shared[1], listed_ptr,
        list_ptr, B, V, ROOM, LIST, ROWS, SPLIT,
    )  # fmt: skip


@gluon.jit
def _stage_before(stage, STAGES: gl.constexpr):
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _product(ring, position, D, ROWS: gl.constexpr, SPLIT: gl.constexpr, WIDTH: gl.constexpr,
             BLOCK_D: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Return (sums, position after it) of the next tile in the ring.

    sums: int32 [2 ROWS, WIDTH], of high and low bytes.
    """
    stage, phase = position
    weight_ring, codes_ring, loaded, free = ring
    CHUNKS: gl.constexpr = BLOCK_D // COLUMNS
    # An instruction on bytes has at most 128 tokens here. Warpgroups with the same rows share each
    # 128 tokens, as they share the words of records.leave_records.
    LAYOUT: gl.constexpr = _sums_layout(ROWS, SPLIT, min(WIDTH, 128) // SPLIT)
    sums = gl.zeros([2 * ROWS, WIDTH], gl.int32, LAYOUT)
    use_acc = False
    for d in range(0, D, BLOCK_D):
        mbarrier.wait(loaded.index(stage), phase)
        for i in gl.static_range(CHUNKS):
            sums = warpgroup_mma(
                codes_ring.index(stage * CHUNKS + i),
                weight_ring.index(stage * CHUNKS + i).slice(0, WIDTH, dim=0).permute((1, 0)),
                sums,
                use_acc=use_acc,
                is_async=True,
            )
            use_acc = True
        # The stage before is free while this one is multiplied.
        sums = warpgroup_mma_wait(num_outstanding=CHUNKS, deps=(sums,))
        if d > 0:
            mbarrier.arrive(free.index(_stage_before(stage, STAGES)), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    mbarrier.arrive(free.index(_stage_before(stage, STAGES)), count=1)
    return sums, (stage, phase)


@gluon.jit
def _screen_tile(ring, position, v0, shared, rows, step, vectors, noise, bounds, slots, records,
                 B, V, D, NOISE: gl.constexpr, RANKS: gl.constexpr, ROOM: gl.constexpr,
                 ROWS: gl.constexpr, SPLIT: gl.constexpr, WIDTH: gl.constexpr,
                 BLOCK_D: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Record the words of a tile of WIDTH tokens that may win; return (position, slots).

    shared: (lower_ptr, steps, line) of lower_bounds.raise_bounds.
    position: (stage, phase) of the ring. slots: (limit, count), as in leave_records.
    """
    in_bounds = rows < B
    limit, count = slots
    lower_ptr, steps, line = shared
    columns = gl.arange(0, WIDTH // 8, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) * 8
    ahead = gl.minimum(v0 + columns, V - 1)
    touch(vectors[0] + ahead, True)
    touch(vectors[1] + ahead, True)
    touch(vectors[2] + ahead, True)
    # Other programs raise the bound meanwhile; an older bound only records more tokens.
    word = gl.load(lower_ptr + rows, mask=in_bounds, other=0, volatile=True)
    sums, position = _product(ring, position, D, ROWS, SPLIT, WIDTH, BLOCK_D, STAGES)
    limit = larger(limit, bound_of_word(word, steps)[:, None])
    z = both_bytes(sums)
    SUMS: gl.constexpr = z.type.layout
    of_sums = gl.convert_layout(step, SUMS, assert_trivial=True)
    z = z * of_sums
    if v0 + WIDTH > V:
        token = v0 + gl.arange(0, WIDTH, gl.SliceLayout(0, SUMS))
        z = gl.where((token < V)[None, :], z, float("-inf"))
    limit, count = leave_records(
        z, v0, vectors, rows, noise, bounds, limit, count, records, B, V, NOISE, ROOM, ROWS, SPLIT,
    )  # fmt: skip
    raise_bounds(lower_ptr, rows, gl.max(limit, axis=1), in_bounds, steps, line, RANKS)
    return position, (limit, count)


@gluon.jit(do_not_specialize=["B", "V", "rank"])
def hopper_screen_kernel(
    hidden_ptr,  # this and what follows: as portable.screen_kernel
    codes_ptr,
    codes,  # descriptor of boxes [16 .. 64, COLUMNS]
    copy,  # descriptor of boxes [128, COLUMNS]
    scale_ptr,
    residual_ptr,
    norm_ptr,
    numbers_ptr,
    seed_ptr,
    offset_ptr,
    temperature,
    counters_ptr,
    lower_ptr,
    listed_ptr,
    records_ptr,  # [programs per block of rows, B, slots, ROOM, 2] int32, scratch
    list_ptr,
    found_ptr,
    B,
    V,  # of this rank
    D,
    gamma,
    norm_inflation,
    root,
    first_token,
    buffers_ptr,
    counts_ptr,
    rank,
    area,
    NOISE: gl.constexpr,
    SEED_PER_ROW: gl.constexpr,
    OFFSET_PER_ROW: gl.constexpr,
    TEMPERATURE_PER_ROW: gl.constexpr,
    RANKS: gl.constexpr,
    ROOM: gl.constexpr,
    LIST: gl.constexpr,
    ROUNDED_AT_ONCE: gl.constexpr,
    ROWS: gl.constexpr,  # rows of a program: 32 for each SPLIT warpgroups that compute
    SPLIT: gl.constexpr,  # warpgroups that share the tokens of a tile
    BLOCK_V: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):
    ring = allocated_ring(copy, codes, ROWS, BLOCK_V, BLOCK_D, STAGES)
    num_tiles_b = gl.cdiv(B, ROWS)
    b0 = gl.program_id(0) % num_tiles_b * ROWS
    share = (b0, gl.program_id(0) // num_tiles_b, gl.num_programs(0) // num_tiles_b)
    # What is absent is an empty tuple, as None cannot be in one.
    shard = () if first_token is None else (first_token,)
    line = () if buffers_ptr is None else (buffers_ptr, counts_ptr, rank, area)
    request = (seed_ptr, () if offset_ptr is None else (offset_ptr,), temperature, shard, line)
    if first_token is not None:  # index by token id
        scale_ptr -= first_token
        residual_ptr -= first_token
        norm_ptr -= first_token
    vectors = (scale_ptr, residual_ptr, norm_ptr, ())  # and no bias
    state = (hidden_ptr, codes_ptr, numbers_ptr, counters_ptr, lower_ptr, listed_ptr, records_ptr,
             list_ptr, found_ptr)  # fmt: skip
    sizes = (B, V, D, gamma, norm_inflation, root)
    gl.warp_specialize(
        [
            (_screen, (ring, share, request, vectors, state, sizes, NOISE, SEED_PER_ROW,
                       OFFSET_PER_ROW, TEMPERATURE_PER_ROW, RANKS, ROOM, LIST, ROUNDED_AT_ONCE,
                       ROWS, SPLIT, BLOCK_V, BLOCK_D, STAGES)),
            (load, (copy, codes, hidden_ptr, ring, share, counters_ptr, B, V, D, ROWS, BLOCK_V,
                    BLOCK_D, STAGES)),
        ],
        [1],
        [SCREEN_LOADER_REGISTERS],
    )  # fmt: skip


def prepare(
    grid: tuple[int], B: int, config: HopperScreenConfig, shared: dict[str, Any], tokens: int
) -> tuple[Launch, Callable[[Tensor, Tensor], tuple[Any, Any]]]:
    """Return the launch, and a function that makes kernel operands of (codes, copy).

    shared: arguments that the portable screen has, too. tokens: of this rank, or all.
    """
    box = min(ROWS.value, max(16, 2 * triton.next_power_of_2(B)))
    fixed = {
        **shared,
        "V": tokens,
        "ROWS": config.block_b,
        "SPLIT": config.split,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }
    launch = Launch(hopper_screen_kernel, grid, fixed)
    return launch, lambda codes, copy: (_boxes(codes, box), _boxes(copy, 128))


def _boxes(matrix: Tensor, rows: int) -> TensorDescriptor:
    return _descriptor(matrix.data_ptr(), *matrix.shape, rows)


@lru_cache(maxsize=4096)  # to check one takes longer than to find it
def _descriptor(address: int, rows: int, cols: int, box_rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    base = Address(address, torch.int8)
    return TensorDescriptor(base, [rows, cols], [cols, 1], [box_rows, COLUMNS.value], layout)
