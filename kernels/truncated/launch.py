"""Launch truncated_sample: the fused kernel, the selection of groups, and the search of long rows.

Which launches follow the fused kernel depends on the filters of the call (`launches_for`):

    filters                                            redraws  look  searches  cutoff  race
    none, and tokens alone are asked for               0        no    0         no      no
    top_p alone, one number from 0.25 on (*)           2 n - 1  no    0         no      no
    top_k, one number up to 448                        0        yes   0         no      no
    neither top_k nor top_p                            0        yes   0         no      yes
    top_k, one number up to 2048 and below the groups  0        yes   0         yes     yes
    others                                             0        yes   4         yes     yes
    others, where rows may be tested (*)               0        yes   3         yes     yes

(*) without penalties, and without fields that depend on the cutoff: a row is then done when a test
finds that its token is kept (truncated.top_p). n tests have n - 1 races between them. Filters whose
numbers differ by row are "others": the look draws the rows that it can, and writes a plan of the
others. A row takes part in those of the next launches that its plan names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fsbench.kernels import fused
from fsbench.kernels.configs.gpu import launching_on, multiprocessors
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.device.stored_logits import StoredLogits, allocate, stride_for
from fsbench.kernels.launch.launch_cache import launch_kernel
from fsbench.kernels.launch.operands import per_row
from fsbench.kernels.launch.request import Filters, Request
from fsbench.kernels.launch.result import Sample, TruncatedSample
from fsbench.kernels.truncated import long_rows, search
from fsbench.kernels.truncated.cutoff import GATHERED
from fsbench.kernels.truncated.penalties import Penalties, TokenHistory, amounts
from fsbench.kernels.truncated.row_plan import NUMBERS, PLAN, pdl_options
from fsbench.kernels.truncated.select import GATHERED_K, GROUP, HEADER, sampling_look_kernel
from fsbench.kernels.truncated.support import launch_fields
from fsbench.kernels.truncated.top_p import is_alone, launch_redraws, tests_needed

SMALL_K = 448
"""Up to this k of all rows, one launch draws from the logits of few groups."""
SEARCHES = 4
"""Launches that narrow down the interval of a row's cutoff, at most."""
TESTED_SEARCHES = 3
"""The same where rows may be tested, an odd number: test, race, test, and in the last two launches
race and test. Of the rows that are searched then, for a large k or a small p, few have more tokens
in the interval than fit into the buffer."""


class Launches(NamedTuple):
    """Launches after the fused kernel, by kernel: a row of the module's table.

    redraws: of sampling_redraw_kernel, tests and the races between them. look: one of
    sampling_look_kernel. searches: of sampling_narrow_kernel. cutoff, race: one of
    sampling_cutoff_kernel and of sampling_race_kernel.
    """

    redraws: int = 0
    look: bool = False
    searches: int = 0
    cutoff: bool = False
    race: bool = False


def launches_for(
    filters: Filters, B: int, groups: int, *, only_tokens: bool, tested: bool
) -> Launches:
    """Return the row of the module's table for a call.

    Args:
        groups: of 32 tokens, in a row.
        only_tokens: whether there are no penalties, and only tokens and valid are requested.
        tested: whether rows may be tested, (*) of the table.
    """
    top_k, top_p, _ = filters
    if only_tokens and filters.keep_all():
        return Launches()
    if tested and isinstance(top_p, float) and is_alone(filters):
        return Launches(redraws=2 * tests_needed(top_p, B) - 1)
    if is_small(top_k):
        return Launches(look=True)
    if isinstance(top_k, int) and top_k == 0 and isinstance(top_p, float) and top_p >= 1.0:
        return Launches(look=True, race=True)
    if isinstance(top_k, int) and 0 < top_k <= GATHERED_K.value and top_k < groups:
        return Launches(look=True, cutoff=True, race=True)
    searches = TESTED_SEARCHES if tested else SEARCHES
    return Launches(look=True, searches=searches, cutoff=True, race=True)


