"""Device code of FlashSampling for Hopper: TMA, wgmma and warp specialization, in Gluon.

A program has one warp that loads and one to three warpgroups that compute. The loader copies tiles
of weight and hidden into a ring of stages; each computing warpgroup multiplies its 64 rows of
hidden with all of a tile's tokens and then lets the logits enter its running candidates, while the
loader runs ahead. docs/kernel.md has a figure.

What the logits and the noise are, and what a program leaves behind, is that of
_flash_sampling_kernel, bit for bit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fsbench.kernels._epilogue import add_masses
from fsbench.kernels._exchange import best_of_ranks, mass_of_ranks
from fsbench.kernels._helper import (
    LOWEST_KEY,
    _log,
    nan_max,
    ordered_key,
    temperatures,
    token_of_key,
)
from fsbench.kernels._hopper_epilogue import ROWS, consume, group_layout
from fsbench.kernels._mainloop import first_column

# Triton 3.6 knows one of its names, 3.9 the other.
copy_to_shared = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

CHUNK = gl.constexpr(64)
"""Columns of a TMA box: 128 bytes, the widest that its swizzle takes."""
LOADER_REGISTERS = gl.constexpr(24)
SECOND_REGISTERS = gl.constexpr(232)
THIRD_REGISTERS = gl.constexpr(160)
"""Of a thread of the loading warp, of the second warpgroup of two, and of the second and third of
three; the first warpgroup gets the rest."""
AT_ONCE = gl.constexpr(16)
"""Programs whose masses a thread adds up at once."""


@gluon.constexpr_function
def _accumulator_layout(WIDTH):
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16]
    )


@gluon.constexpr_function
def _power_of_2(least):
    return 1 << (least - 1).bit_length()


@gluon.jit
def _next_stage(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wrap = stage == STAGES
    return gl.where(wrap, 0, stage), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def _first_row(b0, B, WARPGROUP: gl.constexpr):
    """Of a warpgroup. It repeats rows of others where its own would end beyond the batch.

    TMA takes longer for rows that are not there than for those that are.
    """
    return gl.minimum(b0 + WARPGROUP * ROWS, gl.maximum(B - ROWS, 0))


@gluon.jit
def _schedule(num_tokens, programs_v, BLOCK_V: gl.constexpr):
    """(rounds, first tail block): the rank's tokens as rounds of a tile per program, and a tail.

    With tiles of two blocks of 128 tokens, the blocks of a last round may be few enough for one
    each: then they are the tail, and program p has the block first + p of it.
    """
    blocks = gl.cdiv(num_tokens, 128)
    if BLOCK_V == 128:
        return gl.cdiv(blocks, programs_v), blocks
    else:
        rounds = blocks // (2 * programs_v)
        rest = blocks - rounds * 2 * programs_v
        rounds = gl.where(rest > programs_v, rounds + 1, rounds)
        return rounds, rounds * 2 * programs_v


@gluon.jit
def _first_of_tile(r, rounds, pid_v, programs_v, BLOCK_V: gl.constexpr, CONTIGUOUS: gl.constexpr):
    """The row of weight where a program's tile of round r begins."""
    if CONTIGUOUS:
        return (pid_v * rounds + r) * BLOCK_V
    else:
        return (r * programs_v + pid_v) * BLOCK_V


