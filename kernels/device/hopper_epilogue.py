"""The epilogue of the Hopper kernel in Gluon: logit processing, candidates and masses of a tile.

The batch is on the M side of the instruction. A thread then holds whole groups of the group noise,
of two rows, so the groups' sums and the running best stay in its registers. The portable version,
`device.epilogue`, has the code that both share.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fsbench.kernels.configs import hopper
from fsbench.kernels.device.epilogue import capped
from fsbench.kernels.device.mass import add_masses, group_moments, mass_of_groups
from fsbench.kernels.device.stored_logits import place_of_largest
from fsbench.kernels.device.targets import count_larger, target_draws
from fsbench.kernels.noise.arithmetic import halves
from fsbench.kernels.noise.group import (
    best_token,
    better,
    drawing_sums,
    group_draws,
    group_noise,
    group_sums,
    largest_member,
    members,
    token_of_member,
)

ROWS = gl.constexpr(hopper.ROWS)
"""Batch rows of a warpgroup: the M of its instruction."""


@gluon.constexpr_function
def group_layout(GROUPS, ROWS=64):
    """Return the layout of [ROWS, GROUPS], one element for each group that a thread holds.

    Of 64 rows a thread holds groups of two, of 32 rows groups of one.
    """
    return gl.DistributedLinearLayout(
        reg_bases=([[0, 4]] if GROUPS == 8 else []) + ([[8, 0]] if ROWS == 64 else []),
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[ROWS // 4, 0], [ROWS // 2, 0]],
        block_bases=[],
        shape=[ROWS, GROUPS],
    )


@gluon.jit
def consume(
    logits, v0, rows, sizes, processing, stored, best, mass, counts,
    N: gl.constexpr, NOISE: gl.constexpr, GREEDY_ROWS: gl.constexpr, WITH_MASS: gl.constexpr,
):  # fmt: skip
    """Merge matmul results [ROWS, WIDTH] of tokens from v0 on into candidates, masses and counts.

    Args:
        rows: (row, row in the noise, seed or tuple of targets, offset, T, 1 / T, limits), each
            [ROWS, 1] in group_layout(4), or a scalar shared by all rows. limits: the tuple of the
            targets' logits, or ().
        stored: (mask of the rows to store [ROWS, 1], logits_ptr, (largest_ptr,) or (), stride) if
            logits are written to memory (see `StoredLogits`); else ().
        best: (score, token, logit) of each sample, [ROWS, 4] each.
        mass: [ROWS, 4], see `device.mass`.
        counts: the number of logits above each target's, int32 [ROWS, 4] each; or ().
    """
    GROUPS: gl.constexpr = logits.shape[1] // 32
    _, bias_ptr, row_bias_ptr, mask_ptr = processing
    # One block at a time where many registers are needed; otherwise more at once is faster.
    BY_BLOCK: gl.constexpr = len(bias_ptr) + len(row_bias_ptr) + len(mask_ptr) > 0 or (
        WITH_MASS and (N > 1 or NOISE == "target")
    )
    if GROUPS > 4 and BY_BLOCK:
        low, high = halves(logits)
        best, mass, counts = consume(
            low, v0, rows, sizes, processing, stored, best, mass, counts,
            N, NOISE, GREEDY_ROWS, WITH_MASS,
        )  # fmt: skip
        return consume(
            high, v0 + GROUPS * 16, rows, sizes, processing, stored, best, mass, counts,
            N, NOISE, GREEDY_ROWS, WITH_MASS,
        )  # fmt: skip
    else:
        B, V, _, mask_words, first_sample, _ = sizes
        LAYOUT: gl.constexpr = group_layout(GROUPS, logits.shape[0])
        index = gl.arange(0, GROUPS, gl.SliceLayout(0, LAYOUT))[None, :]
        row = _in_layout(rows[0], LAYOUT)
        noise_row = _in_layout(rows[1], LAYOUT)
        seed = rows[2] if NOISE == "target" else _in_layout(rows[2], LAYOUT)
        offset = _in_layout(rows[3], LAYOUT)
        T = _in_layout(rows[4], LAYOUT)
        inverse_temperature = _in_layout(rows[5], LAYOUT)
        y = ()
        unordered = members(logits)
        for i in gl.static_range(32):
            y += (_in_layout(unordered[i], LAYOUT),)
        y = _processed(y, v0, row, index, B, V, processing, mask_words)
        # Greedy rows report the mass at T = 1 but cannot draw from it.
        SEPARATE: gl.constexpr = WITH_MASS and GREEDY_ROWS
        if NOISE == "token":
            m = largest_member(y)
            sums = ()
            if WITH_MASS:
                _, sums = group_sums(y, inverse_temperature)
        else:
            m, sums = drawing_sums(y, T, inverse_temperature, GREEDY_ROWS and not SEPARATE)
        if len(stored) > 0:
            row_mask, logits_ptr, largest_ptr, stride = stored
            row_mask = _in_layout(row_mask, LAYOUT)
            _store(y, m, v0, row, index, row_mask, logits_ptr, largest_ptr, stride, B)
        new_best = ()
        for i in gl.static_range(N):
            if NOISE == "none":
                score, member, logit = _largest(y, m)
                token = token_of_member(v0, index, member)
            elif NOISE == "target":
                target = _in_layout(seed[i], LAYOUT)
                score, token, logit = target_draws(y, m, v0, index, target, T)
            elif NOISE == "token":
                score, token, logit = best_token(
                    y, v0, index, noise_row, seed, offset, T, first_sample + i
                )
            else:
                rate, u = group_noise(v0, index, noise_row, seed, offset, first_sample + i)
                score, member, logit = group_draws(y, m, sums, rate, u, T, GREEDY_ROWS)
                if SEPARATE:
                    _, first, _ = _largest(y, m)
                    member = gl.where(T == 0.0, first, member)
                    logit = gl.where(T == 0.0, m, logit)
                token = token_of_member(v0, index, member)
            running = best[i]
            for part in gl.static_range(GROUPS // 4):
                running = better(
                    running, (_block(score, part), _block(token, part), _block(logit, part))
                )
            new_best += (running,)
        if WITH_MASS:
            for part in gl.static_range(GROUPS // 4):
                moments = None
                if len(mass) > 3:
                    moments = _block(group_moments(y, m, inverse_temperature), part)
                group = mass_of_groups(_block(m, part), _block(sums[31], part), rows[5], moments)
                mass = add_masses(mass, group)
        if len(counts) > 0:
            counts = count_larger(y, rows[6], counts)
        return new_best, mass, counts


@gluon.jit
def _processed(y, v0, row, index, B, V, processing, mask_words):
    """Apply soft cap, biases and mask to the 32 members of each group.

    Args:
        y: 32 tensors [ROWS, G]; y_i belongs to token v0 + column.
        row, index: int32 [ROWS, G], the row and the number of the group.
    """
    soft_cap, bias_ptr, row_bias_ptr, mask_ptr = processing
    first = index // 4 * 128 + index % 4 * 2
    words = ()
    if len(mask_ptr) > 0:
        for i in gl.static_range(4):
            word = v0 // 32 + index // 4 * 4 + i
            pointers = mask_ptr[0] + row.to(gl.int64) * mask_words + word
            words += (gl.load(pointers, mask=(row < B) & (word * 32 < V), other=0),)
    out = ()
    for i in gl.static_range(32):
        x = y[i]
        column = first + (i // 2 * 8 + i % 2)
        if len(soft_cap) > 0:
            # Beyond the vocabulary y is -inf, whose cap would be a finite logit.
            x = gl.where(v0 + column < V, capped(x, soft_cap[0]), float("-inf"))
        if len(bias_ptr) > 0:
            in_vocab = v0 + column < V
            x += gl.load(bias_ptr[0] + v0 + column, mask=in_vocab, other=0.0).to(gl.float32)
        if len(row_bias_ptr) > 0:
            in_vocab = (row < B) & (v0 + column < V)
            pointers = row_bias_ptr[0] + row.to(gl.int64) * V + v0 + column
            x += gl.load(pointers, mask=in_vocab, other=0.0).to(gl.float32)
        if len(mask_ptr) > 0:
            bit = words[i // 8] >> (column & 31)
            x = gl.where((bit & 1) != 0, x, float("-inf"))
        out += (x,)
    return out


@gluon.jit
def _store(y, m, v0, row, index, mask, logits_ptr, largest_ptr, stride, B):
    """Store the logits of a tile, and m, the largest of each group.

    Two neighboring tokens are stored as one 64-bit number.
    """
    block = v0 + index // 4 * 128
    mask = mask & (block < stride)
    first = row.to(gl.int64) * stride + (block + index % 4 * 2)
    pointers = logits_ptr.to(gl.pointer_type(gl.int64), bitcast=True) + first // 2
    for i in gl.static_range(16):
        even = y[2 * i].to(gl.uint32, bitcast=True).to(gl.int64)
        odd = y[2 * i + 1].to(gl.uint32, bitcast=True).to(gl.int64)
        gl.store(pointers + i * 4, even | (odd << 32), mask=mask, eviction_policy="evict_last")
    if len(largest_ptr) > 0:
        pointers = largest_ptr[0] + place_of_largest(v0 // 32 + index, row, B)
        gl.store(pointers, m, mask=mask)


@gluon.jit
def _in_layout(x, LAYOUT: gl.constexpr):
    """Return x if it is a scalar, else x in a layout that moves nothing between threads."""
    if len(x.shape) == 0:
        return x
    else:
        return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _block(x, part: gl.constexpr):
    """Return the four groups of one block of 128 tokens, [ROWS, G] -> [ROWS, 4]."""
    if x.shape[1] == 4:
        return x
    else:
        layout: gl.constexpr = group_layout(4, x.shape[0])
        return gl.convert_layout(halves(x)[part], layout, assert_trivial=True)


@gluon.jit
def _largest(y, m):
    """Return each group's draw without noise: the first of its largest logits."""
    member = (m < float("-inf")).to(gl.int32) + 31
    for i in gl.static_range(30, -1, -1):
        member = gl.where(y[i] == m, i, member)
    return m, member, m