LOOK_REGISTERS = 128
"""Registers of a look's thread if there are more rows than multiprocessors: for two programs on
each. At fewer rows the look takes as many as it needs, about 200."""
ROW_WARPS = 4
CUTOFF = {"num_warps": 8, "maxnreg": 128}
"""Registers for two programs on each multiprocessor: they wait for memory and for each other."""
RACE = {"num_warps": 4, "maxnreg": 128}
"""Registers for four programs on each multiprocessor."""
PROGRAMS = {"search": 1280, "cutoff": 264, "race": 900}
"""Programs of a launch over rows: about what fits on a large GPU at once."""


def launch(
    request: Request,
    config: TileConfig | HopperConfig | None,
    filters: Filters,
    penalties: Penalties | None,
    sample: TruncatedSample,
    logprob_request: Request | None = None,
) -> None:
    """Launch the fused kernel, then draw from what the filters keep of its stored logits.

    logprob_request: the request at the temperature of sample.logprob and top_logprob, if that
        differs.
    """
    B, V, device = len(request.hidden), request.vocab_size, request.hidden.device
    only_tokens = penalties is None and all(x is None for x in sample[2:])
    groups = stride_for(V) // GROUP.value
    if not any(launches_for(filters, B, groups, only_tokens=only_tokens, tested=False)):
        fused.launch.launch(request, "auto", config, Sample(sample.tokens, sample.valid))
        return
    stored = allocate(B, V, device, largest=True)
    logz = None
    needs_mass = sample.logprob is not None or sample.top_logprob is not None
    if needs_mass and penalties is None and logprob_request is None:  # both would change log Z
        logz = torch.empty(B, dtype=torch.float32, device=device)
    out = Sample(sample.tokens, sample.valid, logz=logz)
    masses = fused.launch.launch(request, "auto", config, out, stored)
    finish(request, stored, filters, penalties, sample, masses, logprob_request)


