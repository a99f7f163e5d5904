"""Truncated sampling: the reference's kept sets against a definition by hand, and its penalties."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from fsbench import reference
from fsbench.problem import FILTER_ORDER, Problem
from fsbench.provider import Capabilities, Kind, Provider

INF, NAN = math.inf, math.nan


def kept(logits, T=1.0, **filters) -> list[int]:
    """The tokens that are kept of one row."""
    row = torch.tensor([logits], dtype=torch.float64)
    return reference.truncate(row, T, **filters).kept[0].nonzero()[:, 0].tolist()


def probabilities(*p: float) -> list[float]:
    return [math.log(value) for value in p]


def by_hand(row: list[float], T: float, k: int, p: float, min_p: float) -> list[int]:
    """FILTER_ORDER token by token, in Python's floats."""
    ranked = sorted((v for v in range(len(row)) if row[v] > -INF), key=lambda v: (-row[v], v))
    largest = row[ranked[0]]
    weight = {v: math.exp((row[v] - largest) / T) for v in ranked}
    if min_p > 0:
        ranked = [v for v in ranked if weight[v] >= min_p]
    if k > 0:
        ranked = ranked[:k]
    total = math.fsum(weight[v] for v in ranked)
    if p < 1:
        while len(ranked) > 1 and math.fsum(weight[v] for v in ranked[:-1]) >= p * total:
            ranked.pop()
    return sorted(ranked)


def test_kept_sets_are_those_of_the_definition():
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        V = int(torch.randint(1, 40, (1,), generator=generator))
        # Few different values, so that logits are tied at every boundary.
        row = torch.randint(-4, 5, (V,), generator=generator).double() * 0.7
        row[torch.rand(V, generator=generator) < 0.2] = -INF
        row[V // 2] = 1.0
        sizes = (0, 1, 3, V, V + 5)
        cases = [*product((0.5, 1.0, 3.0), sizes, (1.0, 0.91, 0.5, 1e-9), (0.0, 0.11, 1.0))]
        T, k, p, min_p = torch.tensor(cases, dtype=torch.float64).T
        truncation = reference.truncate(
            row.expand(len(cases), -1), T, top_k=k, top_p=p, min_p=min_p
        )
        for case, mask in zip(cases, truncation.kept, strict=True):
            assert mask.nonzero()[:, 0].tolist() == by_hand(row.tolist(), *case), case


def test_ties_at_the_boundary_go_to_the_lower_token():
    assert kept([0.0, 1.0, 1.0, 1.0, 2.0], top_k=3) == [1, 2, 4]
    assert kept([0.0, 1.0, 1.0, 1.0, 2.0], top_k=3, keeps_ties=True) == [1, 2, 3, 4]
    assert kept(probabilities(0.4, 0.3, 0.3), top_k=2) == [0, 1]
    assert kept(probabilities(0.25, 0.25, 0.25, 0.25), top_p=0.5) == [0, 1]
    assert kept([5.0] * 4, min_p=1.0) == [0, 1, 2, 3], "equal to the largest, all of them"


def test_the_token_that_crosses_p_is_kept_and_one_always_is():
    row = probabilities(0.5, 0.3, 0.15, 0.05)
    assert kept(row, top_p=0.6) == [0, 1]
    assert kept(row, top_p=0.81) == [0, 1, 2]
    for p in (1e-300, 0.0, -1.0):
        assert kept(row, top_p=p) == [0]
    assert kept(row, min_p=2.0) == [0], "as 1"


@pytest.mark.parametrize("off", [{}, {"top_k": 0}, {"top_k": 9}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_a_filter_that_is_off_keeps_all_but_forbidden_tokens(off):
    assert kept([0.0, -INF, -80.0, 3.0], **off) == [0, 2, 3]


def test_p_at_round_numbers_is_reached():
    """Whatever rounding makes of the logits, of p and of the sum: peers keep as many."""
    row = torch.tensor([probabilities(0.5, 0.3, 0.1, 0.1)])
    for p in (0.8, torch.tensor([0.8]), torch.tensor([0.8], dtype=torch.float64)):
        for logits in (row, row.double(), row - 3.7):
            assert reference.truncate(logits, top_p=p).kept.sum() == 2
    for N in range(2, 40):
        ps = torch.arange(1, N).double() / N
        for p in (ps, ps.float()):
            counts = reference.truncate(torch.zeros(N - 1, N), top_p=p).kept.sum(1)
            assert counts.tolist() == list(range(1, N))
    for N in (3, 7, 39):
        assert [len(kept([0.3] * N, top_p=n / N)) for n in range(1, N)] == list(range(1, N))
    # A p that is a number is not rounded to fp32: this one is just above one half.
    assert len(kept([0.0] * 2, top_p=0.5 + 2.0**-20)) == 2


def test_top_p_depends_on_the_order_of_filters():
    row = probabilities(0.4, 0.3, 0.2, 0.1)
    # Of the three that top-k keeps, the first two have 0.78; of all, 0.7.
    assert kept(row, top_k=3, top_p=0.75) == [0, 1]
    joint = ("temperature", "top_p", "top_k", "min_p")
    assert kept(row, top_k=3, top_p=0.75, order=joint) == [0, 1, 2]
    # At T = 1 the first token has 0.4; at T = 4 it takes two to have 0.39.
    late = ("min_p", "top_k", "top_p", "temperature")
    assert kept(row, 4.0, top_p=0.39) == [0, 1]
    assert kept(row, 4.0, top_p=0.39, order=late) == [0]


def test_every_row_has_its_own():
    rows = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 5, dtype=torch.float64)
    truncation = reference.truncate(
        rows,
        torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]),
        top_k=torch.tensor([2, 0, 0, 3, -1]),
        top_p=torch.tensor([1.0, 0.5, 1.0, 1.0, 2.0]),
        min_p=torch.tensor([0.0, 0.0, 0.3, 0.0, -1.0]),
    )
    assert truncation.kept.sum(1).tolist() == [2, 1, 2, 1, 4]


