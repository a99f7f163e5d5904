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

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fsbench.kernels import fused
from fsbench.kernels.configs.gpu import launching_on, multiprocessors
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.device.stored_logits import StoredLogits, allocate
from fsbench.kernels.launch.launch_cache import (
    Launch,
    LaunchSequence,
    Scratch,
    cached,
    launch_key,
)
from fsbench.kernels.launch.operands import per_row
from fsbench.kernels.launch.request import Filters, Request
from fsbench.kernels.launch.result import Sample, TruncatedSample
from fsbench.kernels.launch.workspace import workspace
from fsbench.kernels.truncated import long_rows, search
from fsbench.kernels.truncated.cutoff import GATHERED
from fsbench.kernels.truncated.penalties import Penalties, TokenHistory, amounts
from fsbench.kernels.truncated.row_plan import NUMBERS, PLAN, pdl_options
from fsbench.kernels.truncated.select import GATHERED_K, GROUP, HEADER, sampling_look_kernel
from fsbench.kernels.truncated.support import launch_fields
from fsbench.kernels.truncated.top_p import is_alone, redraw_launches, tests_needed

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


def launches_for(filters: Filters, B: int, groups: int, *, tested: bool) -> Launches:
    """Return the row of the module's table for a call that stores logits, all but the first row.

    Args:
        groups: of 32 tokens, in a row.
        tested: whether rows may be tested, (*) of the table.
    """
    top_k, top_p, _ = filters
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


