"""Device code of FlashSampling: Algorithm 1 of the paper in portable Triton, in one launch.

A persistent program owns one block of batch rows and walks over vocabulary tiles. Per tile it
accumulates logits in fp32 on chip, adds noise, and keeps one packed candidate per row (the running
maximum). At the end each program merges its candidates into `keys` by an atomic maximum; the last
program of a block of rows decodes its tokens and resets the workspace for the next call.
"""

import triton
import triton.language as tl

from fsbench.kernels._epilogue import add_mass, add_masses, best_of_tile, processed
from fsbench.kernels._helper import LOWEST_KEY, _log, nan_max, token_of_key
from fsbench.kernels._mainloop import tile_logits


@triton.jit
def _per_row(pointer, rows, B, PER_ROW: tl.constexpr):
    """The value of each row, [R, 1]; or the one for all of them, a scalar."""
    if PER_ROW:
        return tl.load(pointer + rows, mask=rows < B, other=0)[:, None]
    else:
        return tl.load(pointer)


@triton.jit(do_not_specialize=["B", "V"])
def flash_sampling_kernel(
    hidden,  # [B, D] descriptor (USE_TMA) or pointer
    weight,  # [>= V, D] descriptor (USE_TMA) or pointer
    seed_ptr,  # [1] or [B] int64
    offset_ptr,  # [1] or [B] int64, or None: 0
    temperature,  # fp32, or pointer to [B] fp32
    soft_cap,  # fp32 or None
    bias_ptr,  # [V] or [B, V], or None
    mask_ptr,  # bool [B, V] or int32 [B, ceil(V / 32)], or None
    keys_ptr,  # [>= B N] int64, LOWEST_KEY between calls
    arrivals_ptr,  # [>= B] int32, 0 between calls
    winners_ptr,  # [.., B, N] fp32, scratch: logits of candidates, by program or tile; or None
    masses_ptr,  # [2, programs per block of rows, B] fp32, scratch: (largest, mass); or None
    tokens_ptr,  # [B, N] int64, out
    valid_ptr,  # [B] bool, out
    logprob_ptr,  # [B, N] fp32, out; or None
    logz_ptr,  # [B] fp32, out; or None
    B,
    V,
    D,
    N: tl.constexpr,
    NOISE: tl.constexpr,  # "group", "token" or "none" (greedy)
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    TEMPERATURE_PER_ROW: tl.constexpr,
    BIAS_PER_ROW: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLICE: tl.constexpr,
    V_ON_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    num_tiles_b = tl.cdiv(B, BLOCK_B)
    pid_b = tl.program_id(0) % num_tiles_b
    pid_v = tl.program_id(0) // num_tiles_b
    programs_v = tl.num_programs(0) // num_tiles_b
    b0 = pid_b * BLOCK_B
    rows = b0 + tl.arange(0, BLOCK_B)

    seed = _per_row(seed_ptr, rows, B, SEED_PER_ROW)
    # A seed of its own identifies a request; else its row in the batch does.
    row = rows[:, None] * 0 if SEED_PER_ROW else rows[:, None]
    offset = tl.zeros((), tl.int64)
    if offset_ptr is not None:
        offset = _per_row(offset_ptr, rows, B, OFFSET_PER_ROW)
    if TEMPERATURE_PER_ROW:
        T = _per_row(temperature, rows, B, True)
    else:
        T = tl.full((1, 1), temperature, tl.float32)
    # NaN makes every score of the row NaN, and the row invalid.
    T = tl.where((T >= 0.0) & (float("inf") > T), T, float("nan"))
    # Greedy rows report the log-probabilities of T = 1.
    inverse_temperature = 1.0 / tl.where(T == 0.0, 1.0, T)

    WORDS: tl.constexpr = 4 if NOISE == "group" else SLICE // 4
    best = tl.full((BLOCK_B, WORDS), LOWEST_KEY, tl.int64)
    best_logit = tl.zeros((BLOCK_B, WORDS), tl.float32)
    largest = tl.full((BLOCK_B, WORDS), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_B, WORDS), tl.float32)
    for tile_v in tl.range(pid_v, tl.cdiv(V, BLOCK_V), programs_v, flatten=FLATTEN and N == 1):
        v0 = tile_v * BLOCK_V
        logits = tile_logits(
            hidden, weight, b0, v0, B, V, D, BLOCK_B, BLOCK_V, BLOCK_D, V_ON_M, USE_TMA
        )
        logits = processed(logits, rows, v0, B, V, soft_cap, bias_ptr, mask_ptr, BIAS_PER_ROW)
        if masses_ptr is not None:
            largest, mass = add_mass(logits, inverse_temperature, largest, mass, NOISE)
        if N == 1:
            best, best_logit = best_of_tile(
                logits, v0, row, seed, offset, T, inverse_temperature, 0, best, best_logit,
                NOISE, TEMPERATURE_PER_ROW, winners_ptr is not None,
            )  # fmt: skip
        else:
            for sample in range(N):
                key, logit = best_of_tile(
                    logits, v0, row, seed, offset, T, inverse_temperature, sample, best, best_logit,
                    NOISE, TEMPERATURE_PER_ROW, winners_ptr is not None,
                )  # fmt: skip
                _merge(key, logit, tile_v, sample, rows, keys_ptr, winners_ptr, B, N)

    if N == 1:
        _merge(best, best_logit, pid_v, 0, rows, keys_ptr, winners_ptr, B, N)
    if masses_ptr is not None:
        row_largest = tl.reduce(largest, 1, nan_max)[:, None]
        _, total = add_masses(row_largest, 0.0, largest, mass, inverse_temperature)
        at = masses_ptr + pid_v * B + rows
        tl.store(at, tl.reshape(row_largest, (BLOCK_B,)), mask=rows < B)
        tl.store(at + programs_v * B, tl.sum(total, axis=1), mask=rows < B)

    # All of this program's candidates are merged before its arrival is counted.
    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr + pid_b, 1) == programs_v - 1:
        tl.atomic_xchg(arrivals_ptr + pid_b, 0)
        if masses_ptr is not None:
            inverse = tl.reshape(
                inverse_temperature + tl.zeros((BLOCK_B, 1), tl.float32), (BLOCK_B,)
            )
            largest_of_row, log_mass = _log_mass(masses_ptr, programs_v, rows, inverse, B)
        for sample in range(N):
            at = rows * N + sample
            lowest = tl.full((BLOCK_B,), LOWEST_KEY, tl.int64)
            token = token_of_key(tl.atomic_xchg(keys_ptr + at, lowest, mask=rows < B))
            tl.store(tokens_ptr + at, token.to(tl.int64), mask=rows < B)
            if logprob_ptr is not None:
                source = token // BLOCK_V
                if N == 1:
                    source = source % programs_v
                drawn = (rows < B) & (token >= 0)
                winner = winners_ptr + (source * B + rows.to(tl.int64)) * N + sample
                logit = tl.load(winner, mask=drawn, other=float("nan"), cache_modifier=".cg")
                logprob = (logit - largest_of_row) * inverse - log_mass
                tl.store(logprob_ptr + at, logprob, mask=rows < B)
            if sample == 0:
                tl.store(valid_ptr + rows, token >= 0, mask=rows < B)
                if logz_ptr is not None:
                    logz = tl.where(token >= 0, largest_of_row * inverse + log_mass, float("nan"))
                    tl.store(logz_ptr + rows, logz, mask=rows < B)


