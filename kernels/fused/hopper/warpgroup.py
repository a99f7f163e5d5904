"""A computing warpgroup of the Hopper kernel in Gluon.

It uses the tuples of fused.hopper.kernel, and two more:

    part        (row, row mask, rows, stored) of its rows [ROWS]; the mask excludes repetitions.
                rows, stored: arguments of device.hopper_epilogue.consume
    state       (best, mass, counts), see device.hopper_epilogue.consume
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fsbench.kernels.device.hopper_epilogue import ROWS, consume, group_layout
from fsbench.kernels.device.hopper_mainloop import (
    PAIR,
    first_of_tile,
    rows_of_warpgroup,
    schedule,
    tile_product,
)
from fsbench.kernels.device.mass import mass_of_rows, no_mass, store_mass
from fsbench.kernels.device.rows import offsets_of_rows, seeds_of_rows, temperatures_of_rows
from fsbench.kernels.device.targets import targets_of_rows
from fsbench.kernels.noise.keys import ordered_key


@gluon.jit
def enter(
    logits, v0, part, state, sizes, processing,
    N: gl.constexpr, NOISE: gl.constexpr, GREEDY_ROWS: gl.constexpr, WITH_MASS: gl.constexpr,
):  # fmt: skip
    """Merge matmul results of tokens from v0 on, up to token V, into the state."""
    _, V, _, _, _, _ = sizes
    _, _, rows, stored = part
    best, mass, counts = state
    WIDTH: gl.constexpr = logits.shape[1]
    if v0 + WIDTH > V:
        offs_v = v0 + gl.arange(0, WIDTH, gl.SliceLayout(0, logits.type.layout))
        logits = gl.where((offs_v < V)[None, :], logits, float("-inf"))
    return consume(
        logits, v0, rows, sizes, processing, stored, best, mass, counts,
        N, NOISE, GREEDY_ROWS, WITH_MASS,
    )  # fmt: skip


@gluon.jit
def _tile(
    ring, stage, phase, v0, part, state, sizes, processing,
    N: gl.constexpr, NOISE: gl.constexpr, GREEDY_ROWS: gl.constexpr, WITH_MASS: gl.constexpr,
    WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, WIDTH: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, half, HALVES: gl.constexpr,
):  # fmt: skip
    """Compute WIDTH tokens of the next tile in the ring (all, or one of two halves) and merge them.

    Returns:
        (stage, phase, state).
    """
    _, _, D, _, _, _ = sizes
    logits, stage, phase = tile_product(
        ring, stage, phase, D, WARPGROUP, WARPGROUPS, WIDTH, BLOCK_D, STAGES, half, HALVES
    )
    state = enter(logits, v0, part, state, sizes, processing, N, NOISE, GREEDY_ROWS, WITH_MASS)
    return stage, phase, state


@gluon.jit
def begin(
    row, row_mask, sizes, noise, scratch, scores, N: gl.constexpr, NOISE: gl.constexpr,
    SEED_PER_ROW: gl.constexpr, OFFSET_PER_ROW: gl.constexpr, TEMPERATURE_PER_ROW: gl.constexpr,
):  # fmt: skip
    """Return (part, initial state) of the rows that `rows_of_warpgroup` returns."""
    COUNT: gl.constexpr = row.shape[0]
    LAYOUT: gl.constexpr = group_layout(4, COUNT)
    B, V, _, _, first_sample, samples = sizes
    seed_ptr, offset_ptr, temperature = noise
    _, _, _, logits_ptr, largest_ptr, stride = scratch
    entropy_ptr, ranking = scores
    stored = ()
    if len(logits_ptr) > 0:
        stored = (row_mask[:, None], logits_ptr[0], largest_ptr, stride)
    column = row[:, None]
    in_batch = column < B
    offset = offsets_of_rows(
        offset_ptr[0] if len(offset_ptr) > 0 else None, column, in_batch, OFFSET_PER_ROW
    )
    T, inverse_temperature = temperatures_of_rows(
        temperature, column, in_batch, TEMPERATURE_PER_ROW
    )
    seed, noise_row = seeds_of_rows(seed_ptr, column, in_batch, SEED_PER_ROW)
    if NOISE == "target":
        seed = ()
        for i in gl.static_range(N):
            offsets = column.to(gl.int64) * samples + first_sample + i
            seed += (targets_of_rows(seed_ptr, offsets, in_batch, V),)
    limits = ()
    counts = ()
    if len(ranking) > 0:
        for i in gl.static_range(N):
            offsets = column.to(gl.int64) * samples + first_sample + i
            limits += (gl.load(ranking[1] + offsets, mask=in_batch, other=0.0),)
            counts += (gl.full([COUNT, 4], 0, gl.int32, LAYOUT),)
    rows = (column, noise_row, seed, offset, T, inverse_temperature, limits)
    best = ()
    for _ in gl.static_range(N):
        best += ((
            gl.full([COUNT, 4], float("-inf"), gl.float32, LAYOUT),
            gl.full([COUNT, 4], 0, gl.int32, LAYOUT),
            gl.full([COUNT, 4], 0.0, gl.float32, LAYOUT),
        ),)  # fmt: skip
    mass = no_mass(gl.full([COUNT, 4], 0.0, gl.float32, LAYOUT), len(entropy_ptr) > 0)
    return (row, row_mask, rows, stored), (best, mass, counts)


@gluon.jit
def merge(part, state, slot, slots, sizes, scratch, scores, N: gl.constexpr):
    """Store the final state of the rows: keys, counts, and winners and masses in slot `slot`."""
    B, _, _, _, first_sample, samples = sizes
    row, row_mask, _, _ = part
    best, mass, counts = state
    keys_ptr, winners_ptr, masses_ptr, _, _, _ = scratch
    _, ranking = scores
    for i in gl.static_range(N):
        score, token, logit = best[i]
        candidate = ordered_key(gl.where(score == score, score, float("inf")), token)
        key = gl.max(candidate, axis=1)
        gl.atomic_max(keys_ptr + row * N + i, key, mask=row_mask, sem="relaxed")
        if len(winners_ptr) > 0:
            # Candidates of a row have different tokens, so exactly one is the best.
            winner_logit = gl.where(candidate == key[:, None], logit, float("-inf"))
            pointers = winners_ptr[0] + (slot * B + row) * N + i
            gl.store(pointers, gl.max(winner_logit, axis=1), mask=row_mask)
        if len(ranking) > 0:
            pointers = ranking[0] + row.to(gl.int64) * samples + first_sample + i
            gl.atomic_add(pointers, gl.sum(counts[i], axis=1), mask=row_mask, sem="relaxed")
    if len(masses_ptr) > 0:
        store_mass(masses_ptr[0], mass_of_rows(mass), slots, slot, row, B, row_mask)


@gluon.jit
def store_no_mass(part, slot, slots, B, scratch, scores):
    """Store the mass of nothing in slot `slot` of rows to which no program adds a mass there."""
    row, row_mask, _, _ = part
    _, _, masses_ptr, _, _, _ = scratch
    if len(masses_ptr) > 0:
        none = no_mass(gl.full([ROWS, 4], 0.0, gl.float32, group_layout(4)), len(scores[0]) > 0)
        store_mass(masses_ptr[0], mass_of_rows(none), slots, slot, row, B, row_mask)


@gluon.jit
def compute(
    ring, share, sizes, noise, processing, scratch, scores,
    N: gl.constexpr, NOISE: gl.constexpr, SEED_PER_ROW: gl.constexpr,
    OFFSET_PER_ROW: gl.constexpr, TEMPERATURE_PER_ROW: gl.constexpr, WARPGROUPS: gl.constexpr,
    PAIRED: gl.constexpr, BLOCK_V: gl.constexpr, CONTIGUOUS: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr, WARPGROUP: gl.constexpr,
):  # fmt: skip
    """Compute all tiles of the program for the rows of a warpgroup.

    For rows that two blocks of a pair share, each block computes half of each tile, and the first
    block also the tail.
    """
    b0, pid_v, programs_v, first_token, num_tokens = share
    _, _, masses_ptr, _, _, _ = scratch
    LAYOUT: gl.constexpr = gl.SliceLayout(1, group_layout(4))
    row, row_mask = rows_of_warpgroup(b0, sizes[0], WARPGROUP, PAIRED, BOX, BOXES, LAYOUT)
    SHARED: gl.constexpr = PAIRED and WARPGROUP == 2
    HALVES: gl.constexpr = 2 if SHARED else 1
    WIDTH: gl.constexpr = BLOCK_V // HALVES
    half = b0 % PAIR // (2 * ROWS) if SHARED else 0
    part, state = begin(
        row, row_mask, sizes, noise, scratch, scores, N, NOISE, SEED_PER_ROW, OFFSET_PER_ROW,
        TEMPERATURE_PER_ROW,
    )  # fmt: skip
    rounds, tail = schedule(num_tokens, programs_v, BLOCK_V)
    stage = 0
    phase = 0
    for r in range(rounds):
        row0 = first_of_tile(r, rounds, pid_v, programs_v, BLOCK_V, CONTIGUOUS)
        if row0 < num_tokens:
            stage, phase, state = _tile(
                ring, stage, phase, first_token + row0 + half * WIDTH, part, state, sizes,
                processing, N, NOISE, TEMPERATURE_PER_ROW, len(masses_ptr) > 0, WARPGROUP,
                WARPGROUPS, WIDTH, BLOCK_D, STAGES, half, HALVES,
            )  # fmt: skip
    if BLOCK_V > 128:
        row0 = (tail + pid_v) * 128
        if row0 < num_tokens:
            v0 = first_token + row0
            if SHARED:
                v0 = gl.where(half == 0, v0, gl.cdiv(sizes[1], 128) * 128)
            stage, phase, state = _tile(
                ring, stage, phase, v0, part, state, sizes, processing,
                N, NOISE, TEMPERATURE_PER_ROW, len(masses_ptr) > 0, WARPGROUP, WARPGROUPS, 128,
                BLOCK_D, STAGES, 0, HALVES,
            )  # fmt: skip
    if not PAIRED:
        merge(part, state, pid_v, programs_v, sizes, scratch, scores, N)
    else:
        merge(part, state, pid_v + half * programs_v, 2 * programs_v, sizes, scratch, scores, N)
        if not SHARED:
            store_no_mass(part, programs_v + pid_v, 2 * programs_v, sizes[0], scratch, scores)