def finish(
    request: Request,
    stored: StoredLogits,
    filters: Filters,
    penalties: Penalties | None,
    sample: TruncatedSample,
    masses: Tensor | None = None,
    logprob_request: Request | None = None,
) -> None:
    """Filter stored logits and draw.

    Args:
        request: its weight is not read.
        sample: its tokens are draws from the whole vocabulary. They are ignored with penalties, and
            if the request's noise is "none".
        logprob_request: as in launch.
        masses: what the fused kernel's launch returned (fused.launch.launch).
    """
    B, V, device = len(request.hidden), request.vocab_size, request.hidden.device
    stride = stored.logits.shape[1]
    history = None if penalties is None else penalties.history
    needs_cutoff = any(x is not None for x in (sample.kept, sample.kept_logprob, sample.support))
    tested = history is None and request.noise != "none" and not needs_cutoff
    steps = launches_for(filters, B, stride // GROUP.value, only_tokens=False, tested=tested)
    if steps.redraws:
        assert isinstance(filters.top_p, float)
        with launching_on(device):
            launch_redraws(request, filters.top_p, steps.redraws, stored.logits, sample)
            launch_fields(request, logprob_request or request, stored, masses, None, sample)
        return
    few = chunk(filters.top_k)
    group_list = torch.empty(B, HEADER.value + few, dtype=torch.int32, device=device)
    most = min(few * GROUP.value, GATHERED.value)
    keys = torch.empty(B, most, dtype=torch.int64, device=device)
    plan = numbers = None
    if steps.race:
        plan = torch.empty(B, PLAN.value, dtype=torch.int64, device=device)
        numbers = torch.empty(B, NUMBERS.value, dtype=torch.float32, device=device)
    if history is None and request.noise == "none":
        history = TokenHistory(B, 1, device)  # empty: the kernel ignores sample.tokens
    cuts = None
    if needs_cutoff:
        cuts = torch.empty(B, dtype=torch.int64, device=device)
    # By argument of the kernel: a number, or a tensor [B].
    each = {**filters._asdict(), **amounts(penalties)}
    with launching_on(device):
        launch_kernel(
            sampling_look_kernel,
            device,
            (B,),
            logits_ptr=stored.logits,
            largest_ptr=stored.largest,
            found_ptr=group_list,
            keys_ptr=keys,
            plan_ptr=plan,
            numbers_ptr=numbers,
            seed_ptr=request.seed,
            offset_ptr=request.offset,
            temperature=request.temperature,
            history_ptr=None if history is None else history.tokens,
            counts_ptr=None if history is None else history.counts,
            lengths_ptr=None if history is None else history.lengths,
            tokens_ptr=sample.tokens,
            valid_ptr=sample.valid,
            cuts_ptr=cuts,
            V=V,
            stride=stride,
            capacity=1 if history is None else history.tokens.shape[1],
            **each,
            **per_row(request),
            **{f"{name.upper()}_PER_ROW": isinstance(x, torch.Tensor) for name, x in each.items()},
            GROUPS=max(32, 1 << (stride // GROUP.value - 1).bit_length()),
            CHUNK=few,
            TESTS=tested and plan is not None,
            **pdl_options(device),
            num_warps=8,
            maxnreg=LOOK_REGISTERS if multiprocessors(device) < B else None,
        )
        if plan is not None and numbers is not None:
            _launch_rows(request, steps, stored, plan, numbers, sample, cuts, tested)
        launch_fields(request, logprob_request or request, stored, masses, cuts, sample)


def _launch_rows(
    request: Request,
    steps: Launches,
    stored: StoredLogits,
    plan: Tensor,
    numbers: Tensor,
    sample: TruncatedSample,
    cuts: Tensor | None,
    tested: bool,
) -> None:
    """Launch many programs for each row that sampling_look_kernel did not finish.

    tested: whether rows may be tested, (*) of the module's table.
    """
    logits = stored.logits
    B, stride = logits.shape
    blocks = triton.cdiv(stride, search.BLOCK.value)
    # At least one program for each row; programs for one row share its blocks.
    grid = {name: (max(B, min(B * blocks, most)),) for name, most in PROGRAMS.items()}
    rows = max(32, triton.next_power_of_2(B))
    common: dict[str, Any] = {
        "logits_ptr": logits,
        "plan_ptr": plan,
        "numbers_ptr": numbers,
        "B": B,
        "stride": stride,
        "ROWS": rows,
        **pdl_options(logits.device),
    }
    per = per_row(request)
    draw_args: dict[str, Any] = {
        "seed_ptr": request.seed,
        "offset_ptr": request.offset,
        "SEED_PER_ROW": per["SEED_PER_ROW"],
        "OFFSET_PER_ROW": per["OFFSET_PER_ROW"],
        "tokens_ptr": sample.tokens,
        "valid_ptr": sample.valid,
    }
    tops = masses = before = None
    if steps.searches:
        sums = logits.new_empty(B, blocks, search.SECTIONS.value)
        if tested:
            tops, before = (logits.new_empty(B, blocks) for _ in range(2))
            masses = plan.new_empty(B, blocks, 2)
        for turn in range(steps.searches):
            race = tested and turn % 2 == 1
            launch_kernel(
                search.sampling_narrow_kernel,
                logits.device,
                grid["race" if race else "search"],
                **common,
                **draw_args,
                sums_ptr=sums,
                before_ptr=None if turn else before,
                tops_ptr=tops,
                masses_ptr=masses,
                launch=turn,
                blocks=blocks,
                RACE=race,
                num_warps=ROW_WARPS,
            )
    if steps.cutoff:
        gathered = plan.new_empty(B, long_rows.GATHERED.value)
        launch_kernel(
            long_rows.sampling_cutoff_kernel,
            logits.device,
            grid["cutoff"],
            **common,
            **draw_args,
            gathered_ptr=gathered,
            tops_ptr=tops,
            masses_ptr=masses,
            cuts_ptr=cuts,
            launch=steps.searches,
            blocks=blocks,
            **CUTOFF,
        )
    launch_kernel(
        long_rows.sampling_race_kernel,
        logits.device,
        grid["race"],
        **common,
        **draw_args,
        largest_ptr=stored.largest,
        tops_ptr=tops,
        masses_ptr=masses,
        launch=steps.searches + steps.cutoff,
        blocks=blocks,
        **RACE,
    )


def is_small(top_k: int | Tensor) -> bool:
    """Return whether all rows share a small top_k: one launch after the fused one is enough."""
    return isinstance(top_k, int) and 0 < top_k <= SMALL_K


def chunk(top_k: int | Tensor) -> int:
    """Return from how many groups one program draws: as many as a small k of all rows needs."""
    if not isinstance(top_k, int) or not is_small(top_k):
        return 128
    return max(32, 1 << (top_k + top_k // 8 - 1).bit_length())
