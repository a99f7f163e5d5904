"""Ranks, log-probabilities and the largest logits, computed from stored logits.

The largest logit of each group of 32 tokens is stored as well, so the kernels read only the groups
with a logit above a limit. For the rank of an unlikely token these are most of the row; several
programs share it. Everything else is done by one program per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsbench.kernels.device.mass import log_probability, mass_of_programs
from fsbench.kernels.device.rows import temperatures_of_rows
from fsbench.kernels.device.stored_logits import StoredLogits, place_of_largest
from fsbench.kernels.launch.launch_cache import launch_kernel
from fsbench.kernels.launch.request import Request
from fsbench.kernels.launch.result import Sample
from fsbench.kernels.launch.workspace import workspace
from fsbench.kernels.noise.group import token_of_member
from fsbench.kernels.noise.keys import LOWEST_KEY, ordered, ordered_key, value_of

ROOM = tl.constexpr(512)
"""The most candidates for a row's largest tokens; with more candidates the row is searched."""
PARTS = tl.constexpr(64)
"""Parts of a row's groups: the nth largest of their maxima is at most the nth largest logit."""
LOWEST = tl.constexpr(-2139095040)
"""`ordered` of the lowest finite fp32."""
AT_ONCE = tl.constexpr(32)
LISTED_AT_ONCE = tl.constexpr(256)
"""Listed groups that are read at once."""
RANKED_AT_ONCE = tl.constexpr(64)
"""Groups of which a program counts larger logits at once."""
SEARCHED = tl.constexpr(4096)
"""Tokens that are searched at once."""

PROGRAMS = 1024
"""Programs that count for ranks: about as many as run on a large GPU at once."""