@triton.jit
def _merge(key, logit, source, sample, rows, keys_ptr, winners_ptr, B, N: tl.constexpr):
    """Merge candidates [R, W] into keys; note the logit of the row's best under its source."""
    row_key = tl.max(key, axis=1)
    tl.atomic_max(keys_ptr + rows * N + sample, row_key, mask=rows < B)
    if winners_ptr is not None:
        # Candidates of a row differ in their token.
        row_logit = tl.max(tl.where(key == row_key[:, None], logit, float("-inf")), axis=1)
        winner = winners_ptr + (source * B + rows.to(tl.int64)) * N + sample
        tl.store(winner, row_logit, mask=rows < B)


@triton.jit
def _log_mass(masses_ptr, programs_v, rows, inverse_temperature, B):
    """(largest logit, log of the mass in units of exp(largest / T)) of every row, [R] each.

    The mass is at least 1, the largest logit's own; that of idle rows is 0 and of no use.
    """
    AT_ONCE: tl.constexpr = 16
    largest = tl.full((AT_ONCE, rows.shape[0]), float("-inf"), tl.float32)
    mass = tl.zeros((AT_ONCE, rows.shape[0]), tl.float32)
    for first in range(0, programs_v, AT_ONCE):
        program = first + tl.arange(0, AT_ONCE)[:, None]
        at = masses_ptr + program * B + rows[None, :]
        there = (program < programs_v) & (rows < B)[None, :]
        m = tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
        s = tl.load(at + programs_v * B, mask=there, other=0.0, cache_modifier=".cg")
        largest, mass = add_masses(largest, mass, m, s, inverse_temperature[None, :])
    row_largest = tl.reduce(largest, 0, nan_max)
    total = add_masses(row_largest[None, :], 0.0, largest, mass, inverse_temperature[None, :])[1]
    return row_largest, _log(tl.maximum(tl.sum(total, axis=0), 1.0))