def test_rows_without_a_draw_keep_nothing():
    rows = torch.tensor([[1.0, NAN], [1.0, INF], [-INF, -INF], [1.0, 2.0], [1.0, 2.0], [1.0, 2.0]])
    truncation = reference.truncate(
        rows,
        torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, 1.0]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 1.0, NAN, 1.0]),
        top_k=1,
    )
    assert truncation.kept.sum(1).tolist() == [0, 0, 0, 0, 0, 1]
    step = torch.tensor([0])
    expected = reference.expect(rows, step, step, truncation=truncation)
    assert expected.tokens.tolist() == [-1] * 5 + [1]


def test_bounds_enclose_the_effect_of_rounded_logits():
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(6, 60, generator=generator, dtype=torch.float64)
    error = 0.01
    filters = {"top_k": 20, "top_p": 0.8, "min_p": 0.02}
    for order in (FILTER_ORDER, ("top_p", "temperature", "top_k", "min_p")):
        for name, value in [*filters.items(), (None, None)]:
            chosen = filters if name is None else {name: value}
            bounds = reference.truncate(rows, 0.7, **chosen, order=order, logits_error=error)
            changed = False
            for _ in range(40):
                noise = error * (2 * torch.rand(rows.shape, generator=generator) - 1)
                other = reference.truncate(rows + noise, 0.7, **chosen, order=order).kept
                assert not (other & ~bounds.possibly).any()
                assert not (bounds.surely & ~other).any()
                changed |= bool((other != bounds.kept).any())
            assert changed
            assert (bounds.possibly & ~bounds.surely).float().mean() < 0.3


def test_top_k_of_exact_logits_leaves_nothing_to_rounding():
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    truncation = reference.truncate(rows, top_k=7)
    assert torch.equal(truncation.surely, truncation.kept) and torch.equal(
        truncation.possibly, truncation.kept
    )


def test_the_expected_token_is_the_best_of_the_kept():
    rows = torch.randn(64, 50, generator=torch.Generator().manual_seed(2))
    seed, step = torch.tensor([5]), torch.tensor([9])
    truncation = reference.truncate(rows, 2.0, top_k=4)
    masked = rows.masked_fill(~truncation.kept, -INF)
    expected = reference.expect(rows, seed, step, 2.0, truncation=truncation)
    assert torch.equal(expected.tokens, reference.expect(masked, seed, step, 2.0).tokens)
    assert not (expected.acceptable & ~truncation.kept).any()
    assert expected.accepts(expected.tokens).all()


def test_under_group_noise_the_draw_from_all_tokens_is_taken_if_kept():
    rows = torch.randn(512, 50, generator=torch.Generator().manual_seed(2))
    seed, step = torch.tensor([5]), torch.tensor([9])
    truncation = reference.truncate(rows, top_k=10)
    first = reference.expect(rows, seed, step, noise="group")
    second = reference.expect(rows, seed, step, truncation=truncation)
    both = reference.expect(rows, seed, step, noise="group", truncation=truncation)
    is_kept = truncation.kept.gather(1, first.tokens[:, None])[:, 0]
    assert 0.3 < is_kept.float().mean() < 0.9
    assert torch.equal(both.tokens, torch.where(is_kept, first.tokens, second.tokens))
    assert torch.equal(both.scores, torch.where(is_kept, first.scores, second.scores))
    assert not (both.acceptable & ~truncation.kept).any() and both.accepts(both.tokens).all()
    assert not both.accepts(torch.where(is_kept, second.tokens, first.tokens)).all()
    # Where rounding may have cut the first draw off, either is right.
    doubtful = reference.truncate(rows, top_k=10, logits_error=0.05)
    both = reference.expect(rows, seed, step, noise="group", truncation=doubtful)
    is_unsure = ~doubtful.surely.gather(1, first.tokens[:, None])[:, 0]
    is_unsure &= doubtful.possibly.gather(1, first.tokens[:, None])[:, 0]
    assert is_unsure.any()
    assert both.acceptable.gather(1, first.tokens[:, None])[:, 0][is_unsure].all()
    assert both.acceptable.gather(1, second.tokens[:, None])[:, 0][is_unsure].all()


