"""Rows whose tokens are gathered, or shared by many programs, keep the reference's tokens."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from flash_sample_cases import SEED, normal_logits, stored
from tiers import first_quick
from truncated_cases import check

from fsbench.kernels import flash_sample, truncated_sample
from fsbench.kernels.launch import launch_cache
from fsbench.kernels.truncated import launch as launches
from fsbench.kernels.truncated import long_rows
from fsbench.kernels.truncated import race as race_kernels
from fsbench.kernels.truncated.cutoff import NOTHING, WAYS, sums_of_row
from fsbench.kernels.truncated.long_rows import ROW_AT_ONCE

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]


@pytest.mark.full
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": torch.tensor([40, 900, 0]), "top_p": torch.tensor([0.9, 1.0, 0.02])},
        {"min_p": 0.05, "top_p": 0.9},
    ],
    ids=str,
)
def test_tokens_of_many_groups_are_gathered(filters):
    """168 groups have one logit each that may be kept: more than a chunk, but few tokens."""
    blocks = 42
    logits = normal_logits(3, blocks * 128, sigma=0.3) - 6.0
    first = torch.arange(blocks)[:, None] * 128 + 2 * torch.arange(4)  # of each group
    logits[:, first.flatten()] = 1.0 + normal_logits(3, 168, sigma=0.2).round(decimals=1)  # ties
    check(**stored(logits), **filters)


@pytest.mark.full
def test_hundreds_of_tokens_are_drawn_from_in_one_launch():
    """Their groups are up to four chunks."""
    logits = normal_logits(1, 32 * 560)
    reads = mock.Mock(side_effect=AssertionError("a program reads the whole row"))
    more = mock.Mock(side_effect=AssertionError("more launches"))
    with (
        mock.patch.object(race_kernels, "cut_of_row", reads),
        mock.patch.object(launches, "_row_launches", more),
        mock.patch.object(launch_cache, "LAUNCHES", {}),
    ):
        check(**stored(logits), top_k=448, top_p=0.9)


@pytest.mark.full
def test_few_groups_may_have_more_tokens_than_fit():
    logits = torch.zeros(1, 4_300)
    logits[:, 4_100:] = 1.0  # after those that fit
    check(**stored(logits), top_k=448)


@pytest.mark.full
def test_a_program_reads_the_row_again_if_its_tokens_cannot_be_gathered():
    logits = normal_logits(1, 9_000, sigma=0.1)
    check(**stored(logits), top_k=8_700, top_p=0.99, counting_only=True)
    check(**stored(logits), top_k=200, min_p=0.9)


V = 4_900
"""Three blocks, the last one of less than half."""
LOGITS = {
    "normal": lambda: normal_logits(7, V),
    "flat": lambda: torch.zeros(7, V),
    "masked": lambda: normal_logits(7, V).masked_fill(torch.arange(V) % 7 > 0, -torch.inf),
}
EACH = {
    "top_k": torch.tensor([0, 0, 140, 0, 4500, 4500, 2]),
    "top_p": torch.tensor([0.9, 0.3, 0.5, 1.0, 1.0, 0.7, 0.9]),
    "min_p": torch.tensor([0.0, 0.4, 0.0, 0.05, 0.0, 0.0, 0.0]),
}


@pytest.mark.full
@pytest.mark.parametrize("name", LOGITS)
def test_rows_for_many_programs(name):
    """Filters that keep thousands of tokens, by every kind of plan; also where all are tied."""
    logits = LOGITS[name]()
    check(**stored(logits), **EACH)
    check(**stored(logits[:1]), temperature=0.3, top_p=0.8, counting_only=True)


@pytest.mark.full
def test_top_p_alone_adds_up_the_mass_before_the_draw():
    """Rows of three blocks whose draw from all tokens is kept or not, without a cutoff."""
    logits = normal_logits(16, V)
    # Two tokens of probability 0.45 and 0.4: the second one crosses p = 0.6 and so is kept.
    logits[8:] = 0.0
    logits[8:, 7] = math.log(3.0 * (V - 2))
    logits[8:, 4_000] = math.log(0.4 / 0.15 * (V - 2))
    call = stored(logits)
    sample = check(**call, top_p=torch.tensor([0.5, 0.6]).repeat_interleave(8))
    first = flash_sample(**call, seed=SEED).tokens
    assert 0 < (first == sample.tokens)[:8].sum() < 8
    assert (first[8:] == 4_000).any()


@pytest.mark.parametrize("filters", first_quick([{"top_k": 2_300}, {"top_p": 0.5}]), ids=str)
def test_a_token_far_above_the_others_does_not_keep_the_search_from_narrowing(filters):
    """All others are in the first section. If it ended there, each step would read the row."""
    logits = normal_logits(1, V) / 40
    logits[:, 4_000] = 12.0
    search = mock.Mock(side_effect=AssertionError("a program reads the whole row"))
    with mock.patch.object(long_rows, "cut_by_scans", search):
        check(**stored(logits), **filters)


@pytest.mark.full
def test_the_largest_tokens_may_be_neighbors():
    """Few blocks of 128 tokens have them, in each of their groups: these must not be too many."""
    logits = normal_logits(1, 26_700)
    token = torch.arange(13)[:, None] * 128 + torch.arange(0, 8, 2)
    logits[0, token.flatten()] = (30.0 + torch.arange(13)).repeat_interleave(4)
    search = mock.Mock(side_effect=AssertionError("a program reads the whole row"))
    with mock.patch.object(race_kernels, "cut_of_row", search):
        check(**stored(logits), temperature=5.0, top_k=12)


@pytest.mark.parametrize("programs", first_quick([1, 10_000]))
def test_how_many_programs_share_a_row_does_not_matter(programs):
    call = {**stored(normal_logits(7, V)), **EACH, "seed": SEED, "return_kept": True}
    expected = truncated_sample(**call)
    with (
        mock.patch.object(launch_cache, "LAUNCHES", {}),  # no key has the number of programs
        mock.patch.dict(launches.PROGRAMS, dict.fromkeys(launches.PROGRAMS, programs)),
    ):
        sample = truncated_sample(**call)
    assert torch.equal(sample.tokens, expected.tokens) and torch.equal(sample.kept, expected.kept)


@triton.jit
def _sum_up(logits_ptr, masses_ptr, counts_ptr, V, BLOCK: tl.constexpr):
    t = tl.zeros((WAYS,), tl.int64) + NOTHING
    counts, masses = sums_of_row(logits_ptr, V, t, 0.0, 1.0, BLOCK)
    way = tl.arange(0, WAYS)
    tl.store(masses_ptr + way, masses)
    tl.store(counts_ptr + way, counts)


def test_the_mass_of_a_row_is_within_its_bound():
    """In one sum per lane, this many equal masses would have an error of 2^-17."""
    n, y = 2**18, -0.0003
    masses, counts = torch.empty(4), torch.empty(4, dtype=torch.int32)
    _sum_up[(1,)](torch.full((n,), y), masses, counts, n, ROW_AT_ONCE)
    exact = n * 2.0 ** float(torch.tensor(y))
    assert counts.tolist() == [n] * 4
    assert ((masses.double() - exact).abs() <= 2.0**-18 * exact).all()
