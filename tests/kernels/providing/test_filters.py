"""Samplers over stored logits in the interpreter: both of akunu, and pivot search."""

from __future__ import annotations

import akunu_chapter as chapter
import pytest
import torch
from flash_sample_cases import counter, normal_logits
from tiers import full

from fsbench import reference
from fsbench.kernels.akunu_exact import akunu_exact
from fsbench.kernels.akunu_faithful import akunu_scores
from fsbench.kernels.group_gumbel_parallel import group_gumbel_parallel
from fsbench.kernels.gumbel_argmax import gumbel_argmax
from fsbench.kernels.pivot_search import pivot_search
from fsbench.kernels.providing.akunu import ROW_PARTS
from fsbench.kernels.providing.filters import AKUNU_ORDER
from fsbench.kernels.truncated.cutoff import GATHERED, RANKED
from fsbench.problem import FILTER_ORDER

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]

SEED, STEP = counter(123), counter(7)
DEFAULTS = {"top_k": 40, "top_p": 0.9}
FILTERS = [
    {},
    DEFAULTS,
    {"top_k": 1},
    {"top_k": 9, "min_p": 0.2},
    {"top_p": 0.5},
    {"top_p": 0.5, "min_p": 0.3},
    {"top_k": 5000, "top_p": 1e-6},
]


