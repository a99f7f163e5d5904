"""A computing warpgroup of the Hopper kernel: device code, in Gluon; see kernel.

It has the tuples of kernel, and:

    part        (row, whether it is there and not another warpgroup's, rows, stored): rows [R] that
                the epilogue takes at a time; 64, the last of those on the N side may have fewer
    state       (best, mass, counts), of a part
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fsbench.kernels.device.given import targets_of_rows
from fsbench.kernels.device.hopper_epilogue import consume, group_layout, parts_of, rows_first
from fsbench.kernels.device.hopper_mainloop import (
    first_of_tile,
    rows_of_part,
    rows_of_warpgroup,
    schedule,
    sizes_of_parts,
    skip_tile,
    tile_product,
    turned_product,
)
from fsbench.kernels.device.mass import mass_of_rows, no_mass, store_mass
from fsbench.kernels.device.rows import offsets_of_rows, seeds_of_rows, temperatures_of_rows
from fsbench.kernels.noise.keys import ordered_key


@gluon.jit
def _tile(
    ring, stage, phase, v0, parts, states, sizes, processing,
    N: gl.constexpr, NOISE: gl.constexpr, GREEDY_ROWS: gl.constexpr, WITH_MASS: gl.constexpr,
    ROWS_ON_N: gl.constexpr, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Let the next tile in the ring enter the states of this warpgroup's parts; see consume."""
    _, V, D, _, _, _ = sizes
    if ROWS_ON_N:
        products, stage, phase = turned_product(
            ring, stage, phase, D, WARPGROUP, BLOCK_D, STAGES
        )
        tiles = parts_of(products)
        v0 += WARPGROUP * 128
    else:
        product, stage, phase = tile_product(
            ring, stage, phase, D, WARPGROUP, WARPGROUPS, WIDTH, BLOCK_D, STAGES
        )
        tiles = (product,)
    after = ()
    for i in gl.static_range(len(parts)):
        logits = rows_first(tiles[i]) if ROWS_ON_N else tiles[i]
        if v0 + logits.shape[1] > V:
            offs_v = v0 + gl.arange(0, logits.shape[1], gl.SliceLayout(0, logits.type.layout))
            logits = gl.where((offs_v < V)[None, :], logits, float("-inf"))
        _, _, rows, stored = parts[i]
        best, mass, counts = states[i]
        after += (consume(
            logits, v0, rows, sizes, processing, stored, best, mass, counts,
            N, NOISE, GREEDY_ROWS, WITH_MASS,
        ),)  # fmt: skip
    return stage, phase, after


@gluon.jit
def _part(
    row, there, sizes, noise, scratch, scores, N: gl.constexpr, NOISE: gl.constexpr,
    SEED_PER_ROW: gl.constexpr, OFFSET_PER_ROW: gl.constexpr, TEMPERATURE_PER_ROW: gl.constexpr,
):  # fmt: skip
    """Rows [R] that a warpgroup has to itself: (part, the state before the first tile)."""
    R: gl.constexpr = row.shape[0]
    LAYOUT: gl.constexpr = group_layout(4, R)
    B, V, _, _, first_sample, samples = sizes
    seed_ptr, offset_ptr, temperature = noise
    _, _, _, logits_ptr, largest_ptr, stride = scratch
    entropy_ptr, ranking = scores
    stored = ()
    if len(logits_ptr) > 0:
        stored = (there[:, None], logits_ptr[0], largest_ptr, stride)
    column = row[:, None]
    in_batch = column < B
    offset = offsets_of_rows(
        offset_ptr[0] if len(offset_ptr) > 0 else None, column, in_batch, OFFSET_PER_ROW
    )
    T, inverse_temperature = temperatures_of_rows(
        temperature, column, in_batch, TEMPERATURE_PER_ROW
    )
    seed, noise_row = seeds_of_rows(seed_ptr, column, in_batch, SEED_PER_ROW)
    if NOISE == "given":
        seed = ()
        for i in gl.static_range(N):
            at = column.to(gl.int64) * samples + first_sample + i
            seed += (targets_of_rows(seed_ptr, at, in_batch, V),)
    limits = ()
    counts = ()
    if len(ranking) > 0:
        for i in gl.static_range(N):
            at = column.to(gl.int64) * samples + first_sample + i
            limits += (gl.load(ranking[1] + at, mask=in_batch, other=0.0),)
            counts += (gl.full([R, 4], 0, gl.int32, LAYOUT),)
    rows = (column, noise_row, seed, offset, T, inverse_temperature, limits)
    best = ()
    for _ in gl.static_range(N):
        best += ((
            gl.full([R, 4], float("-inf"), gl.float32, LAYOUT),
            gl.full([R, 4], 0, gl.int32, LAYOUT),
            gl.full([R, 4], 0.0, gl.float32, LAYOUT),
        ),)  # fmt: skip
    mass = no_mass(gl.full([R, 4], 0.0, gl.float32, LAYOUT), len(entropy_ptr) > 0)
    return (row, there, rows, stored), (best, mass, counts)


