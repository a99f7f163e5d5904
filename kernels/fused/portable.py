"""The portable kernel: both stages of FlashSampling's Algorithm 1 in one Triton launch.

A persistent program has one block of batch rows and loops over vocabulary tiles. For each tile it
accumulates logits in fp32 on chip, adds noise, and updates one packed candidate per row (the
running maximum). Then it merges its candidates into `keys` by an atomic maximum. The last program
of a block of rows decodes the tokens and resets the workspace for the next call.
"""

import triton
import triton.language as tl

from fsbench.kernels.device.epilogue import (
    allowed_words,
    best_of_tile,
    capped,
    processed,
    shared_bias,
)
from fsbench.kernels.device.mainloop import ROTATION, first_column, program_share, tile_logits
from fsbench.kernels.device.mass import (
    add_tile,
    entropy_of_mass,
    log_of_mass,
    log_probability,
    mass_of_programs,
    mass_of_rows,
    no_mass,
    store_mass,
)
from fsbench.kernels.device.quantized import converted, scaled, scales_of_tokens
from fsbench.kernels.device.rows import settings
from fsbench.kernels.device.stored_logits import store_largest, store_logits
from fsbench.kernels.device.targets import count_larger, scored, store_rank, targets_of_rows
from fsbench.kernels.device.team_mass import TEAM, arrive_in_team
from fsbench.kernels.noise.arithmetic import halves
from fsbench.kernels.noise.group import members
from fsbench.kernels.noise.keys import LOWEST_KEY, take_keys, token_of_key
from fsbench.kernels.shard.exchange import best_of_ranks, mass_of_ranks

SUBTILE = tl.constexpr(128)
"""Columns of logits that are processed at once."""
TARGETS_AT_ONCE = tl.constexpr(16)
"""Targets of a program of `target_logits_kernel`: the smallest size of a matrix product."""