def test_two_draws_have_the_distribution_of_one_from_the_kept_tokens():
    row = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5]]).expand(20_000, -1)
    truncation = reference.truncate(row, top_p=0.7)
    tokens = reference.expect(
        row, torch.tensor([1]), torch.tensor([2]), noise="group", truncation=truncation
    ).tokens
    p = reference.filtered_probabilities(row[:1], reference.truncate(row[:1], top_p=0.7))[0]
    counts = torch.bincount(tokens, minlength=6).double()
    assert (counts[p == 0] == 0).all()
    assert ((counts / 20_000 - p).abs() < 5 * (p * (1 - p) / 20_000).sqrt() + 1e-12).all()


def test_filtered_probabilities_are_the_softmax_of_the_kept_tokens():
    row = torch.tensor([probabilities(0.5, 0.25, 0.15, 0.1)], dtype=torch.float64)
    p = reference.filtered_probabilities(row, reference.truncate(row, top_k=2))
    assert p[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0, 0.5, -INF]])
    prompt = reference.token_counts([[0, 1, 1, 5]], 6)
    output = reference.token_counts([[1, 2, 2, 2, 5]], 6)
    changed = reference.penalized(
        logits, prompt, output, repetition=2.0, presence=0.25, frequency=0.5
    )
    expected = [1.0, -4.0 - 0.75, 0.5 - 1.75, -1.0, 0.5, -INF]
    assert changed[0].tolist() == expected
    same = reference.penalized(logits, prompt, output)
    assert torch.equal(same, logits)


def test_penalties_of_every_row():
    logits = torch.ones(2, 3)
    counts = reference.token_counts([[0], [0]], 3)
    changed = reference.penalized(
        logits, counts, counts, repetition=torch.tensor([2.0, 1.0]), presence=torch.tensor([0, 1.0])
    )
    assert changed.tolist() == [[0.5, 1.0, 1.0], [0.0, 1.0, 1.0]]


def test_a_problem_names_its_filters():
    assert Problem(1, 2, 3).filters == ()
    assert Problem(1, 2, 3, top_p=0.9, min_p=0.1).filters == ("top_p", "min_p")
    assert str(Problem(1, 2, 3, top_k=50, top_p=0.9)).endswith("normal:1 top_k=50 top_p=0.9")
    mixed = Problem(5, 2, 3, top_k=50, top_p=0.9, min_p=0.1, mixed=True)
    rows = [(50, 0.9, 0.1), (50, 1.0, 0.0), (0, 0.9, 0.1), (0, 1.0, 0.0), (50, 0.9, 0.1)]
    assert mixed.row_filters() == rows
    assert Problem(2, 2, 3, top_k=7).row_filters() == [(7, 1.0, 0.0)] * 2


def provider(kind: Kind, **able) -> Provider:
    return Provider("made_up", "", kind, lambda *_: None, capabilities=Capabilities(**able))


def test_only_samplers_with_these_filters_run_on_a_truncated_problem():
    truncated = Problem(4, 64, 1000, top_k=50, min_p=0.1)
    mixed = Problem(4, 64, 1000, top_k=50, mixed=True)
    plain = provider(Kind.EXACT)
    assert plain.unsupported_reason(truncated) == "does not apply top_k, min_p"
    some = provider(Kind.EXACT, filters=("top_k", "top_p"))
    assert some.unsupported_reason(truncated) == "does not apply min_p"
    assert some.unsupported_reason(mixed) == "takes the same filters for all rows"
    able = provider(Kind.TRUNCATED, filters=("top_k", "top_p", "min_p"), mixed_filters=True)
    for problem in (truncated, mixed, Problem(4, 64, 1000)):
        assert able.unsupported_reason(problem) is None
    assert "temperature 0" in able.unsupported_reason(Problem(4, 64, 1000, temperature=0.0))
    for kind in (Kind.GREEDY, Kind.LOWER_BOUND):  # the same with any filter
        assert provider(kind).unsupported_reason(truncated) is None
        assert provider(kind).kind_on(truncated) is kind
    assert some.kind_on(truncated) is Kind.TRUNCATED
    assert some.kind_on(Problem(4, 64, 1000)) is Kind.EXACT
