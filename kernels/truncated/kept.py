"""What truncated_sample says of its draws beside the tokens: see TruncatedSample.

The cutoff of each row is known then. Many programs sum up what is kept, a row's blocks among them;
then one program for each row looks at what they left.
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
"""Pairs of kept tokens that are compared at once."""

PROGRAMS = 1024
"""Programs that sum up what is kept: about what fits on a large GPU at once."""

WARPS = 4


@triton.jit(do_not_specialize=["limit"])
def sampling_kept_kernel(
    logits_ptr,  # [B, stride] fp32
    largest_ptr,  # [stride // 128, B, 4] fp32: of each group
    cuts_ptr,  # [B] int64: the key from which on tokens are kept; or None, and all are
    valid_ptr,  # [B] bool
    temperature,  # fp32, or pointer to [B] fp32
    masses_ptr,  # [3, programs, B] int64, out: of what is kept (store_mass); or None
    kept_ptr,  # [B] int32, 0: how many are kept, out; or None
    keys_ptr,  # [B, limit] int64, out: of these, in no order, as far as there is room; or None
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
                    at = keys_ptr + row.to(tl.int64) * limit + place
                    tl.store(at, ordered_key(y, token), mask=kept & (place < limit))
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
    # Those behind the last stay where they are.
    place = tl.where(place < n, above, place)
    token = tl.where(place < n, token, -1)
    tl.store(support_ptr + row * limit + place, token.to(tl.int64), mask=place < limit)


def launch_kept(
    request: Request,
    said_of: Request,
    stored: StoredLogits,
    masses: Tensor | None,
    cuts: Tensor | None,
    sample: TruncatedSample,
) -> None:
    """Fill in the fields of `sample` that are there, beside tokens and valid.

    said_of: the request at the temperature of logprob and top_logprob.
    masses: of the fused kernel's programs; without them logprob is of a sum made here.
    cuts: int64 [B], the lowest key that is kept; there if kept, kept_logprob or support is.
    """
    drawn = Sample(sample.tokens, sample.valid)
    names = ("logprob", "rank", "top_tokens", "top_logprob")
    asked = {name: getattr(sample, name) for name in names}
    if masses is None and (sample.logprob is not None or sample.top_logprob is not None):
        masses = _sum_up(said_of, stored, None, TruncatedSample(*drawn[:2]))
    if any(out is not None for out in asked.values()):
        launch_ranks(said_of, stored, masses, drawn._replace(**asked))
    if cuts is not None:
        masses = _sum_up(request, stored, cuts, sample)
    if sample.kept_logprob is not None:
        out = drawn._replace(logprob=sample.kept_logprob)
        launch_ranks(request, stored, masses, out)


def _sum_up(
    request: Request, stored: StoredLogits, cuts: Tensor | None, sample: TruncatedSample
) -> Tensor | None:
    """Masses of what is kept, of all tokens without cuts; fill in sample.kept and sample.support.

    None where nothing is to be known but these two.
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