@gluon.jit
def _program_of(row, num_tokens, programs_v, BLOCK_V: gl.constexpr, CONTIGUOUS: gl.constexpr):
    """The program that meets the token of a row of weight."""
    rounds, tail = _schedule(num_tokens, programs_v, BLOCK_V)
    tile = row // BLOCK_V
    program = tile // gl.maximum(rounds, 1) if CONTIGUOUS else tile % programs_v
    return gl.where(row < tail * 128, program, row // 128 - tail)


@gluon.jit
def _load_tile(
    weight, hidden, ring, stage, phase, row0, v0, b0, B, D,
    WARPGROUPS: gl.constexpr, WIDTH: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy what a tile of WIDTH tokens needs into the ring, stage by stage as they become free.

    Its first row of weight, row0, is token v0.
    """
    weight_ring, hidden_ring, loaded, free = ring
    CHUNKS: gl.constexpr = BLOCK_D // CHUNK
    BOX: gl.constexpr = hidden.block_type.shape[0]
    BYTES: gl.constexpr = (
        WIDTH // 128 * weight.block_type.nbytes + WARPGROUPS * hidden.block_type.nbytes
    )
    d0 = first_column(v0, D)
    for _ in range(0, D, BLOCK_D):
        mbarrier.wait(free.index(stage), phase)
        bar = loaded.index(stage)
        # Boxes over the edge of a matrix are filled up with zeros, and count in full.
        mbarrier.expect(bar, CHUNKS * BYTES)
        for i in gl.static_range(CHUNKS):
            tile = weight_ring.index(stage * CHUNKS + i)
            for block in gl.static_range(WIDTH // 128):
                copy_to_shared(
                    weight, [row0 + block * 128, d0 + i * CHUNK], bar,
                    tile.slice(block * 128, 128, dim=0),
                )  # fmt: skip
        for i in gl.static_range(CHUNKS):
            for group in gl.static_range(WARPGROUPS):
                rows = hidden_ring.index((stage * CHUNKS + i) * WARPGROUPS + group)
                copy_to_shared(
                    hidden, [_first_row(b0, B, group), d0 + i * CHUNK], bar,
                    rows.slice(0, BOX, dim=0),
                )  # fmt: skip
        d0 += BLOCK_D
        d0 = gl.where(d0 >= D, 0, d0)
        stage, phase = _next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _load_tiles(
    weight, hidden, ring, share, B, D, WARPGROUPS: gl.constexpr, BLOCK_V: gl.constexpr,
    CONTIGUOUS: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp."""
    b0, pid_v, programs_v, first_token, num_tokens = share
    rounds, tail = _schedule(num_tokens, programs_v, BLOCK_V)
    stage = 0
    phase = 1
    for r in range(rounds):
        row0 = _first_of_tile(r, rounds, pid_v, programs_v, BLOCK_V, CONTIGUOUS)
        if row0 < num_tokens:
            stage, phase = _load_tile(
                weight, hidden, ring, stage, phase, row0, first_token + row0, b0, B, D,
                WARPGROUPS, BLOCK_V, BLOCK_D, STAGES,
            )  # fmt: skip
    if BLOCK_V > 128:
        row0 = (tail + pid_v) * 128
        if row0 < num_tokens:
            _load_tile(
                weight, hidden, ring, stage, phase, row0, first_token + row0, b0, B, D,
                WARPGROUPS, 128, BLOCK_D, STAGES,
            )  # fmt: skip


@gluon.jit
def _tile_logits(
    ring, stage, phase, D, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """This warpgroup's [ROWS, WIDTH] logits of the next tile in the ring, and where that ends."""
    weight_ring, hidden_ring, loaded, free = ring
    CHUNKS: gl.constexpr = BLOCK_D // CHUNK
    acc = gl.zeros([ROWS, WIDTH], gl.float32, _accumulator_layout(WIDTH))
    use_acc = False
    for _ in range(0, D, BLOCK_D):
        mbarrier.wait(loaded.index(stage), phase)
        for i in gl.static_range(CHUNKS):
            at = stage * CHUNKS + i
            acc = warpgroup_mma(
                hidden_ring.index(at * WARPGROUPS + WARPGROUP),
                weight_ring.index(at).slice(0, WIDTH, dim=0).permute((1, 0)),
                acc,
                use_acc=use_acc,
                is_async=True,
            )
            use_acc = True
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(free.index(stage), count=1)
        stage, phase = _next_stage(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def _tile(
    ring, stage, phase, v0, rows, sizes, processing, stored, best, largest, mass,
    N: gl.constexpr, NOISE: gl.constexpr, GREEDY_ROWS: gl.constexpr, WITH_MASS: gl.constexpr,
    WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, WIDTH: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Let the next tile in the ring enter the running candidates and masses; see consume."""
    _, V, D, _, _ = sizes
    logits, stage, phase = _tile_logits(
        ring, stage, phase, D, WARPGROUP, WARPGROUPS, WIDTH, BLOCK_D, STAGES
    )
    if v0 + WIDTH > V:
        offs_v = v0 + gl.arange(0, WIDTH, gl.SliceLayout(0, logits.type.layout))
        logits = gl.where((offs_v < V)[None, :], logits, float("-inf"))
    best, largest, mass = consume(
        logits, v0, rows, sizes, processing, stored, best, largest, mass,
        N, NOISE, GREEDY_ROWS, WITH_MASS,
    )  # fmt: skip
    return stage, phase, best, largest, mass


@gluon.jit
def _per_row(pointer, row, B, PER_ROW: gl.constexpr):
    """The value of each row, of row's shape; or the one for all of them, a scalar."""
    if PER_ROW:
        return gl.load(pointer + row, mask=row < B, other=0)
    else:
        return gl.load(pointer)


@gluon.jit
def _temperatures(temperature, row, B, PER_ROW: gl.constexpr):
    """(T, 1 / T) of each row; see _helper.temperatures."""
    T = gl.load(temperature + row, mask=row < B, other=0) if PER_ROW else temperature
    return temperatures(T)


@gluon.jit
def _compute(
    ring, share, sizes, noise, processing, scratch,
    N: gl.constexpr, NOISE: gl.constexpr, SEED_PER_ROW: gl.constexpr,
    OFFSET_PER_ROW: gl.constexpr, TEMPERATURE_PER_ROW: gl.constexpr, WARPGROUPS: gl.constexpr,
    BLOCK_V: gl.constexpr, CONTIGUOUS: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    WARPGROUP: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: its rows' candidates and masses of all tiles of the program."""
    b0, pid_v, programs_v, first_token, num_tokens = share
    B, _, _, _, _ = sizes
    seed_ptr, offset_ptr, temperature = noise
    keys_ptr, winners_ptr, masses_ptr, logits_ptr, largest_ptr, stride = scratch
    LAYOUT: gl.constexpr = group_layout(4)
    row = _first_row(b0, B, WARPGROUP) + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    there = (row < B) & (row >= b0 + WARPGROUP * ROWS)
    stored = ()
    if len(logits_ptr) > 0:
        stored = (there[:, None], logits_ptr[0], largest_ptr, stride)
    offset = gl.to_tensor(0).to(gl.int64)
    if len(offset_ptr) > 0:
        offset = _per_row(offset_ptr[0], row[:, None], B, OFFSET_PER_ROW)
    T, inverse_temperature = _temperatures(temperature, row[:, None], B, TEMPERATURE_PER_ROW)
    rows = (
        row[:, None],
        # A seed of its own identifies a request; else its row in the batch does.
        row[:, None] * 0 if SEED_PER_ROW else row[:, None],
        _per_row(seed_ptr, row[:, None], B, SEED_PER_ROW),
        offset,
        T,
        inverse_temperature,
    )
    best = ()
    for _ in gl.static_range(N):
        best += ((
            gl.full([ROWS, 4], float("-inf"), gl.float32, LAYOUT),
            gl.full([ROWS, 4], 0, gl.int32, LAYOUT),
            gl.full([ROWS, 4], 0.0, gl.float32, LAYOUT),
        ),)  # fmt: skip
    largest = gl.full([ROWS, 4], float("-inf"), gl.float32, LAYOUT)
    mass = gl.full([ROWS, 4], 0.0, gl.float32, LAYOUT)
    rounds, tail = _schedule(num_tokens, programs_v, BLOCK_V)
    stage = 0
    phase = 0
    for r in range(rounds):
        row0 = _first_of_tile(r, rounds, pid_v, programs_v, BLOCK_V, CONTIGUOUS)
        if row0 < num_tokens:
            stage, phase, best, largest, mass = _tile(
                ring, stage, phase, first_token + row0, rows, sizes, processing,
                stored, best, largest, mass, N, NOISE, TEMPERATURE_PER_ROW, len(masses_ptr) > 0,
                WARPGROUP, WARPGROUPS, BLOCK_V, BLOCK_D, STAGES,
            )  # fmt: skip
    if BLOCK_V > 128:
        row0 = (tail + pid_v) * 128
        if row0 < num_tokens:
            stage, phase, best, largest, mass = _tile(
                ring, stage, phase, first_token + row0, rows, sizes, processing,
                stored, best, largest, mass, N, NOISE, TEMPERATURE_PER_ROW, len(masses_ptr) > 0,
                WARPGROUP, WARPGROUPS, 128, BLOCK_D, STAGES,
            )  # fmt: skip

    for i in gl.static_range(N):
        score, token, logit = best[i]
        candidate = ordered_key(gl.where(score == score, score, float("inf")), token)
        key = gl.max(candidate, axis=1)
        gl.atomic_max(keys_ptr + row * N + i, key, mask=there)
        if len(winners_ptr) > 0:
            # Candidates of a row differ in their token, so one is the best.
            mine = gl.where(candidate == key[:, None], logit, float("-inf"))
            at = winners_ptr[0] + (pid_v * B + row) * N + i
            gl.store(at, gl.max(mine, axis=1), mask=there)
    if len(masses_ptr) > 0:
        row_largest = gl.reduce(largest, 1, nan_max)
        _, total = add_masses(row_largest[:, None], 0.0, largest, mass, inverse_temperature)
        at = masses_ptr[0] + pid_v * B + row
        gl.store(at, row_largest, mask=there)
        gl.store(at + programs_v * B, gl.sum(total, axis=1), mask=there)


@gluon.jit
def _log_mass(masses_ptr, programs_v, row, inverse_temperature, B, LAYOUT: gl.constexpr):
    """As _flash_sampling_kernel._log_mass. row: [R] in a slice of LAYOUT."""
    inverse = inverse_temperature
    if len(inverse.shape) > 0:
        inverse = inverse[:, None]
    idle = (row * 0).to(gl.float32)[:, None]
    program = gl.arange(0, AT_ONCE, gl.SliceLayout(0, LAYOUT))[None, :]
    mass = idle + (program * 0).to(gl.float32)
    largest = mass - float("inf")
    for first in range(0, programs_v, AT_ONCE):
        at = masses_ptr + (first + program) * B + row[:, None]
        there = (first + program < programs_v) & (row < B)[:, None]
        m = gl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
        s = gl.load(at + programs_v * B, mask=there, other=0.0, cache_modifier=".cg")
        largest, mass = add_masses(largest, mass, m, s, inverse)
    row_largest = gl.reduce(largest, 1, nan_max)
    _, total = add_masses(row_largest[:, None], 0.0, largest, mass, inverse)
    return row_largest, _log(gl.maximum(gl.sum(total, axis=1), 1.0))


@gluon.jit
def _finish(
    share, temperature, keys_ptr, winners_ptr, masses_ptr, tokens_ptr, valid_ptr, logprob_ptr,
    logz_ptr, line, B, samples, first_sample, N: gl.constexpr, TEMPERATURE_PER_ROW: gl.constexpr,
    RANKS: gl.constexpr, WATCH: gl.constexpr, BLOCK_B: gl.constexpr, BLOCK_V: gl.constexpr,
    CONTIGUOUS: gl.constexpr,
):  # fmt: skip
    """The last program of a block of rows: decode its tokens, reset the workspace."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, AT_ONCE], [32, 1], [4, 1], [1, 0])
    b0, _, programs_v, first_token, num_tokens = share
    SPAN: gl.constexpr = _power_of_2(BLOCK_B)
    row = b0 + gl.arange(0, SPAN, gl.SliceLayout(1, LAYOUT))
    there = row < B
    if SPAN > BLOCK_B:
        there &= row < b0 + BLOCK_B
    if masses_ptr is not None:
        _, inverse_temperature = _temperatures(temperature, row, B, TEMPERATURE_PER_ROW)
        largest, log_mass = _log_mass(masses_ptr, programs_v, row, inverse_temperature, B, LAYOUT)
        if RANKS > 1:
            largest, log_mass = mass_of_ranks(
                largest, log_mass, inverse_temperature, row, there, line, RANKS, WATCH
            )
    for i in gl.static_range(N):
        at = row * N + i
        lowest = row.to(gl.int64) * 0 + LOWEST_KEY
        key = gl.atomic_xchg(keys_ptr + at, lowest, mask=there)
        chosen = ()
        if winners_ptr is not None:
            token = token_of_key(key)
            source = _program_of(token - first_token, num_tokens, programs_v, BLOCK_V, CONTIGUOUS)
            winner = winners_ptr + (source * B + row) * N + i
            drawn = there & (token >= 0)
            logit = gl.load(winner, mask=drawn, other=float("nan"), cache_modifier=".cg")
            chosen = (logit,)
        if RANKS > 1:
            key, chosen = best_of_ranks(key, chosen, at, there, line, RANKS, WATCH)
        token = token_of_key(key)
        out = row.to(gl.int64) * samples + first_sample + i
        gl.store(tokens_ptr + out, key if RANKS == 0 else token.to(gl.int64), mask=there)
        if logprob_ptr is not None:
            logprob = (chosen[0] - largest) * inverse_temperature - log_mass
            logprob = gl.where(token >= 0, logprob, float("nan"))
            gl.store(logprob_ptr + out, logprob, mask=there)
        if i == 0:  # whether a row has a draw is the same for all of its samples
            gl.store(valid_ptr + row, token >= 0, mask=there)
            if logz_ptr is not None:
                logz = gl.where(token >= 0, largest * inverse_temperature + log_mass, float("nan"))
                gl.store(logz_ptr + row, logz, mask=there)


@gluon.jit(do_not_specialize=["B", "V", "first_sample", "num_tokens", "rank"])
def hopper_kernel(
    hidden,  # [B, D] descriptor of boxes [8 .. 64, CHUNK]
    weight,  # [>= num_tokens, D] descriptor of boxes [128, CHUNK]
    seed_ptr,  # this and what follows: as flash_sampling_kernel
    offset_ptr,
    temperature,
    soft_cap,
    bias_ptr,
    row_bias_ptr,
    mask_ptr,
    keys_ptr,
    arrivals_ptr,
    winners_ptr,
    masses_ptr,
    tokens_ptr,
    valid_ptr,
    logprob_ptr,
    logz_ptr,
    logits_ptr,
    largest_ptr,
    stride,
    B,
    V,
    D,
    mask_words,
    samples,
    first_sample,
    first_token,
    num_tokens,
    buffers_ptr,
    counts_ptr,
    rank,
    area,
    N: gl.constexpr,
    NOISE: gl.constexpr,  # "group" or "none" (greedy)
    SEED_PER_ROW: gl.constexpr,
    OFFSET_PER_ROW: gl.constexpr,
    TEMPERATURE_PER_ROW: gl.constexpr,
    RANKS: gl.constexpr,
    WATCH: gl.constexpr,
    WARPGROUPS: gl.constexpr,  # that compute
    BLOCK_V: gl.constexpr,
    CONTIGUOUS: gl.constexpr,  # the tiles of a program are neighbours, not programs apart
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):
    BLOCK_B: gl.constexpr = WARPGROUPS * ROWS
    CHUNKS: gl.constexpr = BLOCK_D // CHUNK
    weight_ring = gl.allocate_shared_memory(
        weight.dtype, [STAGES * CHUNKS, BLOCK_V, CHUNK], weight.layout
    )
    hidden_ring = gl.allocate_shared_memory(
        hidden.dtype, [STAGES * CHUNKS * WARPGROUPS, ROWS, CHUNK], hidden.layout
    )
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(free.index(i), count=WARPGROUPS)
    fence_async_shared()

    num_tiles_b = gl.cdiv(B, BLOCK_B)
    pid_b = gl.program_id(0) % num_tiles_b
    pid_v = gl.program_id(0) // num_tiles_b
    programs_v = gl.num_programs(0) // num_tiles_b
    b0 = pid_b * BLOCK_B
    # What is absent is an empty tuple, as None cannot be in one.
    ring = (weight_ring, hidden_ring, loaded, free)
    share = (b0, pid_v, programs_v, first_token, num_tokens)
    sizes = (B, V, D, mask_words, first_sample)
    noise = (seed_ptr, () if offset_ptr is None else (offset_ptr,), temperature)
    processing = (
        () if soft_cap is None else (soft_cap,),
        () if bias_ptr is None else (bias_ptr,),
        () if row_bias_ptr is None else (row_bias_ptr,),
        () if mask_ptr is None else (mask_ptr,),
    )
    scratch = (
        keys_ptr,
        () if winners_ptr is None else (winners_ptr,),
        () if masses_ptr is None else (masses_ptr,),
        () if logits_ptr is None else (logits_ptr,),
        () if largest_ptr is None else (largest_ptr,),
        stride,
    )
    if WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (_compute, (ring, share, sizes, noise, processing, scratch, N, NOISE, SEED_PER_ROW,
                            OFFSET_PER_ROW, TEMPERATURE_PER_ROW, WARPGROUPS, BLOCK_V,
                            CONTIGUOUS, BLOCK_D, STAGES, 0)),
                (_compute, (ring, share, sizes, noise, processing, scratch, N, NOISE, SEED_PER_ROW,
                            OFFSET_PER_ROW, TEMPERATURE_PER_ROW, WARPGROUPS, BLOCK_V,
                            CONTIGUOUS, BLOCK_D, STAGES, 1)),
                (_compute, (ring, share, sizes, noise, processing, scratch, N, NOISE, SEED_PER_ROW,
                            OFFSET_PER_ROW, TEMPERATURE_PER_ROW, WARPGROUPS, BLOCK_V,
                            CONTIGUOUS, BLOCK_D, STAGES, 2)),
                (_load_tiles, (weight, hidden, ring, share, B, D, WARPGROUPS, BLOCK_V,
                               CONTIGUOUS, BLOCK_D, STAGES)),
            ],
            [4, 4, 1],
            [THIRD_REGISTERS, THIRD_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (ring, share, sizes, noise, processing, scratch, N, NOISE, SEED_PER_ROW,
                            OFFSET_PER_ROW, TEMPERATURE_PER_ROW, WARPGROUPS, BLOCK_V,
                            CONTIGUOUS, BLOCK_D, STAGES, 0)),
                (_compute, (ring, share, sizes, noise, processing, scratch, N, NOISE, SEED_PER_ROW,
                            OFFSET_PER_ROW, TEMPERATURE_PER_ROW, WARPGROUPS, BLOCK_V,
                            CONTIGUOUS, BLOCK_D, STAGES, 1)),
                (_load_tiles, (weight, hidden, ring, share, B, D, WARPGROUPS, BLOCK_V,
                               CONTIGUOUS, BLOCK_D, STAGES)),
            ],
            [4, 1],
            [SECOND_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (ring, share, sizes, noise, processing, scratch, N, NOISE, SEED_PER_ROW,
                            OFFSET_PER_ROW, TEMPERATURE_PER_ROW, WARPGROUPS, BLOCK_V,
                            CONTIGUOUS, BLOCK_D, STAGES, 0)),
                (_load_tiles, (weight, hidden, ring, share, B, D, WARPGROUPS, BLOCK_V,
                               CONTIGUOUS, BLOCK_D, STAGES)),
            ],
            [1],
            [LOADER_REGISTERS],
        )  # fmt: skip

    # All warpgroups have merged their candidates before the program's arrival is counted.
    if gl.atomic_add(arrivals_ptr + pid_b, 1) == programs_v - 1:
        gl.atomic_xchg(arrivals_ptr + pid_b, 0)
        line = () if buffers_ptr is None else (buffers_ptr, counts_ptr, rank, area)
        _finish(
            share, temperature, keys_ptr, winners_ptr, masses_ptr, tokens_ptr, valid_ptr,
            logprob_ptr, logz_ptr, line, B, samples, first_sample, N, TEMPERATURE_PER_ROW,
            RANKS, WATCH, BLOCK_B, BLOCK_V, CONTIGUOUS,
        )  # fmt: skip