@gluon.jit
def _merge(
    part, state, number, numbers, B, first_sample, samples, scratch, scores, N: gl.constexpr
):
    """Leave what a warpgroup found for a part of its rows: as one of `numbers` who met them."""
    row, there, _, _ = part
    best, mass, counts = state
    keys_ptr, winners_ptr, masses_ptr, _, _, _ = scratch
    _, ranking = scores
    for i in gl.static_range(N):
        score, token, logit = best[i]
        candidate = ordered_key(gl.where(score == score, score, float("inf")), token)
        key = gl.max(candidate, axis=1)
        gl.atomic_max(keys_ptr + row * N + i, key, mask=there)
        if len(winners_ptr) > 0:
            # Candidates of a row differ in their token, so one is the best.
            mine = gl.where(candidate == key[:, None], logit, float("-inf"))
            at = winners_ptr[0] + (number * B + row) * N + i
            gl.store(at, gl.max(mine, axis=1), mask=there)
        if len(ranking) > 0:
            at = ranking[0] + row.to(gl.int64) * samples + first_sample + i
            gl.atomic_add(at, gl.sum(counts[i], axis=1), mask=there)
    if len(masses_ptr) > 0:
        store_mass(masses_ptr[0], mass_of_rows(mass), numbers, number, row, B, there)


@gluon.jit
def compute(
    ring, share, sizes, noise, processing, scratch, scores,
    N: gl.constexpr, NOISE: gl.constexpr, SEED_PER_ROW: gl.constexpr,
    OFFSET_PER_ROW: gl.constexpr, TEMPERATURE_PER_ROW: gl.constexpr, ROWS_ON_N: gl.constexpr,
    WARPGROUPS: gl.constexpr, BLOCK_V: gl.constexpr, CONTIGUOUS: gl.constexpr,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr,
    WARPGROUP: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: its rows' candidates and masses of all tiles of the program."""
    b0, pid_v, programs_v, first_token, num_tokens = share
    B, _, D, _, first_sample, samples = sizes
    _, _, masses_ptr, _, _, _ = scratch
    PARTS: gl.constexpr = sizes_of_parts(ROWS_ON_N)
    parts = ()
    states = ()
    for i in gl.static_range(len(PARTS)):
        if ROWS_ON_N:
            row, there = rows_of_part(b0, B, i, BOX, PARTS[i])
        else:
            row, there = rows_of_warpgroup(
                b0, B, WARPGROUP, BOX, BOXES, gl.SliceLayout(1, group_layout(4))
            )
        part, state = _part(
            row, there, sizes, noise, scratch, scores, N, NOISE, SEED_PER_ROW, OFFSET_PER_ROW,
            TEMPERATURE_PER_ROW,
        )  # fmt: skip
        parts += (part,)
        states += (state,)
    rounds, tail = schedule(num_tokens, programs_v, BLOCK_V)
    stage = 0
    phase = 0
    # With rows on the N side a warpgroup has 128 tokens of any tile, and one loop is less to compile.
    for r in range(rounds + (1 if ROWS_ON_N and BLOCK_V > 128 else 0)):
        row0 = first_of_tile(r, rounds, pid_v, programs_v, BLOCK_V, CONTIGUOUS)
        passes = False
        if ROWS_ON_N and BLOCK_V > 128:
            row0 = gl.where(r < rounds, row0, (tail + pid_v) * 128)
            passes = (r == rounds) & (WARPGROUP > 0)
        if row0 < num_tokens:
            if passes:
                stage, phase = skip_tile(ring, stage, phase, D, BLOCK_D, STAGES)
            else:
                stage, phase, states = _tile(
                    ring, stage, phase, first_token + row0, parts, states, sizes, processing, N,
                    NOISE, TEMPERATURE_PER_ROW, len(masses_ptr) > 0, ROWS_ON_N, WARPGROUP,
                    WARPGROUPS, BLOCK_V, BLOCK_D, STAGES,
                )  # fmt: skip
    if ROWS_ON_N == 0 and BLOCK_V > 128:
        row0 = (tail + pid_v) * 128
        if row0 < num_tokens:
            stage, phase, states = _tile(
                ring, stage, phase, first_token + row0, parts, states, sizes, processing, N, NOISE,
                TEMPERATURE_PER_ROW, len(masses_ptr) > 0, ROWS_ON_N, WARPGROUP, WARPGROUPS, 128,
                BLOCK_D, STAGES,
            )  # fmt: skip
    number = pid_v
    numbers = programs_v
    if ROWS_ON_N:  # its warpgroups meet the same rows
        number = pid_v * WARPGROUPS + WARPGROUP
        numbers = programs_v * WARPGROUPS
    for i in gl.static_range(len(PARTS)):
        _merge(
            parts[i], states[i], number, numbers, B, first_sample, samples, scratch, scores, N
        )
