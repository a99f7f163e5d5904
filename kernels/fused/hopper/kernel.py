"""The Hopper kernel in Gluon: TMA, wgmma and warp specialization.

A program has one loading warp and one to three computing warpgroups. The loading warp copies tiles
of weight and hidden into a ring buffer. Each computing warpgroup multiplies its 64 rows of hidden
with a tile's tokens and merges the logits into its running candidates while the loads run ahead.
docs/design/kernels.md has a figure.

Logits, noise and the contents of the workspace are bitwise those of fused.portable.

Functions pass tuples on. An absent element is (), because a tuple cannot contain None:

    ring        (tiles of weight, tiles of hidden, (tiles of extra rows,),
                barriers of loaded and of free stages)
    share       (first row, index among the programs of these rows, number of these programs,
                first token, number of tokens of this rank)
    sizes       (B, V, D, mask_words, first_sample, samples)
    noise       (seed_ptr, (offset_ptr,), temperature)
    processing  ((soft_cap,), (bias_ptr,), (row_bias_ptr,), (mask_ptr,))
    scratch     (keys_ptr, (winners_ptr,), (masses_ptr,), (logits_ptr,), (largest_ptr,), stride)
    scores      (entropy_ptr,), (rank_ptr, limits_ptr)
    handing     (sums_ptr, flags_ptr): partial sums of split blocks, see fused.hopper.split
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fsbench.kernels.device.hopper_epilogue import ROWS
from fsbench.kernels.device.hopper_mainloop import (
    PAIR,
    allocated_ring,
    first_block_row,
    load_tiles,
    program_of,
    schedule,
)
from fsbench.kernels.device.mass import (
    entropy_of_mass,
    log_of_mass,
    log_probability,
    mass_of_programs,
)
from fsbench.kernels.device.rows import temperatures_of_rows
from fsbench.kernels.device.targets import scored, store_rank
from fsbench.kernels.device.team_mass import TEAM, arrive_in_team
from fsbench.kernels.fused.hopper.mixed import compute_mixed
from fsbench.kernels.fused.hopper.quantized import (
    COLUMNS,
    compute_bytes,
    load_bytes,
    ring_of_bytes,
    share_of_blocks,
    sums_of_program,
)
from fsbench.kernels.fused.hopper.split import compute_pieces, load_pieces, program_of_block
from fsbench.kernels.fused.hopper.warpgroup import compute
from fsbench.kernels.noise.keys import LOWEST_KEY, token_of_key
from fsbench.kernels.shard.exchange import best_of_ranks, mass_of_ranks

LOADER_REGISTERS = gl.constexpr(24)
"""Registers of a thread of the loading warp."""
SECOND_OF_TWO = gl.constexpr(232)
"""Registers of a thread of the second warpgroup of two; the first gets the remaining ones."""
OTHERS_OF_THREE = gl.constexpr(160)
"""Registers of a thread of the second and the third warpgroup of three."""
MASSES_AT_ONCE = gl.constexpr(8)
"""Masses that a thread keeps in registers while it adds up those of programs or teams."""


@gluon.constexpr_function
def _power_of_2(least):
    return 1 << (least - 1).bit_length()


@gluon.jit
def _rows_of_block(b0, B, BLOCK_B: gl.constexpr):
    """Return (rows of a block, which of them exist, numbers of masses that are added at once)."""
    SPAN: gl.constexpr = _power_of_2(BLOCK_B)
    AT_ONCE: gl.constexpr = MASSES_AT_ONCE * 128 // max(128, SPAN)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, AT_ONCE], [32, 1], [4, 1], [1, 0])
    row = b0 + gl.arange(0, SPAN, gl.SliceLayout(1, LAYOUT))
    mask = row < B
    if SPAN > BLOCK_B:
        mask &= row < b0 + BLOCK_B
    return row, mask, gl.arange(0, AT_ONCE, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _finish(
    share, targets_ptr, temperature, keys_ptr, winners_ptr, team_masses_ptr, tokens_ptr, valid_ptr,
    logprob_ptr, logz_ptr, scores, line, B, V, D, samples, first_sample, N: gl.constexpr,
    NOISE: gl.constexpr, TEMPERATURE_PER_ROW: gl.constexpr, RANKS: gl.constexpr,
    WATCH: gl.constexpr, BLOCK_B: gl.constexpr, BLOCK_V: gl.constexpr, CONTIGUOUS: gl.constexpr,
    BLOCK_D: gl.constexpr, SPLIT: gl.constexpr, PAIRED: gl.constexpr, EXTRA_ROWS: gl.constexpr,
    QUANTIZED: gl.constexpr,
):  # fmt: skip
    """Decode the tokens of a block of rows and reset the workspace, in the block's last program."""
    b0, _, programs_v, first_token, num_tokens = share
    entropy_ptr, ranking = scores
    row, mask, at_once = _rows_of_block(b0, B, BLOCK_B)
    if team_masses_ptr is not None:
        _, inverse_temperature = temperatures_of_rows(
            temperature, row, row < B, TEMPERATURE_PER_ROW
        )
        teams = gl.cdiv(programs_v, TEAM)
        MOMENT: gl.constexpr = len(entropy_ptr) > 0
        mass = mass_of_programs(team_masses_ptr, teams, at_once, row, B, MOMENT)
        if RANKS > 1:
            mass = mass_of_ranks(mass, row, mask, line, RANKS, WATCH)
    for i in gl.static_range(N):
        offsets = row * N + i
        lowest = row.to(gl.int64) * 0 + LOWEST_KEY
        key = gl.atomic_xchg(keys_ptr + offsets, lowest, mask=mask, sem="relaxed")
        chosen = ()
        if winners_ptr is not None:
            token = token_of_key(key)
            local_token = token - first_token
            if QUANTIZED:
                source = program_of_block(
                    local_token // 256, share_of_blocks(share)[4], programs_v, D, COLUMNS
                )
                source += local_token // 128 % 2 * programs_v
            elif SPLIT:
                source = program_of_block(local_token // 128, num_tokens, programs_v, D, BLOCK_D)
            else:
                source = program_of(local_token, num_tokens, programs_v, BLOCK_V, CONTIGUOUS)
            if PAIRED or EXTRA_ROWS > 0:
                _, tail = schedule(num_tokens, programs_v, BLOCK_V)
                second = (
                    (row - b0 >= (4 * ROWS if PAIRED else 2 * ROWS))
                    & (local_token // 128 % 2 == 1)
                    & (local_token < tail * 128)
                )
                source = gl.where(second, programs_v + source, source)
            winner = winners_ptr + (source * B + row) * N + i
            drawn = mask & (token >= 0)
            logit = gl.load(winner, mask=drawn, other=float("nan"), cache_modifier=".cg")
            chosen = (logit,)
        if RANKS > 1:
            key, chosen = best_of_ranks(key, chosen, offsets, mask, line, RANKS, WATCH)
        token = token_of_key(key)
        out = row.to(gl.int64) * samples + first_sample + i
        gl.store(tokens_ptr + out, key if RANKS == 0 else token.to(gl.int64), mask=mask)
        if logprob_ptr is not None:
            logprob = log_probability(chosen[0], mass, inverse_temperature)
            if NOISE == "target":
                logprob, valid = scored(targets_ptr, out, mask, token, logprob, V)
                gl.store(valid_ptr + out, valid, mask=mask)
            else:
                logprob = gl.where(token >= 0, logprob, float("nan"))
            gl.store(logprob_ptr + out, logprob, mask=mask)
        if len(ranking) > 0:
            store_rank(*ranking, targets_ptr, out, mask, token, chosen[0], V)
        if i == 0:  # all samples of a row are valid, or none is
            if NOISE != "target":
                gl.store(valid_ptr + row, token >= 0, mask=mask)
            if logz_ptr is not None:
                logz = gl.where(token >= 0, log_of_mass(mass), float("nan"))
                gl.store(logz_ptr + row, logz, mask=mask)
            if len(entropy_ptr) > 0:
                entropy = gl.where(token >= 0, entropy_of_mass(mass), float("nan"))
                gl.store(entropy_ptr[0] + row, entropy, mask=mask)


@gluon.jit(do_not_specialize=["B", "V", "first_sample", "num_tokens", "rank"])
def hopper_kernel(
    hidden,  # [B, D] descriptor of boxes [8 .. 64, CHUNK]
    weight,  # [>= num_tokens, D] descriptor of boxes [128, CHUNK]; [128, 2 CHUNK] of one byte
    scale_ptr,
    seed_ptr,  # this and the following: see flash_sampling_kernel
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
    team_masses_ptr,
    sums_ptr,  # fp32, workspace: partial sums (see split); None: no block is split
    tokens_ptr,
    valid_ptr,
    logprob_ptr,
    logz_ptr,
    entropy_ptr,
    rank_ptr,
    limits_ptr,
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
    NOISE: gl.constexpr,
    SCALE_PER_ROW: gl.constexpr,
    SEED_PER_ROW: gl.constexpr,
    OFFSET_PER_ROW: gl.constexpr,
    TEMPERATURE_PER_ROW: gl.constexpr,
    RANKS: gl.constexpr,
    WATCH: gl.constexpr,
    WARPGROUPS: gl.constexpr,  # computing warpgroups
    PAIRED: gl.constexpr,  # two blocks share the rows of their third warpgroup
    EXTRA_ROWS: gl.constexpr,  # rows of a block beyond those of its two warpgroups (see mixed)
    BOXES: gl.constexpr,  # TMA boxes of hidden for the rows of a warpgroup
    BLOCK_V: gl.constexpr,
    CONTIGUOUS: gl.constexpr,  # a program's tiles are neighbors; else they are strided
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):
    QUANTIZED: gl.constexpr = scale_ptr is not None
    BLOCKS: gl.constexpr = 2 if PAIRED else 1
    BOX: gl.constexpr = hidden.block_type.shape[0]
    SETS: gl.constexpr = 2 if BOX == ROWS else 1
    OF_WARPGROUPS: gl.constexpr = WARPGROUPS * ROWS + EXTRA_ROWS
    BLOCK_B: gl.constexpr = SETS * ROWS if QUANTIZED else PAIR if PAIRED else OF_WARPGROUPS
    SPLIT: gl.constexpr = sums_ptr is not None
    if QUANTIZED:
        ring = ring_of_bytes(weight, hidden, SETS * BOX * BOXES, STAGES)
    else:
        ring = allocated_ring(weight, hidden, WARPGROUPS, EXTRA_ROWS, BLOCK_V, BLOCK_D, STAGES)
    num_tiles_b = gl.cdiv(B, BLOCK_B) * BLOCKS
    pid_b = gl.program_id(0) % num_tiles_b
    pid_v = gl.program_id(0) // num_tiles_b
    programs_v = gl.num_programs(0) // num_tiles_b
    b0 = first_block_row(pid_b, BLOCK_B, PAIRED)
    share = (b0, pid_v, programs_v, first_token, num_tokens)
    sizes = (B, V, D, mask_words, first_sample, samples)
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
    scores = (
        () if entropy_ptr is None else (entropy_ptr,),
        () if rank_ptr is None else (rank_ptr, limits_ptr),
    )
    if QUANTIZED:
        # The flags are behind the counters.
        handing = sums_of_program(
            sums_ptr, arrivals_ptr + num_tiles_b, pid_b * programs_v, SETS * BOX * BOXES
        )
        scales = (scale_ptr,)
        gl.warp_specialize(
            [
                (compute_bytes, (ring, share, sizes, noise, processing, scratch, scores, handing,
                                 scales, N, NOISE, SEED_PER_ROW, OFFSET_PER_ROW,
                                 TEMPERATURE_PER_ROW, SCALE_PER_ROW, STAGES, SETS, BOX, BOXES, 0)),
                (compute_bytes, (ring, share, sizes, noise, processing, scratch, scores, handing,
                                 scales, N, NOISE, SEED_PER_ROW, OFFSET_PER_ROW,
                                 TEMPERATURE_PER_ROW, SCALE_PER_ROW, STAGES, SETS, BOX, BOXES, 1)),
                (load_bytes, (weight, hidden, ring, share, B, D, SETS, BOXES, STAGES)),
            ],
            [4, 1],
            [SECOND_OF_TWO, LOADER_REGISTERS],
        )  # fmt: skip
    elif EXTRA_ROWS > 0:
        gl.warp_specialize(
            [
                (compute_mixed, (ring, share, sizes, noise, processing, scratch, scores, N, NOISE,
                                 SEED_PER_ROW, OFFSET_PER_ROW, TEMPERATURE_PER_ROW, BLOCK_V,
                                 CONTIGUOUS, BLOCK_D, STAGES, EXTRA_ROWS, 0)),
                (compute_mixed, (ring, share, sizes, noise, processing, scratch, scores, N, NOISE,
                                 SEED_PER_ROW, OFFSET_PER_ROW, TEMPERATURE_PER_ROW, BLOCK_V,
                                 CONTIGUOUS, BLOCK_D, STAGES, EXTRA_ROWS, 1)),
                (load_tiles, (weight, hidden, ring, share, B, D, WARPGROUPS, PAIRED, EXTRA_ROWS,
                              BOXES, BLOCK_V, CONTIGUOUS, BLOCK_D, STAGES)),
            ],
            [4, 1],
            [SECOND_OF_TWO, LOADER_REGISTERS],
        )  # fmt: skip
    elif WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (compute, (ring, share, sizes, noise, processing, scratch, scores, N, NOISE,
                           SEED_PER_ROW, OFFSET_PER_ROW, TEMPERATURE_PER_ROW, WARPGROUPS, PAIRED,
                           BLOCK_V, CONTIGUOUS, BLOCK_D, STAGES, BOX, BOXES, 0)),
                (compute, (ring, share, sizes, noise, processing, scratch, scores, N, NOISE,
                           SEED_PER_ROW, OFFSET_PER_ROW, TEMPERATURE_PER_ROW, WARPGROUPS, PAIRED,
                           BLOCK_V, CONTIGUOUS, BLOCK_D, STAGES, BOX, BOXES, 1)),
                (compute, (ring, share, sizes, noise, processing, scratch, scores, N, NOISE,
                           SEED_PER_ROW, OFFSET_PER_ROW, TEMPERATURE_PER_ROW, WARPGROUPS, PAIRED,
                           BLOCK_V, CONTIGUOUS, BLOCK_D, STAGES, BOX, BOXES, 2)),
                (load_tiles, (weight, hidden, ring, share, B, D, WARPGROUPS, PAIRED, EXTRA_ROWS,
                              BOXES, BLOCK_V, CONTIGUOUS, BLOCK_D, STAGES)),
            ],
            [4, 4, 1],
            [OTHERS_OF_THREE, OTHERS_OF_THREE, LOADER_REGISTERS],
        )  # fmt: skip
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (compute, (ring, share, sizes, noise, processing, scratch, scores, N, NOISE,
                           SEED_PER_ROW, OFFSET_PER_ROW, TEMPERATURE_PER_ROW, WARPGROUPS, PAIRED,
                           BLOCK_V, CONTIGUOUS, BLOCK_D, STAGES, BOX, BOXES, 0)),
                (compute, (ring, share, sizes, noise, processing, scratch, scores, N, NOISE,
                           SEED_PER_ROW, OFFSET_PER_ROW, TEMPERATURE_PER_ROW, WARPGROUPS, PAIRED,
                           BLOCK_V, CONTIGUOUS, BLOCK_D, STAGES, BOX, BOXES, 1)),
                (load_tiles, (weight, hidden, ring, share, B, D, WARPGROUPS, PAIRED, EXTRA_ROWS,
                              BOXES, BLOCK_V, CONTIGUOUS, BLOCK_D, STAGES)),
            ],
            [4, 1],
            [SECOND_OF_TWO, LOADER_REGISTERS],
        )  # fmt: skip
    elif SPLIT:
        handing = (sums_ptr, arrivals_ptr + 1)  # the flags are behind the one counter
        gl.warp_specialize(
            [
                (compute_pieces, (ring, share, sizes, noise, processing, scratch, scores, handing,
                                  N, NOISE, SEED_PER_ROW, OFFSET_PER_ROW, TEMPERATURE_PER_ROW,
                                  BLOCK_D, STAGES, BOX, BOXES)),
                (load_pieces, (weight, hidden, ring, share, B, D, BOXES, BLOCK_D, STAGES)),
            ],
            [1],
            [LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (compute, (ring, share, sizes, noise, processing, scratch, scores, N, NOISE,
                           SEED_PER_ROW, OFFSET_PER_ROW, TEMPERATURE_PER_ROW, WARPGROUPS, PAIRED,
                           BLOCK_V, CONTIGUOUS, BLOCK_D, STAGES, BOX, BOXES, 0)),
                (load_tiles, (weight, hidden, ring, share, B, D, WARPGROUPS, PAIRED, EXTRA_ROWS,
                              BOXES, BLOCK_V, CONTIGUOUS, BLOCK_D, STAGES)),
            ],
            [1],
            [LOADER_REGISTERS],
        )  # fmt: skip

    # All warpgroups have merged their candidates before the program's arrival is counted. The
    # counting atomic releases and acquires for all threads, so the other atomics are relaxed.
    arrivals = arrivals_ptr + pid_b // BLOCKS
    first_row = pid_b // BLOCKS * BLOCK_B
    if masses_ptr is None:
        count, arriving = gl.atomic_add(arrivals, 1), BLOCKS * programs_v
    else:
        PARTS: gl.constexpr = 2 if QUANTIZED or PAIRED or EXTRA_ROWS > 0 else 1
        FLAGS: gl.constexpr = 2 if QUANTIZED else 1 if SPLIT else 0
        # The teams' counters are behind all others.
        counters = arrivals_ptr + num_tiles_b + FLAGS * gl.num_programs(0)
        counters += pid_b // BLOCKS * gl.cdiv(programs_v, TEAM)
        row, mask, at_once = _rows_of_block(first_row, B, BLOCK_B)
        count, arriving = arrive_in_team(
            arrivals, counters, masses_ptr, team_masses_ptr, pid_v, programs_v, at_once, row, B,
            mask, BLOCKS, PARTS, entropy_ptr is not None,
        )  # fmt: skip
    if count == arriving - 1:
        gl.atomic_xchg(arrivals, 0, sem="relaxed")
        share = (first_row, pid_v, programs_v, first_token, num_tokens)
        line = () if buffers_ptr is None else (buffers_ptr, counts_ptr, rank, area)
        _finish(
            share, seed_ptr, temperature, keys_ptr, winners_ptr, team_masses_ptr, tokens_ptr,
            valid_ptr, logprob_ptr, logz_ptr, scores, line, B, V, D, samples, first_sample, N,
            NOISE, TEMPERATURE_PER_ROW, RANKS, WATCH, BLOCK_B, BLOCK_V, CONTIGUOUS, BLOCK_D, SPLIT,
            PAIRED, EXTRA_ROWS, QUANTIZED,
        )  # fmt: skip