def rows_of_logits(V: int) -> torch.Tensor:
    rows = normal_logits(4, V)
    rows[1] = rows[1].round()  # ties
    rows[2] = -3.0
    rows[3, V // 2] = 30.0
    return rows


SAMPLERS = pytest.mark.parametrize(
    ("sampler", "order"),
    [(akunu_exact, AKUNU_ORDER), (pivot_search, FILTER_ORDER)],
    ids=["akunu", "pivot search"],
)


@SAMPLERS
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(("V", "T"), [(1, 1.0), (100, 0.0), (1000, 1.7)])
def test_tokens_are_the_oracles_with_the_declared_order(sampler, order, V, T, filters):
    logits = rows_of_logits(V)
    kept = reference.truncate(logits, T, **filters, order=order)
    expected = reference.expect(logits, SEED, STEP, T, truncation=kept)
    assert expected.accepts(sampler(logits, SEED, STEP, T, **filters)).all()


@SAMPLERS
def test_filters_of_every_row(sampler, order):
    logits = rows_of_logits(300)
    filters = {
        "top_k": torch.tensor([5, 0, 7, 0], dtype=torch.int32),
        "top_p": torch.tensor([1.0, 0.3, 0.5, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.1]),
    }
    kept = reference.truncate(logits, 2.0, **filters, order=order)
    expected = reference.expect(logits, SEED, STEP, 2.0, truncation=kept)
    assert expected.accepts(sampler(logits, SEED, STEP, 2.0, **filters)).all()


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def assert_expected(logits: torch.Tensor, temperature: float = 1.0, **filters: float) -> None:
    """akunu_exact draws what the reference says."""
    kept = reference.truncate(logits, temperature, **filters, order=AKUNU_ORDER)
    expected = reference.expect(logits, SEED, STEP, temperature, truncation=kept)
    assert expected.accepts(akunu_exact(logits, SEED, STEP, temperature, **filters)).all()


@DTYPES
@pytest.mark.parametrize(("turns", "more"), [(0, 9), (1, -1), (1, 9), full(2, 0)])
def test_akunu_finds_the_largest_at_the_ends_of_its_reads(dtype, turns, more):
    wide = 16 // dtype.itemsize
    V = max(turns * ROW_PARTS.value * wide + more, 3)
    logits = normal_logits(2, V)
    starts = [turn * ROW_PARTS.value * wide for turn in range(turns)]
    ends = (0, wide, V // wide * wide, V - 1, *starts, *(start - 1 for start in starts))
    ends = [token for token in ends if 0 <= token < V]
    logits[0, ends] = 40.0
    logits[1, ends] = torch.linspace(30.0, 32.0, len(ends))
    logits = logits.to(dtype)
    for k in (1, len(set(ends)), 40):
        assert_expected(logits, top_k=k, top_p=0.9)


@pytest.mark.parametrize("step", [1, 5], ids=["neighbors", "spread"])
@pytest.mark.parametrize("limit", [RANKED.value, full(GATHERED.value)])
def test_akunu_with_equal_logits_up_to_its_limit_and_beyond(limit, step):
    """The cutoff is among them, so all of them are gathered."""
    logits = normal_logits(3, 21_000) / 4
    logits[:, 20_000] = 9.0
    for row, equal in enumerate((limit - 2, limit - 1, limit)):
        logits[row, 100 : 100 + step * equal : step] = 6.0
    for k in (2, limit - 5):
        assert_expected(logits, 5.0, top_k=k, top_p=0.7)
    assert_expected(logits, top_k=limit - 5)


@pytest.mark.parametrize("k", [ROW_PARTS.value - 1, ROW_PARTS.value])
def test_akunu_with_many_kept(k):
    logits = normal_logits(2, 20_011).bfloat16()
    assert_expected(logits, 3.0, top_k=k, top_p=0.6, min_p=0.1)
    assert_expected(logits, 3.0, top_k=k, min_p=0.02)


@pytest.mark.parametrize("T", [0.0, 1.0])
def test_akunu_with_few_finite_logits(T):
    logits = torch.full((4, 40_000), -torch.inf)
    logits[0, [3, 17_000, 39_999]] = torch.tensor([1.0, 2.0, 2.0])
    logits[1, 39_999] = -1e38
    logits[2, 16_384:16_400] = torch.linspace(-3.4e38, 0, 16)
    logits[3, ::4096] = -2.0
    for filters in ({"top_k": 2}, {"top_k": 3, "top_p": 0.6}, {"top_k": 50}, {"top_p": 0.5}):
        assert_expected(logits, T, **filters)


@DTYPES
def test_akunu_draws_nothing_from_a_row_with_one_bad_logit(dtype):
    logits = normal_logits(6, 33_001)
    logits[0, 0], logits[1, 33_000], logits[2, 32_768] = torch.nan, -torch.nan, torch.inf
    logits[3, 5::8] = torch.nan
    tokens = akunu_exact(logits.to(dtype), SEED, STEP, 1.0, top_k=50, top_p=0.9)
    assert (tokens[:4] == -1).all() and (tokens[4:] >= 0).all()


def test_a_pivot_that_is_too_high_is_lowered():
    """Two logits are far above the others, so fewer than k logits reach the estimate."""
    V = GATHERED.value + 900
    logits = torch.full((3, V), -5.0)
    logits[0, [7, V - 1]] = 40.0
    logits[1, ::2] = -5.5
    logits[2, 5] = -torch.inf
    for filters in ({"top_k": 20}, {"top_k": 20, "top_p": 0.5}):
        kept = reference.truncate(logits, **filters)
        expected = reference.expect(logits, SEED, STEP, truncation=kept)
        assert expected.accepts(pivot_search(logits, SEED, STEP, 1.0, **filters)).all()


@SAMPLERS
@pytest.mark.parametrize("T", [0.0, 1.0])
def test_undefined_rows_have_no_token(sampler, order, T):
    logits = rows_of_logits(200)
    logits[0, 3], logits[1] = torch.nan, -torch.inf
    tokens = sampler(logits, SEED, STEP, T, **DEFAULTS)
    assert tokens[:2].tolist() == [-1, -1] and (tokens[2:] >= 0).all()


def test_the_hash_and_its_uniforms_are_the_published_ones():
    """The chapter's three lines, with Python's integers."""
    for row, token in ((0, 0), (0, 77), (2, 5)):
        state = ((7 + 123 + row * 0x9E3779B9) % 2**32 * 2654435761 + token) % 2**32
        state = (state * 747796405 + 2891336453) % 2**32
        word = ((state >> ((state >> 28) + 4)) ^ state) * 277803737 % 2**32
        u = ((word >> 22) ^ word) / 2**32
        assert float(chapter.uniforms(123, 7, 3, 100)[row, token]) == u


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(("V", "T"), [(100, 1.0), (5003, 0.8)])
def test_faithful_has_the_arithmetic_of_the_chapter(V, T, filters):
    logits = rows_of_logits(V)
    scores = akunu_scores(logits, SEED, STEP, T, **filters)
    assert scores.dtype == torch.float16
    assert torch.equal(scores > -torch.inf, chapter.kept(logits, **filters))
    u = chapter.uniforms(123, 7, 4, V)
    expected = chapter.scores(logits, u, T).float()
    near = torch.isclose(scores.float(), expected, rtol=2e-3, atol=2e-3)
    assert near[scores > -torch.inf].all()


def test_faithful_keeps_less_than_it_should():
    logits = normal_logits(8, 5000)
    exact = reference.truncate(logits, top_p=0.9, order=AKUNU_ORDER).kept.sum(1)
    assert (chapter.kept(logits, top_p=0.9).sum(1) < exact).all(), "the crossing token is cut"
    close = torch.linspace(0, 0.005, 20).expand(1, 20)  # within one step of the bisection
    assert chapter.kept(close, top_k=5).sum() != 5


def by_groups(logits, seed, offset, temperature, **_):
    return group_gumbel_parallel(logits, seed, offset, temperature)[0]


def in_one_pass(logits, seed, offset, temperature, **_):
    return gumbel_argmax(logits, seed, offset, temperature)


@pytest.mark.parametrize("draw", [akunu_exact, pivot_search, akunu_scores, by_groups, in_one_pass])
def test_rows_may_be_those_of_a_wider_tensor(draw):
    wide = torch.full((4, 192), 1e4)
    wide[:, :130] = rows_of_logits(130)
    logits = wide[:, :130]
    expected = draw(logits.contiguous(), SEED, STEP, 0.8, **DEFAULTS)
    assert torch.equal(draw(logits, SEED, STEP, 0.8, **DEFAULTS), expected)