@triton.jit(do_not_specialize=["B", "V", "first_sample", "num_tokens", "rank"])
def flash_sampling_kernel(
    hidden,  # [B, D] descriptor (USE_TMA) or pointer
    weight,  # [>= num_tokens, D] descriptor (USE_TMA) or pointer
    scale_ptr,  # [V] or [1] fp32, of a quantized weight; or None
    seed_ptr,  # [1] or [B] int64; the targets [B, samples] if NOISE is "target"
    offset_ptr,  # [1] or [B] int64, or None: 0
    temperature,  # fp32, or pointer to [B] fp32
    soft_cap,  # fp32 or None
    bias_ptr,  # [V] or None
    row_bias_ptr,  # [B, V] or None
    mask_ptr,  # [B, mask_words] int32, or None
    keys_ptr,  # [>= B N] int64, workspace: LOWEST_KEY between calls
    arrivals_ptr,  # [>= B] int32, workspace: 0 between calls
    winners_ptr,  # [programs per block of rows, B, N] fp32, workspace: winners' logits; or None
    masses_ptr,  # [3 or 5, programs per block of rows, B] int64, workspace: masses; or None
    team_masses_ptr,  # [3 or 5, teams, B] int64, workspace (see team_mass); None without masses
    tokens_ptr,  # [B, samples] int64, out; packed candidates if RANKS is 0
    valid_ptr,  # [B] bool, out; [B, samples] if NOISE is "target"
    logprob_ptr,  # [B, samples] fp32, out; or None
    logz_ptr,  # [B] fp32, out; or None
    entropy_ptr,  # [B] fp32, out; or None
    rank_ptr,  # [B, samples] int32, in: 0, out: tokens with a larger logit than the target; or None
    limits_ptr,  # [B, samples] fp32: the targets' logits; None without rank_ptr
    logits_ptr,  # [B, stride] fp32, out; or None
    largest_ptr,  # [stride // 128, B, 4] fp32, out: the largest logit of each group; or None
    stride,
    B,
    V,
    D,
    mask_words,
    samples,
    first_sample,
    first_token,  # this rank's first token, a multiple of 256; V counts the whole vocabulary
    num_tokens,  # this rank's number of tokens
    buffers_ptr,  # [RANKS] int64: addresses of the ranks' buffers (shard.exchange); or None
    counts_ptr,  # int32, counters of this rank's slots; or None
    rank,
    area,  # number of slots of an area
    N: tl.constexpr,  # samples of this launch, from first_sample on
    NOISE: tl.constexpr,  # "group", "token", "none" (greedy) or "target"
    SCALE_PER_ROW: tl.constexpr,
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    TEMPERATURE_PER_ROW: tl.constexpr,
    RANKS: tl.constexpr,  # ranks that draw together; 0: a later step merges the candidates
    WATCH: tl.constexpr,  # see shard.exchange.wait
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLICE: tl.constexpr,
    V_ON_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    pid_b, pid_v, programs_v = program_share(B, BLOCK_B)
    b0 = pid_b * BLOCK_B
    rows = b0 + tl.arange(0, BLOCK_B)

    seed, row, offset, T, inverse_temperature = settings(
        seed_ptr,
        offset_ptr,
        temperature,
        rows,
        B,
        SEED_PER_ROW,
        OFFSET_PER_ROW,
        TEMPERATURE_PER_ROW,
    )

    if NOISE == "target":
        seed = ()
        for i in tl.static_range(N):
            offsets = rows.to(tl.int64) * samples + first_sample + i
            seed = seed + (targets_of_rows(seed_ptr, offsets, rows < B, V)[:, None],)  # noqa: RUF005
    limits = ()
    counts = ()
    if rank_ptr is not None:
        for i in tl.static_range(N):
            offsets = rows.to(tl.int64) * samples + first_sample + i
            limit = tl.load(limits_ptr + offsets, mask=rows < B, other=0.0)
            limits = limits + (limit[:, None],)  # noqa: RUF005
            counts = counts + (tl.zeros((BLOCK_B, SUBTILE // 32), tl.int32),)  # noqa: RUF005

    WORDS: tl.constexpr = SLICE // 4 if NOISE == "token" or NOISE == "none" else 4
    COLUMNS: tl.constexpr = triton.next_power_of_2(N)
    best = tl.full((BLOCK_B, WORDS), LOWEST_KEY, tl.int64)
    best_logit = tl.zeros((BLOCK_B, WORDS), tl.float32)
    if N > 1:
        best = tl.full((BLOCK_B, WORDS, COLUMNS), LOWEST_KEY, tl.int64)
        best_logit = tl.zeros((BLOCK_B, WORDS, COLUMNS), tl.float32)
    mass = no_mass(tl.zeros((BLOCK_B, SUBTILE // 32), tl.float32), entropy_ptr is not None)
    for tile_v in tl.range(pid_v, tl.cdiv(num_tokens, BLOCK_V), programs_v, flatten=FLATTEN):
        row0 = tile_v * BLOCK_V
        v0 = first_token + row0
        words = None
        if mask_ptr is not None:
            words = allowed_words(mask_ptr, rows, v0, B, V, mask_words, BLOCK_V)
        bias = None
        if bias_ptr is not None:
            bias = shared_bias(bias_ptr, v0, V, BLOCK_V)
        scale = None
        if scale_ptr is not None:
            tokens = v0 + tl.arange(0, BLOCK_V)
            scale = scales_of_tokens(scale_ptr, tokens, V, SCALE_PER_ROW)
        logits = tile_logits(
            hidden, weight, b0, row0, v0, B, num_tokens, D,
            BLOCK_B, BLOCK_V, BLOCK_D, V_ON_M, USE_TMA,
        )  # fmt: skip
        if scale is not None:
            logits = scaled(logits, scale[None, :])
        best, best_logit, mass, counts = _consume(
            logits, words, bias, v0, rows, row, seed, offset, T, inverse_temperature, first_sample,
            best, best_logit, mass, limits, counts, soft_cap, row_bias_ptr, logits_ptr, largest_ptr,
            stride, B, V,
            N, NOISE, TEMPERATURE_PER_ROW, winners_ptr is not None, masses_ptr is not None,
        )  # fmt: skip

    sample = tl.arange(0, COLUMNS)[None, :]
    mask = (rows < B)[:, None] & (sample < N)
    offsets = rows[:, None] * N + sample
    key = tl.max(best, axis=1, keep_dims=True)
    tl.atomic_max(keys_ptr + offsets, key.reshape(BLOCK_B, COLUMNS), mask=mask, sem="relaxed")
    if winners_ptr is not None:
        # Candidates of a row have different tokens, so exactly one is the best.
        winner_logit = tl.max(tl.where(best == key, best_logit, float("-inf")), axis=1)
        winner = winners_ptr + pid_v * B * N + offsets
        tl.store(winner, winner_logit.reshape(BLOCK_B, COLUMNS), mask=mask)
    if masses_ptr is not None:
        store_mass(masses_ptr, mass_of_rows(mass), programs_v, pid_v, rows, B, rows < B)
    for i in tl.static_range(len(counts)):
        pointers = rank_ptr + rows.to(tl.int64) * samples + first_sample + i
        tl.atomic_add(pointers, tl.sum(counts[i], axis=1), mask=rows < B, sem="relaxed")

    # All candidates of this program are merged before its arrival is counted. The counting atomic
    # releases and acquires for all of its threads, so the other atomics are relaxed.
    tl.debug_barrier()
    if masses_ptr is None:
        count, arriving = tl.atomic_add(arrivals_ptr + pid_b, 1), programs_v
    else:
        teams = arrivals_ptr + tl.cdiv(B, BLOCK_B) + pid_b * tl.cdiv(programs_v, TEAM)
        at_once = tl.arange(0, min(TEAM, 2048 // BLOCK_B))[None, :]
        count, arriving = arrive_in_team(
            arrivals_ptr + pid_b, teams, masses_ptr, team_masses_ptr, pid_v, programs_v, at_once,
            rows, B, rows < B, 1, 1, entropy_ptr is not None,
        )  # fmt: skip
    if count == arriving - 1:
        tl.atomic_xchg(arrivals_ptr + pid_b, 0, sem="relaxed")
        line = () if buffers_ptr is None else (buffers_ptr, counts_ptr, rank, area)
        _finish(
            seed_ptr, keys_ptr, winners_ptr, team_masses_ptr, tokens_ptr, valid_ptr, logprob_ptr,
            logz_ptr, entropy_ptr, rank_ptr, limits_ptr, line, rows, sample, mask, offsets,
            inverse_temperature, programs_v, first_token, samples, first_sample, B, V, N, NOISE,
            RANKS, WATCH, BLOCK_B, BLOCK_V,
        )  # fmt: skip


@triton.jit
def _finish(
    targets_ptr, keys_ptr, winners_ptr, team_masses_ptr, tokens_ptr, valid_ptr, logprob_ptr,
    logz_ptr, entropy_ptr, rank_ptr, limits_ptr, line, rows, sample, mask, offsets,
    inverse_temperature, programs_v, first_token, samples, first_sample, B, V, N: tl.constexpr,
    NOISE: tl.constexpr, RANKS: tl.constexpr, WATCH: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Decode the tokens of a block of rows and reset the workspace, in the block's last program.

    Args:
        line: the connection to the other ranks, see shard.exchange; or ().
        rows: int32 [BLOCK_B]. sample: int32 [1, COLUMNS], 0 to COLUMNS - 1.
        mask, offsets: [BLOCK_B, COLUMNS]: which draws exist, and the indices of their keys.
    """
    key = take_keys(keys_ptr, offsets, mask)
    chosen = ()
    if team_masses_ptr is not None:
        team = tl.arange(0, min(TEAM, 2048 // BLOCK_B))[None, :]
        teams = tl.cdiv(programs_v, TEAM)
        mass = mass_of_programs(team_masses_ptr, teams, team, rows, B, entropy_ptr is not None)
        if RANKS > 1:  # before the candidates, as in the Hopper kernel: ranks may run either
            mass = mass_of_ranks(mass, rows, rows < B, line, RANKS, WATCH)
    if winners_ptr is not None:
        token = token_of_key(key)
        source = (token - first_token) // BLOCK_V % programs_v  # the program with its logit
        pointers = winners_ptr + source * B * N + offsets
        drawn = mask & (token >= 0)
        logit = tl.load(pointers, mask=drawn, other=float("nan"), cache_modifier=".cg")
        chosen = (logit,)
    if RANKS > 1:
        key, chosen = best_of_ranks(key, chosen, offsets, mask, line, RANKS, WATCH)
    token = token_of_key(key)
    out = rows.to(tl.int64)[:, None] * samples + first_sample + sample
    tl.store(tokens_ptr + out, key if RANKS == 0 else token.to(tl.int64), mask=mask)
    if NOISE != "target":
        # All samples of a row are valid, or none is.
        valid = valid_ptr + rows[:, None] + sample * 0
        tl.store(valid, token >= 0, mask=mask & (sample == 0))
    if logz_ptr is not None:
        logz = tl.where(token >= 0, log_of_mass(mass)[:, None], float("nan"))
        tl.store(logz_ptr + rows[:, None] + sample * 0, logz, mask=mask & (sample == 0))
    if entropy_ptr is not None:
        entropy = tl.where(token >= 0, entropy_of_mass(mass)[:, None], float("nan"))
        tl.store(entropy_ptr + rows[:, None] + sample * 0, entropy, mask=mask & (sample == 0))
    if rank_ptr is not None:
        store_rank(rank_ptr, limits_ptr, targets_ptr, out, mask, token, chosen[0], V)
    if logprob_ptr is not None:
        of_rows = (mass[0][:, None], mass[1][:, None], mass[2][:, None])
        logprob = log_probability(chosen[0], of_rows, inverse_temperature)
        if NOISE == "target":
            logprob, valid = scored(targets_ptr, out, mask, token, logprob, V)
            tl.store(valid_ptr + out, valid, mask=mask)
        else:
            logprob = tl.where(token >= 0, logprob, float("nan"))
        tl.store(logprob_ptr + out, logprob, mask=mask)


@triton.jit
def _consume(
    logits, words, bias, v0, rows, row, seed, offset, T, inverse_temperature, first_sample,
    best, best_logit, mass, limits, counts, soft_cap, row_bias_ptr, logits_ptr, largest_ptr,
    stride, B, V, N: tl.constexpr, NOISE: tl.constexpr, GREEDY_ROWS: tl.constexpr,
    KEEP_LOGIT: tl.constexpr, WITH_MASS: tl.constexpr,
):  # fmt: skip
    """Merge a tile of matmul results into the candidates, masses and counts.

    It processes 128 columns at a time: more would need too many registers.
    """
    WIDTH: tl.constexpr = logits.shape[1]
    if WIDTH > SUBTILE:
        low, high = halves(logits)
        words_low = None
        words_high = None
        if words is not None:
            words_low, words_high = halves(words)
        bias_low = None
        bias_high = None
        if bias is not None:
            bias_low, bias_high = bias.reshape(2, WIDTH // 2).permute(1, 0).split()
        best, best_logit, mass, counts = _consume(
            low, words_low, bias_low, v0, rows, row, seed, offset, T, inverse_temperature,
            first_sample, best, best_logit, mass, limits, counts, soft_cap, row_bias_ptr,
            logits_ptr, largest_ptr, stride, B, V, N, NOISE, GREEDY_ROWS, KEEP_LOGIT, WITH_MASS,
        )  # fmt: skip
        return _consume(
            high, words_high, bias_high, v0 + WIDTH // 2, rows, row, seed, offset, T,
            inverse_temperature, first_sample, best, best_logit, mass, limits, counts, soft_cap,
            row_bias_ptr, logits_ptr, largest_ptr, stride, B, V,
            N, NOISE, GREEDY_ROWS, KEEP_LOGIT, WITH_MASS,
        )  # fmt: skip
    else:
        logits = processed(logits, rows, v0, B, V, soft_cap, bias, row_bias_ptr, words)
        if logits_ptr is not None:
            store_logits(logits_ptr, logits, rows, v0, B, stride)
        if largest_ptr is not None:
            store_largest(largest_ptr, logits, rows, v0, B, stride)
        if WITH_MASS:
            mass = add_tile(logits, inverse_temperature, mass)
        best, best_logit = best_of_tile(
            logits, v0, row, seed, offset, T, inverse_temperature, first_sample, best, best_logit,
            N, NOISE, GREEDY_ROWS, KEEP_LOGIT,
        )  # fmt: skip
        if len(counts) > 0:
            counts = count_larger(members(logits), limits, counts)
        return best, best_logit, mass, counts


@triton.jit(do_not_specialize=["count", "V"])
def target_logits_kernel(
    hidden_ptr,  # [B, D]
    weight_ptr,  # [>= V, D]
    scale_ptr,  # [V] or [1] fp32, of a quantized weight; or None
    targets_ptr,  # [B, samples] int64
    soft_cap,
    bias_ptr,
    row_bias_ptr,
    mask_ptr,
    limits_ptr,  # [B, samples] fp32, out; 0 for an invalid target
    rank_ptr,  # [B, samples] int32, out: 0
    count,  # B times samples
    V,
    D,
    mask_words,
    samples,
    SCALE_PER_ROW: tl.constexpr,
    STEP: tl.constexpr,
):
    """Store the logits of the targets before the pass over the whole weight.

    A rank is the number of logits above the target's, so the target's must be computed first. The
    order of summation and the bits are those of device.mainloop.
    """
    index = tl.program_id(0) * TARGETS_AT_ONCE + tl.arange(0, TARGETS_AT_ONCE)
    target = targets_of_rows(targets_ptr, index, index < count, V)
    is_valid = target >= 0
    token = tl.where(is_valid, target, 0)
    row = index // samples
    width = tl.cdiv(D, ROTATION) * ROTATION
    h_row = hidden_ptr + row.to(tl.int64)[:, None] * D
    w_row = weight_ptr + token.to(tl.int64)[:, None] * D
    acc = tl.zeros((TARGETS_AT_ONCE, TARGETS_AT_ONCE), tl.float32)
    for step in range(width // STEP):
        # Each pair of rows begins at the first column of its token; only the diagonal is used.
        column = first_column(token, D) + step * STEP
        column = tl.where(column < width, column, column - width)
        column = tl.multiple_of(column, STEP)  # Triton 3.8 and later forget this in tl.where
        columns = column[:, None] + tl.arange(0, STEP)
        inside = is_valid[:, None] & (columns < D)
        h = tl.load(h_row + columns, mask=inside, other=0.0)
        w = tl.load(w_row + columns, mask=inside, other=0.0)
        if w.dtype != h.dtype:
            w = converted(w, h.dtype)
        acc = tl.dot(h, w.T, acc, input_precision="ieee")
    lane = tl.arange(0, TARGETS_AT_ONCE)
    y = tl.sum(tl.where(lane[:, None] == lane[None, :], acc, 0.0), axis=1)
    if scale_ptr is not None:
        y = scaled(y, scales_of_tokens(scale_ptr, token, V, SCALE_PER_ROW))
    if soft_cap is not None:
        y = capped(y, soft_cap)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + token, mask=is_valid, other=0.0).to(tl.float32)
    if row_bias_ptr is not None:
        y += tl.load(row_bias_ptr + row.to(tl.int64) * V + token, mask=is_valid, other=0.0).to(
            tl.float32
        )
    if mask_ptr is not None:
        word = tl.load(
            mask_ptr + row.to(tl.int64) * mask_words + token // 32, mask=is_valid, other=0
        )
        y = tl.where(((word >> (token & 31)) & 1) != 0, y, float("-inf"))
    tl.store(limits_ptr + index, y, mask=index < count)
    tl.store(rank_ptr + index, 0, mask=index < count)
