"""Top-p without top-k: tokens are tested, and drawn again, until one is kept; no cutoff."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from flash_sample_cases import SEED, counter, normal_logits, stored
from tiers import first_quick, full
from truncated_cases import check

from fsbench import reference
from fsbench.kernels import flash_sample, truncated_sample
from fsbench.kernels.device.stored_logits import StoredLogits, largest_of_groups, stride_for
from fsbench.kernels.launch import launch_cache
from fsbench.kernels.launch.request import Filters, checked_request
from fsbench.kernels.launch.result import TruncatedSample
from fsbench.kernels.truncated import launch as launches
from fsbench.kernels.truncated import search as search_kernels
from fsbench.kernels.truncated import top_p as alone

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]

V = 4_200
"""Three blocks, the last one of less than half."""
LOGITS = {
    "normal": lambda B: normal_logits(B, V),
    "flat": lambda B: torch.zeros(B, V),
    "two levels": lambda B: (torch.arange(B * V).view(B, V) % 3 == 0).float() * 2.0,
}


@pytest.mark.parametrize("logits", first_quick(LOGITS))
def test_tokens_are_those_that_a_cutoff_keeps(logits):
    """`check` also requests the kept tokens, which cutoffs decide: the tokens must be equal."""
    p = torch.tensor([0.9, 0.5, 0.1, 1e-3, -1.0, 1.0])
    check(**stored(LOGITS[logits](6)), top_p=p)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": torch.tensor([0.0, 0.5, 2.0, 1.0]), "offset": counter(3, 4, 5, 6)},
        full({"seed": counter(3, 4, 5, 6), "noise": "token"}),
    ],
    ids=str,
)
def test_every_number_may_differ_by_row(changes):
    check(**stored(normal_logits(4, V)), top_p=0.3, **changes)


def test_rows_without_a_draw_are_minus_one_and_disturb_no_other():
    logits = normal_logits(6, 300)
    logits[1, 7] = math.nan
    logits[2, 7] = math.inf
    call = {**stored(logits), "seed": SEED}
    call["mask"] = torch.ones(6, 300, dtype=torch.bool)
    call["mask"][3] = False
    p = torch.tensor([0.5, 0.5, 0.5, 0.5, math.nan, 0.5])
    sample = truncated_sample(**call, top_p=p)
    assert sample.valid.tolist() == [True, False, False, False, False, True]
    assert sample.tokens[1:5].tolist() == [-1] * 4
    whole = truncated_sample(**call, top_p=p, return_kept=True)
    assert sample.tokens.tolist() == whole.tokens.tolist()


@pytest.mark.parametrize(("before", "valid"), [(1e30, False), (torch.nan, True)])
@pytest.mark.parametrize(
    "filters", [{"top_p": [0.9, 0.85]}, {"top_p": [0.9, 0.3], "top_k": [0, 3]}]
)
def test_rows_without_a_draw_from_all_tokens_are_valid(filters, before, valid):
    """The screened head makes such rows. Memory before the logits, and `valid`, are poisoned."""
    B = 2
    stride = stride_for(V)
    memory = torch.full((stride + B * stride,), before)
    logits = memory[stride:].view(B, stride)
    logits[:] = -torch.inf
    logits[:, :V] = normal_logits(B, V)
    numbers = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    numbers |= {
        n: torch.tensor(x, dtype=torch.int32 if n == "top_k" else torch.float32)
        for n, x in filters.items()
    }
    off = dict.fromkeys(("offset", "soft_cap", "bias", "mask"))
    request = checked_request(
        torch.zeros(B, 16), torch.zeros(V, 16), seed=SEED, temperature=1.0, vocab_size=V,
        noise="token", **off,
    )  # fmt: skip
    tokens = torch.full((B,), -1, dtype=torch.int64)
    sample = TruncatedSample(tokens, torch.full((B,), valid))
    poisoned = StoredLogits(logits, largest_of_groups(logits))
    launches.finish(request, poisoned, Filters(**numbers), None, sample)
    y = logits[:, :V]
    kept = reference.truncate(y, 1.0, **numbers)
    expected = reference.expect(y, SEED, request.steps(), 1.0, "token", truncation=kept)
    assert sample.tokens.tolist() == expected.tokens.tolist()
    assert sample.valid.tolist() == [True, True]


@pytest.mark.parametrize(("tests", "programs"), [(1, 1), full(2, 10_000)])
def test_neither_tests_nor_programs_matter(tests, programs):
    call = {**stored(normal_logits(6, V)), "seed": SEED, "top_p": 0.3}
    expected = truncated_sample(**call)
    assert (expected.tokens != flash_sample(**stored(normal_logits(6, V)), seed=SEED).tokens).any()
    shares = dict.fromkeys(alone.PROGRAMS, programs)
    with (
        mock.patch.object(launch_cache, "LAUNCHES", {}),  # no key has the number of programs
        mock.patch.object(launches, "tests_needed", lambda top_p, B: tests),
        mock.patch.dict(alone.PROGRAMS, shares),
    ):
        assert torch.equal(truncated_sample(**call).tokens, expected.tokens)


EACH = {
    "top_k": torch.tensor([0, 0, 0, 20, 0, 2_000, V, 0]),
    "top_p": torch.tensor([0.9, 1.0, 0.9, 0.9, 0.1, 0.5, 0.85, 0.8]),
    "min_p": torch.tensor([0.0, 0.0, 2e-4, 0.0, 0.0, 0.0, 0.0, 1e-3]),
}
"""Filters of rows; of V tokens with normal logits a min_p of 2e-4 keeps most, and 1e-3 fewer."""


@pytest.mark.full
@pytest.mark.parametrize("logits", ["two levels"])
def test_a_row_of_tensors_has_the_token_of_the_same_numbers(logits):
    B = len(EACH["top_k"])
    row, T = LOGITS[logits](1), torch.linspace(0.5, 1.5, B)
    seeds = counter(3).expand(B).contiguous()  # one for each row, so that noise ignores the row
    drawn = truncated_sample(
        **stored(row.expand(B, V).contiguous()), seed=seeds, temperature=T, **EACH
    )
    for i in range(B):
        numbers = {name: values[i].item() for name, values in EACH.items()}
        single = truncated_sample(
            **stored(row), seed=counter(3), temperature=T[i].item(), **numbers
        )
        assert single.tokens[0] == drawn.tokens[i], numbers


@pytest.mark.full
def test_the_last_program_goes_on_until_a_token_is_kept():
    """Rows of tensors have three tests; with two of them, one row in fifty is not finished."""
    B = 40
    call = {**stored(normal_logits(B, 300)), "seed": SEED}
    expected = truncated_sample(**call, top_p=0.8).tokens
    first_kept = mock.Mock(side_effect=alone._first_kept)
    with (
        mock.patch.object(launches, "TESTED_SEARCHES", 1),
        mock.patch.object(alone, "_first_kept", first_kept),
    ):
        drawn = truncated_sample(**call, top_p=torch.full((B,), 0.8)).tokens
    assert torch.equal(drawn, expected) and first_kept.called


@pytest.mark.full
def test_a_draw_below_the_threshold_of_min_p_is_not_kept():
    """Min-p keeps hundreds of tokens, in more groups than one program draws from."""
    B = 4
    filters = {"top_p": torch.full((B,), 0.9), "min_p": torch.full((B,), 0.05)}
    logits = normal_logits(B, V, sigma=1.0)
    first = flash_sample(**stored(logits), seed=SEED).tokens
    sample = check(**stored(logits), **filters)
    assert sample.kept.median() > 500 and (first != sample.tokens).sum() > B // 4


@pytest.mark.full
def test_rows_of_tensors_without_top_k_are_not_searched():
    """Except for a small p, and if a field that depends on the cutoff is requested."""
    B = 3
    call = {**stored(normal_logits(B, V)), "seed": SEED, "top_k": torch.zeros(B).int()}
    call |= {"min_p": torch.tensor([0.0, 1e-4, 0.0])}
    search = mock.Mock(side_effect=AssertionError("a cutoff is searched for"))
    with mock.patch.object(search_kernels, "_search", search):
        truncated_sample(**call, top_p=torch.full((B,), 0.9))
        for more in ({"top_p": 0.2}, {"top_p": 0.9, "return_kept": True}):
            with pytest.raises(Exception, match="a cutoff is searched for"):
                truncated_sample(**call, **more)


@pytest.mark.parametrize(
    ("B", "p", "n"), [(1, 0.9, 2), (16, 0.9, 3), (64, 0.9, 3), (256, 0.9, 4), (16, 0.5, 5)]
)
def test_the_number_of_tests_leaves_few_rows(B, p, n):
    """Each race keeps a uniform part of the mass before a row's token."""
    generator = torch.Generator().manual_seed(0)
    mass = torch.rand(200_000, 8, generator=generator, dtype=torch.float64).cumprod(1)
    unfinished = B * (mass >= p).double().mean(0)
    assert alone.tests_needed(p, B) == n
    assert unfinished[n - 1] < 0.03 and (n == 2 or unfinished[n - 2] > 0.015)
    assert 0 < alone.tests_needed(0.25, 100_000) < 20