@triton.jit(do_not_specialize=["samples"])
def rank_kernel(
    logits_ptr,  # [B, stride] fp32
    largest_ptr,  # [stride // 128, B, 4] fp32: of each group
    tokens_ptr,  # [B, samples] int64
    rank_ptr,  # [B, samples] int32, out
    counts_ptr,  # [B, samples] int64, LOWEST_KEY between launches
    arrivals_ptr,  # [B, samples] int32, 0 between launches
    stride,
    samples,
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride
    for i in range(samples):
        offset = row.to(tl.int64) * samples + i
        token = tl.load(tokens_ptr + offset)
        limit = tl.load(logits_ptr + token, mask=token >= 0, other=float("inf"))
        count = _larger(logits_ptr, largest_ptr, limit, row, tl.num_programs(0), stride // 32)
        if count > 0:
            tl.atomic_add(counts_ptr + offset, count.to(tl.int64))
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + offset, 1) == tl.num_programs(1) - 1:
            tl.atomic_xchg(arrivals_ptr + offset, 0)
            rank = (tl.atomic_xchg(counts_ptr + offset, LOWEST_KEY) - LOWEST_KEY).to(tl.int32)
            tl.store(rank_ptr + offset, tl.where(token >= 0, rank, -1))


@triton.jit
def _larger(logits_ptr, largest_ptr, limit, row, B, groups):
    """Count the logits above `limit` in this program's share of a row's groups."""
    count = tl.zeros((RANKED_AT_ONCE,), tl.int32)
    step = tl.num_programs(1) * RANKED_AT_ONCE
    for first in range(tl.program_id(1) * RANKED_AT_ONCE, groups, step):
        group = first + tl.arange(0, RANKED_AT_ONCE)
        pointers = largest_ptr + place_of_largest(group, row, B)
        largest = tl.load(pointers, mask=group < groups, other=float("-inf"))
        token = token_of_member(0, group[:, None], tl.arange(0, 32)[None, :])
        holds = (largest > limit)[:, None]
        y = tl.load(logits_ptr + token, mask=holds, other=float("-inf"))
        count += tl.sum((y > limit).to(tl.int32), axis=1)
    return tl.sum(count)


@triton.jit(do_not_specialize=["programs", "samples", "top"])
def top_tokens_kernel(
    logits_ptr,  # [B, stride] fp32
    largest_ptr,  # [stride // 128, B, 4] fp32: of each group
    masses_ptr,  # [3, programs, B] int64: see mass_of_programs
    temperature,  # fp32, or pointer to [B] fp32
    tokens_ptr,  # [B, samples] int64
    valid_ptr,  # [B] bool
    logprob_ptr,  # [B, samples] fp32, out; or None
    groups_ptr,  # [B, GROUPS] int32, scratch
    keys_ptr,  # [B, ROOM] int64, scratch
    count_ptr,  # [B] int32, scratch: number of keys
    top_tokens_ptr,  # [B, top] int64, out; or None
    top_logprob_ptr,  # [B, top] fp32, out; or None
    stride,
    programs,
    samples,
    top,  # at most AT_ONCE
    TEMPERATURE_PER_ROW: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two, at least stride // 32
):
    row = tl.program_id(0)
    B = tl.num_programs(0)
    logits_ptr += row.to(tl.int64) * stride
    valid = tl.load(valid_ptr + row).to(tl.int32) != 0
    if logprob_ptr is not None:
        mass, inverse_temperature = _mass_of_row(
            masses_ptr, programs, temperature, row, B, TEMPERATURE_PER_ROW
        )
        for i in range(samples):
            offset = row.to(tl.int64) * samples + i + tl.arange(0, 1)
            token = tl.load(tokens_ptr + offset)
            y = tl.load(logits_ptr + token, mask=token >= 0, other=0.0)
            logprob = log_probability(y, mass, inverse_temperature)
            tl.store(logprob_ptr + offset, tl.where(token >= 0, logprob, float("nan")))
    if top_tokens_ptr is not None:
        group = tl.arange(0, GROUPS)
        pointers = largest_ptr + place_of_largest(group, row, B)
        maxima = tl.load(pointers, mask=group < stride // 32, other=float("-inf"))
        maxima = tl.where(valid, maxima, float("-inf"))
        groups_ptr += row * GROUPS
        keys_ptr += row * ROOM
        tl.store(count_ptr + row, 0)
        order = tl.where(maxima > float("-inf"), ordered(maxima), LOWEST - 1)
        least = _reached(tl.max(order.reshape(GROUPS // PARTS, PARTS), axis=0), top)
        listed = _listed(order >= least, group, groups_ptr)
        for first in range(0, listed, LISTED_AT_ONCE):
            token, y = _members_of_listed(first, listed, groups_ptr, logits_ptr)
            taken = (y > float("-inf")) & (ordered(y) >= least)
            # Always 0, which the compiler does not know: few threads take a slot, each by itself.
            zero = (token == 0x7FFFFFFF).to(tl.int32)
            place = tl.atomic_add(count_ptr + row + zero, 1, mask=taken, sem="relaxed")
            tl.store(keys_ptr + place, ordered_key(y, token), mask=taken & (place < ROOM))
        tl.debug_barrier()
        count = tl.load(count_ptr + row, cache_modifier=".cg")
        rows = row + tl.arange(0, 1)
        mass, inverse_temperature = _mass_of_row(
            masses_ptr, programs, temperature, row, B, TEMPERATURE_PER_ROW
        )
        places = tl.arange(0, AT_ONCE)
        tl.store(top_tokens_ptr + row * top + places, -1, mask=places < top)
        missing = tl.where(valid, float("-inf"), float("nan"))
        tl.store(top_logprob_ptr + row * top + places, missing, mask=places < top)
        tl.debug_barrier()
        if count <= ROOM:
            place = tl.arange(0, ROOM)
            keys = tl.load(keys_ptr + place, mask=place < count, other=LOWEST_KEY)
            above = tl.zeros((ROOM,), tl.int32)
            for first in range(0, count, AT_ONCE):
                in_list = first + places < count
                others = tl.load(keys_ptr + first + places, mask=in_list, other=LOWEST_KEY)
                above += tl.sum((others[None, :] > keys[:, None]).to(tl.int32), axis=1)
            is_top = (place < count) & (above < top)
            _store(keys, is_top, row * top + above, mass, inverse_temperature, top_tokens_ptr,
                   top_logprob_ptr)  # fmt: skip
        else:
            last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
            for i in range(top):
                last = _largest_below(logits_ptr, last, stride)
                _store(last + tl.zeros((1,), tl.int64), rows < B, rows * top + i, mass,
                       inverse_temperature, top_tokens_ptr, top_logprob_ptr)  # fmt: skip


@triton.jit
def _listed(is_listed, group, groups_ptr):
    """Write the numbers of the listed groups to memory and count them.

    A row has thousands of groups and few are listed, so no warp waits for the logits of others.
    """
    tl.debug_barrier()  # the previous list has been read
    slot = tl.cumsum(is_listed.to(tl.int32), 0) - 1
    tl.store(groups_ptr + slot, group, mask=is_listed)
    tl.debug_barrier()
    return tl.sum(is_listed.to(tl.int32))


@triton.jit
def _members_of_listed(first, listed, groups_ptr, logits_ptr):
    """Load (tokens, logits) of the members of listed groups, [LISTED_AT_ONCE, 32] each.

    Logits behind the end of the list are -inf.
    """
    number = first + tl.arange(0, LISTED_AT_ONCE)
    in_list = number < listed
    group = tl.load(groups_ptr + number, mask=in_list, other=0)
    token = token_of_member(0, group[:, None], tl.arange(0, 32)[None, :])
    return token, tl.load(logits_ptr + token, mask=in_list[:, None], other=float("-inf"))


@triton.jit
def _mass_of_row(masses_ptr, programs, temperature, row, B, TEMPERATURE_PER_ROW: tl.constexpr):
    """Return (mass of a row, [1] each; its 1 / T)."""
    rows = row + tl.arange(0, 1)
    _, inverse_temperature = temperatures_of_rows(temperature, rows, rows < B, TEMPERATURE_PER_ROW)
    mass = mass_of_programs(masses_ptr, programs, tl.arange(0, 128)[None, :], rows, B)
    return mass, inverse_temperature


@triton.jit
def _reached(order, n):
    """Return the nth largest of int32 [PARTS], at least LOWEST."""
    above = tl.sum((order[None, :] > order[:, None]).to(tl.int32), axis=1)
    return tl.maximum(tl.min(tl.where(above < n, order, 0x7FFFFFFF)), LOWEST)


@triton.jit
def _largest_below(logits_ptr, last, stride):
    """Return the largest key of a row below `last`."""
    best = tl.full((SEARCHED,), LOWEST_KEY, tl.int64)
    for first in range(0, stride, SEARCHED):
        token = first + tl.arange(0, SEARCHED)
        y = tl.load(logits_ptr + token, mask=token < stride, other=float("-inf"))
        key = ordered_key(y, token)
        best = tl.maximum(best, tl.where(key < last, key, LOWEST_KEY))
    return tl.max(best)


@triton.jit
def _store(keys, mask, offsets, mass, inverse_temperature, top_tokens_ptr, top_logprob_ptr):
    """Store the tokens and log-probabilities of keys."""
    y = value_of((keys >> 32).to(tl.int32))
    token = 0x7FFFFFFF - (keys & 0x7FFFFFFF)
    tl.store(top_tokens_ptr + offsets, token, mask=mask)
    logprob = log_probability(y, mass, inverse_temperature)
    tl.store(top_logprob_ptr + offsets, logprob, mask=mask)


def launch_ranks(
    request: Request, stored: StoredLogits, masses: Tensor | None, out: Sample
) -> None:
    """Fill in out.rank, logprob, top_tokens and top_logprob where they are not None.

    masses: of parts of the vocabulary (mass_of_programs); needed for log-probabilities.
    """
    (B, stride), device = stored.logits.shape, stored.logits.device
    samples, top = request.num_samples, 0
    if out.rank is not None:
        parts = triton.cdiv(stride // 32, RANKED_AT_ONCE.value)
        work = workspace(B * samples, device)
        launch_kernel(
            rank_kernel,
            device,
            (B, max(1, min(parts, PROGRAMS // B))),
            logits_ptr=stored.logits,
            largest_ptr=stored.largest,
            tokens_ptr=out.tokens,
            rank_ptr=out.rank,
            counts_ptr=work.keys,
            arrivals_ptr=work.arrivals,
            stride=stride,
            samples=samples,
            num_warps=4,
        )
    if out.logprob is None and out.top_tokens is None:
        return
    groups = max(PARTS.value, triton.next_power_of_2(stride // 32))
    group_lists = keys = counts = None
    if out.top_tokens is not None:
        top = out.top_tokens.shape[1]
        group_lists = torch.empty(B, groups, dtype=torch.int32, device=device)
        keys = torch.empty(B, ROOM.value, dtype=torch.int64, device=device)
        counts = torch.empty(B, dtype=torch.int32, device=device)
    assert masses is not None
    launch_kernel(
        top_tokens_kernel,
        device,
        (B,),
        logits_ptr=stored.logits,
        largest_ptr=stored.largest,
        masses_ptr=masses,
        temperature=request.temperature,
        tokens_ptr=out.tokens,
        valid_ptr=out.valid,
        logprob_ptr=out.logprob,
        groups_ptr=group_lists,
        keys_ptr=keys,
        count_ptr=counts,
        top_tokens_ptr=out.top_tokens,
        top_logprob_ptr=out.top_logprob,
        stride=stride,
        programs=masses.shape[1],
        samples=samples,
        top=top,
        TEMPERATURE_PER_ROW=isinstance(request.temperature, Tensor),
        GROUPS=groups,
        num_warps=8 if groups <= 8192 else 16,
    )