class Call(NamedTuple):
    """The arguments of `finish`."""

    request: Request
    stored: StoredLogits
    filters: Filters
    penalties: Penalties | None
    sample: TruncatedSample

    def needs_cutoff(self) -> bool:
        """Return whether a field is requested that depends on the cutoff."""
        sample = self.sample
        return not (sample.kept is sample.kept_logprob is sample.support is None)

    def steps(self) -> tuple[Launches, bool]:
        """Return the launches, and whether rows may be tested, (*) of the module's table."""
        request, stored, filters, penalties, _ = self
        B, stride = stored.logits.shape
        tested = penalties is None and request.noise != "none" and not self.needs_cutoff()
        return launches_for(filters, B, stride // GROUP.value, tested=tested), tested

    def key(self, tensors: Iterable[Tensor | None], *choices: object) -> Hashable:
        """Return the key of a FilterLaunch. Numbers of filters and penalties are not in it.

        Args:
            tensors: those of `stored`, unless `stored` is always allocated for the launch.
            choices: as launch_key takes them.
        """
        request, _, filters, penalties, sample = self
        numbers: tuple[Any, ...] = filters
        history: Iterable[Tensor] = ()
        if penalties is not None:
            numbers += penalties[1:]
            history = _history_arguments(penalties.history).values()
        by_row = [x for x in numbers if isinstance(x, Tensor)]
        types = tuple(map(type, numbers))
        results = (*tensors, *sample, *history, *by_row)
        return launch_key(request, results, self.steps(), chunk(filters.top_k), types, *choices)


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
    if penalties is None and filters.keep_all() and all(x is None for x in sample[2:]):
        fused.launch.launch(request, "auto", config, Sample(sample.tokens, sample.valid))
        return
    B, device = request.hidden.shape[0], request.hidden.device
    stored = allocate(B, request.vocab_size, device, largest=True)
    logz = None
    needs_mass = sample.logprob is not None or sample.top_logprob is not None
    if needs_mass and penalties is None and logprob_request is None:  # both would change log Z
        logz = torch.empty(B, dtype=torch.float32, device=device)
    out = Sample(sample.tokens, sample.valid, logz=logz)
    call = Call(request, stored, filters, penalties, sample)

    def prepare() -> tuple[fused.launch.FusedLaunch, FilterLaunch]:
        stride = stored.logits.shape[1]
        return fused.launch.FusedLaunch(request, "auto", config, out, stride), FilterLaunch(call)

    # stored and logz were allocated above: the shapes of the request decide theirs.
    fused_launch, filter_launch = cached(call.key((), config, logz is None), prepare)
    masses = fused_launch(request, out, stored)
    filter_launch(call, masses, logprob_request)


def finish(
    request: Request,
    stored: StoredLogits,
    filters: Filters,
    penalties: Penalties | None,
    sample: TruncatedSample,
) -> None:
    """Filter stored logits and draw.

    Args:
        request: its weight is not read.
        sample: its tokens are draws from the whole vocabulary. They are ignored with penalties, and
            if the request's noise is "none".
    """
    call = Call(request, stored, filters, penalties, sample)
    cached(call.key(stored), FilterLaunch, call)(call)


class FilterLaunch:
    """The launches after the fused kernel, for all calls of one key."""

    def __init__(self, call: Call):
        (B, stride), self.device = call.stored.logits.shape, call.stored.logits.device
        steps, tested = call.steps()
        self.redraws = steps.redraws > 0
        if self.redraws:
            launches, scratch = redraw_launches(call.request, steps.redraws, B, stride)
        else:
            launches, scratch = _look_launches(call, steps, tested)
        self.run = LaunchSequence(launches, scratch, self.device)
        self.has_fields = any(field is not None for field in call.sample[2:])

    def __call__(
        self, call: Call, masses: Tensor | None = None, logprob_request: Request | None = None
    ) -> None:
        """Launch for a call of the same key.

        Args:
            masses: what the fused kernel's launch returned (fused.launch.launch).
            logprob_request: as in launch.
        """
        request, stored, filters, penalties, sample = call
        B, device, cuts = stored.logits.shape[0], self.device, None
        moving: dict[str, Any] = {
            "logits_ptr": stored.logits,
            "seed_ptr": request.seed,
            "offset_ptr": request.offset,
            "temperature": request.temperature,
            "tokens_ptr": sample.tokens,
            "valid_ptr": sample.valid,
        }
        with launching_on(device):
            if self.redraws:
                work = workspace(B, device)
                moving["top_p"] = filters.top_p
                moving["keys_ptr"], moving["arrivals_ptr"] = work.keys, work.arrivals
            else:
                if call.needs_cutoff():
                    cuts = torch.empty(B, dtype=torch.int64, device=device)
                moving |= {"largest_ptr": stored.largest, "cuts_ptr": cuts}
                moving |= {**filters._asdict(), **amounts(penalties)}
                if penalties is not None:
                    moving |= _history_arguments(penalties.history)
                elif request.noise == "none":  # with a history the kernel ignores sample.tokens
                    moving |= _history_arguments(TokenHistory(B, 1, device))
            self.run(moving)
            if self.has_fields:
                launch_fields(request, logprob_request or request, stored, masses, cuts, sample)


def _history_arguments(history: TokenHistory) -> dict[str, Tensor]:
    return {
        "history_ptr": history.tokens,
        "counts_ptr": history.counts,
        "lengths_ptr": history.lengths,
    }


def _look_launches(call: Call, steps: Launches, tested: bool) -> tuple[list[Launch], Scratch]:
    """Return the launch of sampling_look_kernel and those that follow it, and their scratch.

    tested: whether rows may be tested, (*) of the module's table.
    """
    request, stored, filters, penalties, _ = call
    (B, stride), device = stored.logits.shape, stored.logits.device
    few = chunk(filters.top_k)
    numbers = {**filters._asdict(), **amounts(penalties)}
    fixed = {
        "V": request.vocab_size,
        "stride": stride,
        "capacity": 1 if penalties is None else penalties.history.tokens.shape[1],
        **per_row(request),
        **{f"{name.upper()}_PER_ROW": isinstance(x, Tensor) for name, x in numbers.items()},
        "GROUPS": max(32, 1 << (stride // GROUP.value - 1).bit_length()),
        "CHUNK": few,
        "TESTS": tested and steps.race,
        **pdl_options(device),
        "num_warps": 8,
        "maxnreg": LOOK_REGISTERS if multiprocessors(device) < B else None,
    }
    look = Launch(sampling_look_kernel, (B,), fixed)
    scratch: Scratch = {
        "found_ptr": ((B, HEADER.value + few), torch.int32),
        "keys_ptr": ((B, min(few * GROUP.value, GATHERED.value)), torch.int64),
    }
    if not steps.race:
        return [look], scratch
    launches, row_scratch = _row_launches(request, steps, B, stride, tested)
    return [look, *launches], scratch | row_scratch


def _row_launches(
    request: Request, steps: Launches, B: int, stride: int, tested: bool
) -> tuple[list[Launch], Scratch]:
    """Return launches of many programs for each row that sampling_look_kernel does not finish.

    tested: whether rows may be tested, (*) of the module's table.
    """
    blocks = triton.cdiv(stride, search.BLOCK.value)
    # At least one program for each row; programs for one row share its blocks.
    grid = {name: (max(B, min(B * blocks, most)),) for name, most in PROGRAMS.items()}
    per = per_row(request)
    common: dict[str, Any] = {
        "B": B,
        "stride": stride,
        "blocks": blocks,
        "ROWS": max(32, triton.next_power_of_2(B)),
        "SEED_PER_ROW": per["SEED_PER_ROW"],
        "OFFSET_PER_ROW": per["OFFSET_PER_ROW"],
        **pdl_options(request.hidden.device),
    }
    scratch: Scratch = {
        "plan_ptr": ((B, PLAN.value), torch.int64),
        "numbers_ptr": ((B, NUMBERS.value), torch.float32),
    }
    launches = []
    if steps.searches:
        scratch["sums_ptr"] = ((B, blocks, search.SECTIONS.value), torch.float32)
        if tested:
            scratch["tops_ptr"] = scratch["before_ptr"] = ((B, blocks), torch.float32)
            scratch["masses_ptr"] = ((B, blocks, 2), torch.int64)
        for turn in range(steps.searches):
            race = tested and turn % 2 == 1
            fixed = {**common, "launch": turn, "RACE": race, "num_warps": ROW_WARPS}
            if turn:
                fixed["before_ptr"] = None
            launches.append(
                Launch(search.sampling_narrow_kernel, grid["race" if race else "search"], fixed)
            )
    if steps.cutoff:
        scratch["gathered_ptr"] = ((B, long_rows.GATHERED.value), torch.int64)
        fixed = {**common, "launch": steps.searches, **CUTOFF}
        launches.append(Launch(long_rows.sampling_cutoff_kernel, grid["cutoff"], fixed))
    fixed = {**common, "launch": steps.searches + steps.cutoff, **RACE}
    launches.append(Launch(long_rows.sampling_race_kernel, grid["race"], fixed))
    return launches, scratch


def is_small(top_k: int | Tensor) -> bool:
    """Return whether all rows share a small top_k: one launch after the fused one is enough."""
    return isinstance(top_k, int) and 0 < top_k <= SMALL_K


def chunk(top_k: int | Tensor) -> int:
    """Return from how many groups one program draws: as many as a small k of all rows needs."""
    if not isinstance(top_k, int) or not is_small(top_k):
        return 128
    return max(32, 1 << (top_k + top_k // 8 - 1).bit_length())
