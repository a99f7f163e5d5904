"""Log-probabilities, ranks, counts and support of filtered draws (see TruncatedSample).

These launches follow those that find the cutoffs. Many programs add up the kept tokens of each row,
then one program per row sorts the support.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsbench.kernels.device.mass import (
    add_tile,
    mass_of_rows,
    no_mass,
    store_mass,
)
from fsbench.kernels.device.rows import of_row
from fsbench.kernels.device.stored_logits import StoredLogits, place_of_largest
from fsbench.kernels.launch.launch_cache import launch_kernel
from fsbench.kernels.launch.ranks import launch_ranks
from fsbench.kernels.launch.request import Request
from fsbench.kernels.launch.result import Sample, TruncatedSample
from fsbench.kernels.noise.contract import temperatures
from fsbench.kernels.noise.keys import ordered, ordered_key
from fsbench.kernels.truncated.cutoff import (
    NOTHING,
    first_key,
    is_kept,
    load_keys,
    unpacked,
)

BLOCK = tl.constexpr(2048)
"""Tokens that a program reads at once."""

PAIRS_AT_ONCE = tl.constexpr(4096)
"""Pairs of kept tokens compared at once."""

PROGRAMS = 1024
"""Programs of a launch: about as many as fit on a large GPU at once."""

WARPS = 4


@triton.jit(do_not_specialize=["limit"])
def sampling_kept_kernel(
    logits_ptr,  # [B, stride] fp32
    largest_ptr,  # [stride // 128, B, 4] fp32: of each group
    cuts_ptr,  # [B] int64: the key from which on tokens are kept; or None: all are kept
    valid_ptr,  # [B] bool
    temperature,  # fp32, or pointer to [B] fp32
    masses_ptr,  # [3, programs, B] int64, out: masses of kept tokens (store_mass); or None
    kept_ptr,  # [B] int32, 0 at first, out: number of kept tokens; or None
    keys_ptr,  # [B, limit] int64, out: their keys, in no order, at most `limit`; or None
    stride,
    limit,
    TEMPERATURE_PER_ROW: tl.constexpr,
):
    row = tl.program_id(0)
    B = tl.num_programs(0)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    logits_ptr += row.to(tl.int64) * stride
    valid = tl.load(valid_ptr + row).to(tl.int32) != 0
    T = of_row(temperature, row, tl.float32, TEMPERATURE_PER_ROW)
    _T, inverse_temperature = temperatures(T)
    cut = tl.full((), NOTHING, tl.int64)
    if cuts_ptr is not None:
        cut = tl.load(cuts_ptr + row)
    mass = no_mass(tl.zeros((1, BLOCK // 32), tl.float32))
    for block in tl.range(program, tl.cdiv(stride, BLOCK), programs):
        group = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
        largest = tl.load(
            largest_ptr + place_of_largest(group, row, B), mask=group < stride // 32,
            other=float("-inf"),
        )  # fmt: skip
        needed = valid & (tl.max(first_key(ordered(largest))) >= (cut >> 32) << 32)
        token = block * BLOCK + tl.arange(0, BLOCK)
        end = tl.where(needed, stride, 0)
        y = tl.load(logits_ptr + token, mask=token < end, other=float("-inf"))
        kept = is_kept(y, token, cut) & (y > float("-inf"))
        if masses_ptr is not None:
            weighed = tl.where(kept, y, float("-inf"))
            mass = add_tile(weighed[None, :], inverse_temperature, mass)
        if kept_ptr is not None:
            count = kept.to(tl.int32)
            if needed:
                place = tl.atomic_add(kept_ptr + row, tl.sum(count))
                if keys_ptr is not None:
                    place += tl.cumsum(count, axis=0) - count
                    key_ptrs = keys_ptr + row.to(tl.int64) * limit + place
                    tl.store(key_ptrs, ordered_key(y, token), mask=kept & (place < limit))
    if masses_ptr is not None:
        rows = row + tl.arange(0, 1)
        store_mass(masses_ptr, mass_of_rows(mass), programs, program, rows, B, rows < B)


@triton.jit(do_not_specialize=["limit"])
def sampling_support_kernel(
    keys_ptr,  # [B, limit] int64, of sampling_kept_kernel
    kept_ptr,  # [B] int32
    support_ptr,  # [B, limit] int64, out
    limit,
    ROOM: tl.constexpr,  # a power of two, at least limit and at most PAIRS_AT_ONCE
):
    row = tl.program_id(0).to(tl.int64)
    AT_ONCE: tl.constexpr = PAIRS_AT_ONCE // ROOM
    keys_ptr += row * limit
    n = tl.load(kept_ptr + row)
    n = tl.where(n <= limit, n, 0)
    keys = load_keys(keys_ptr, 0, n, ROOM)
    above = tl.zeros((ROOM,), tl.int32)
    for first in tl.range(0, n, AT_ONCE):
        others = load_keys(keys_ptr, first, n, AT_ONCE)
        above += tl.sum((others[None, :] > keys[:, None]).to(tl.int32), axis=1)
    place = tl.arange(0, ROOM)
    _y, token = unpacked(keys)
    # Places after the last kept token get -1.
    place = tl.where(place < n, above, place)
    token = tl.where(place < n, token, -1)
    tl.store(support_ptr + row * limit + place, token.to(tl.int64), mask=place < limit)


def launch_fields(
    request: Request,
    logprob_request: Request,
    stored: StoredLogits,
    masses: Tensor | None,
    cuts: Tensor | None,
    sample: TruncatedSample,
) -> None:
    """Fill the optional fields of `sample`: all except tokens and valid.

    Args:
        logprob_request: the request at the temperature of logprob and top_logprob.
        masses: as `fused.launch.launch` returns them. Without them this function launches the sums.
        cuts: int64 [B], the lowest key that is kept; needed for kept, kept_logprob and support.
    """
    drawn = Sample(sample.tokens, sample.valid)
    names = ("logprob", "rank", "top_tokens", "top_logprob")
    fields = {name: getattr(sample, name) for name in names}
    if masses is None and (sample.logprob is not None or sample.top_logprob is not None):
        masses = _launch_sums(logprob_request, stored, None, TruncatedSample(*drawn[:2]))
    if any(out is not None for out in fields.values()):
        launch_ranks(logprob_request, stored, masses, drawn._replace(**fields))
    if cuts is not None:
        masses = _launch_sums(request, stored, cuts, sample)
    if sample.kept_logprob is not None:
        out = drawn._replace(logprob=sample.kept_logprob)
        launch_ranks(request, stored, masses, out)


def _launch_sums(
    request: Request, stored: StoredLogits, cuts: Tensor | None, sample: TruncatedSample
) -> Tensor | None:
    """Return the masses of kept tokens (of all without cuts); fill sample.kept and sample.support.

    Returns None if these two fields are all that is needed.
    """
    (B, stride), device = stored.logits.shape, stored.logits.device
    programs = max(1, min(triton.cdiv(stride, BLOCK.value), PROGRAMS // B))
    masses = keys = None
    if cuts is None or sample.kept_logprob is not None:
        masses = torch.empty(3, programs, B, dtype=torch.int64, device=device)
    limit = 0 if sample.support is None else sample.support.shape[1]
    if limit:
        keys = torch.empty(B, limit, dtype=torch.int64, device=device)
    launch_kernel(
        sampling_kept_kernel,
        device,
        (B, programs),
        logits_ptr=stored.logits,
        largest_ptr=stored.largest,
        cuts_ptr=cuts,
        valid_ptr=sample.valid,
        temperature=request.temperature,
        masses_ptr=masses,
        kept_ptr=sample.kept,
        keys_ptr=keys,
        stride=stride,
        limit=limit,
        TEMPERATURE_PER_ROW=isinstance(request.temperature, Tensor),
        num_warps=WARPS,
    )
    if sample.support is not None:
        launch_kernel(
            sampling_support_kernel,
            device,
            (B,),
            keys_ptr=keys,
            kept_ptr=sample.kept,
            support_ptr=sample.support,
            limit=limit,
            ROOM=max(16, triton.next_power_of_2(limit)),
            num_warps=WARPS,
        )
    return masses
