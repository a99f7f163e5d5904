"""Device code of FlashSampling: Algorithm 1 of the paper in portable Triton, in one launch.

A persistent program owns one block of batch rows and walks over vocabulary tiles. Per tile it
accumulates logits in fp32 on chip, adds noise, and keeps one packed candidate per row (the running
maximum). At the end each program merges its candidates into `keys` by an atomic maximum; the last
program of a block of rows decodes its tokens and resets the workspace for the next call.
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
from fsbench.kernels.device.given import count_larger, scored, store_rank, targets_of_rows
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
from fsbench.kernels.noise.arithmetic import halves
from fsbench.kernels.noise.group import members
from fsbench.kernels.noise.keys import LOWEST_KEY, take_keys, token_of_key
from fsbench.kernels.shard.exchange import best_of_ranks, mass_of_ranks

SUBTILE = tl.constexpr(128)
"""Columns of logits that enter the candidates at once."""


TARGETS_AT_ONCE = tl.constexpr(16)
"""Targets of a program, and columns of a step times 4: the least that a matrix product takes."""


@triton.jit(do_not_specialize=["B", "V", "first_sample", "num_tokens", "rank"])
def flash_sampling_kernel(
    hidden,  # [B, D] descriptor (USE_TMA) or pointer
    weight,  # [>= num_tokens, D] descriptor (USE_TMA) or pointer
    scale_ptr,  # [V] or [1] fp32, of a quantized weight; or None
    seed_ptr,  # [1] or [B] int64; the targets [B, samples] of "given" noise
    offset_ptr,  # [1] or [B] int64, or None: 0
    temperature,  # fp32, or pointer to [B] fp32
    soft_cap,  # fp32 or None
    bias_ptr,  # [V] or None
    row_bias_ptr,  # [B, V] or None
    mask_ptr,  # [B, mask_words] int32, or None
    keys_ptr,  # [>= B N] int64, LOWEST_KEY between calls
    arrivals_ptr,  # [>= B] int32, 0 between calls
    winners_ptr,  # [programs per block of rows, B, N] fp32, scratch: logits of winners; or None
    masses_ptr,  # [3 or 5, programs per block of rows, B] int64, scratch: mass_of_programs; or None
    tokens_ptr,  # [B, samples] int64, out; packed candidates if RANKS is 0
    valid_ptr,  # [B] bool, out; [B, samples] with "given" noise
    logprob_ptr,  # [B, samples] fp32, out; or None
    logz_ptr,  # [B] fp32, out; or None
    entropy_ptr,  # [B] fp32, out; or None
    rank_ptr,  # [B, samples] int32, 0, out: tokens with a larger logit than the target; or None
    limits_ptr,  # [B, samples] fp32: the targets' logits, if rank_ptr is given
    logits_ptr,  # [B, stride] fp32, out; or None: they are not written
    largest_ptr,  # [stride // 128, B, 4] fp32, out: of each group; or None
    stride,
    B,
    V,
    D,
    mask_words,
    samples,
    first_sample,
    first_token,  # of this rank's weight, a multiple of 256; V is of the whole vocabulary
    num_tokens,  # of this rank
    buffers_ptr,  # [RANKS] int64: addresses of the ranks' buffers (shard.exchange); or None
    counts_ptr,  # int32, of this rank's slots; or None
    rank,
    area,  # slots of an area
    N: tl.constexpr,  # samples of this launch, from first_sample on
    NOISE: tl.constexpr,  # "group", "token", "none" (greedy) or "given"
    SCALE_PER_ROW: tl.constexpr,
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    TEMPERATURE_PER_ROW: tl.constexpr,
    RANKS: tl.constexpr,  # that draw together; 0: leave it to a later step to merge the candidates
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

    if NOISE == "given":
        seed = ()
        for i in tl.static_range(N):
            at = rows.to(tl.int64) * samples + first_sample + i
            seed = seed + (targets_of_rows(seed_ptr, at, rows < B, V)[:, None],)  # noqa: RUF005
    limits = ()
    counts = ()
    if rank_ptr is not None:
        for i in tl.static_range(N):
            at = rows.to(tl.int64) * samples + first_sample + i
            limit = tl.load(limits_ptr + at, mask=rows < B, other=0.0)
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
    there = (rows < B)[:, None] & (sample < N)
    at = rows[:, None] * N + sample
    key = tl.max(best, axis=1, keep_dims=True)
    tl.atomic_max(keys_ptr + at, key.reshape(BLOCK_B, COLUMNS), mask=there, sem="relaxed")
    if winners_ptr is not None:
        # Candidates of a row differ in their token, so one is the best.
        mine = tl.max(tl.where(best == key, best_logit, float("-inf")), axis=1)
        winner = winners_ptr + pid_v * B * N + at
        tl.store(winner, mine.reshape(BLOCK_B, COLUMNS), mask=there)
    if masses_ptr is not None:
        store_mass(masses_ptr, mass_of_rows(mass), programs_v, pid_v, rows, B, rows < B)
    for i in tl.static_range(len(counts)):
        of_rows = rank_ptr + rows.to(tl.int64) * samples + first_sample + i
        tl.atomic_add(of_rows, tl.sum(counts[i], axis=1), mask=rows < B, sem="relaxed")

    # All of this program's candidates are merged before its arrival is counted. That releases and
    # acquires for all of its threads; the other atomics need not.
    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr + pid_b, 1) == programs_v - 1:
        tl.atomic_xchg(arrivals_ptr + pid_b, 0, sem="relaxed")
        line = () if buffers_ptr is None else (buffers_ptr, counts_ptr, rank, area)
        _finish(
            seed_ptr, keys_ptr, winners_ptr, masses_ptr, tokens_ptr, valid_ptr, logprob_ptr,
            logz_ptr, entropy_ptr, rank_ptr, limits_ptr, line, rows, sample, there, at,
            inverse_temperature, programs_v, first_token, samples, first_sample, B, V, N, NOISE,
            RANKS, WATCH, BLOCK_B, BLOCK_V,
        )  # fmt: skip


@triton.jit
def _finish(
    targets_ptr, keys_ptr, winners_ptr, masses_ptr, tokens_ptr, valid_ptr, logprob_ptr, logz_ptr,
    entropy_ptr, rank_ptr, limits_ptr, line, rows, sample, there, at, inverse_temperature,
    programs_v, first_token, samples, first_sample, B, V, N: tl.constexpr, NOISE: tl.constexpr,
    RANKS: tl.constexpr, WATCH: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The last program of a block of rows: decode its tokens, reset the workspace.

    Args:
        line: to the other ranks, as in shard.exchange; or ().
        rows: int32 [BLOCK_B]. sample: [1, COLUMNS], 0 to N - 1 and beyond.
        there, at: [BLOCK_B, COLUMNS]: which draws there are, and their places among the keys.
    """
    found = take_keys(keys_ptr, at, there)
    chosen = ()
    if masses_ptr is not None:
        AT_ONCE: tl.constexpr = min(128, 2048 // BLOCK_B)
        program = tl.arange(0, AT_ONCE)[None, :]
        mass = mass_of_programs(masses_ptr, programs_v, program, rows, B, entropy_ptr is not None)
        if RANKS > 1:  # before candidates, as the Hopper kernel: ranks may run either
            mass = mass_of_ranks(mass, rows, rows < B, line, RANKS, WATCH)
    if winners_ptr is not None:
        token = token_of_key(found)
        source = (token - first_token) // BLOCK_V % programs_v  # the program that met it
        theirs = winners_ptr + source * B * N + at
        drawn = there & (token >= 0)
        logit = tl.load(theirs, mask=drawn, other=float("nan"), cache_modifier=".cg")
        chosen = (logit,)
    if RANKS > 1:
        found, chosen = best_of_ranks(found, chosen, at, there, line, RANKS, WATCH)
    token = token_of_key(found)
    out = rows.to(tl.int64)[:, None] * samples + first_sample + sample
    tl.store(tokens_ptr + out, found if RANKS == 0 else token.to(tl.int64), mask=there)
    if NOISE != "given":
        # Whether a row has a draw is the same for all of its samples.
        valid = valid_ptr + rows[:, None] + sample * 0
        tl.store(valid, token >= 0, mask=there & (sample == 0))
    if logz_ptr is not None:
        logz = tl.where(token >= 0, log_of_mass(mass)[:, None], float("nan"))
        tl.store(logz_ptr + rows[:, None] + sample * 0, logz, mask=there & (sample == 0))
    if entropy_ptr is not None:
        entropy = tl.where(token >= 0, entropy_of_mass(mass)[:, None], float("nan"))
        tl.store(entropy_ptr + rows[:, None] + sample * 0, entropy, mask=there & (sample == 0))
    if rank_ptr is not None:
        store_rank(rank_ptr, limits_ptr, targets_ptr, out, there, token, chosen[0], V)
    if logprob_ptr is not None:
        of_rows = (mass[0][:, None], mass[1][:, None], mass[2][:, None])
        logprob = log_probability(chosen[0], of_rows, inverse_temperature)
        if NOISE == "given":
            logprob, valid = scored(targets_ptr, out, there, token, logprob, V)
            tl.store(valid_ptr + out, valid, mask=there)
        else:
            logprob = tl.where(token >= 0, logprob, float("nan"))
        tl.store(logprob_ptr + out, logprob, mask=there)


@triton.jit
def _consume(
    logits, words, bias, v0, rows, row, seed, offset, T, inverse_temperature, first_sample,
    best, best_logit, mass, limits, counts, soft_cap, row_bias_ptr, logits_ptr, largest_ptr,
    stride, B, V, N: tl.constexpr, NOISE: tl.constexpr, GREEDY_ROWS: tl.constexpr,
    KEEP_LOGIT: tl.constexpr, WITH_MASS: tl.constexpr,
):  # fmt: skip
    """Let a tile of matmul results enter the candidates, masses and counts, 128 columns at a time.

    More at once would need too many registers.
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
    limits_ptr,  # [B, samples] fp32, out; 0 of a target that is none
    rank_ptr,  # [B, samples] int32, out: 0
    count,  # B samples
    V,
    D,
    mask_words,
    samples,
    SCALE_PER_ROW: tl.constexpr,
    STEP: tl.constexpr,
):
    """Store the logits of given tokens, a row of the weight each, before the pass over all of it.

    A rank counts logits above the target's, so these must be known first. The order of summation is
    that of device.mainloop, and so are the bits.
    """
    at = tl.program_id(0) * TARGETS_AT_ONCE + tl.arange(0, TARGETS_AT_ONCE)
    target = targets_of_rows(targets_ptr, at, at < count, V)
    there = target >= 0
    token = tl.where(there, target, 0)
    row = at // samples
    width = tl.cdiv(D, ROTATION) * ROTATION
    h_row = hidden_ptr + row.to(tl.int64)[:, None] * D
    w_row = weight_ptr + token.to(tl.int64)[:, None] * D
    acc = tl.zeros((TARGETS_AT_ONCE, TARGETS_AT_ONCE), tl.float32)
    for step in range(width // STEP):
        # Each pair of rows begins at the first column of its token: the diagonal is what counts.
        column = first_column(token, D) + step * STEP
        column = tl.where(column < width, column, column - width)
        column = tl.multiple_of(column, STEP)  # which Triton 3.8 and later forget in tl.where
        columns = column[:, None] + tl.arange(0, STEP)
        inside = there[:, None] & (columns < D)
        h = tl.load(h_row + columns, mask=inside, other=0.0)
        w = tl.load(w_row + columns, mask=inside, other=0.0)
        if w.dtype != h.dtype:
            w = converted(w, h.dtype)
        acc = tl.dot(h, w.T, acc, input_precision="ieee")
    place = tl.arange(0, TARGETS_AT_ONCE)
    y = tl.sum(tl.where(place[:, None] == place[None, :], acc, 0.0), axis=1)
    if scale_ptr is not None:
        y = scaled(y, scales_of_tokens(scale_ptr, token, V, SCALE_PER_ROW))
    if soft_cap is not None:
        y = capped(y, soft_cap)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + token, mask=there, other=0.0).to(tl.float32)
    if row_bias_ptr is not None:
        y += tl.load(row_bias_ptr + row.to(tl.int64) * V + token, mask=there, other=0.0).to(
            tl.float32
        )
    if mask_ptr is not None:
        word = tl.load(mask_ptr + row.to(tl.int64) * mask_words + token // 32, mask=there, other=0)
        y = tl.where(((word >> (token & 31)) & 1) != 0, y, float("-inf"))
    tl.store(limits_ptr + at, y, mask=at < count)
    tl.store(rank_ptr + at, 0, mask=at < count)
