"""Truncated sampling: the reference's kept sets against a definition by hand, and its penalties."""

from __future__ import annotations

import math

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


@pytest.mark.parametrize("seed", range(40))
def test_kept_sets_are_those_of_the_definition(seed):
    generator = torch.Generator().manual_seed(seed)
    V = int(torch.randint(1, 40, (1,), generator=generator))
    # Few different values, so that ties stand at every boundary.
    row = torch.randint(-4, 5, (V,), generator=generator).double() * 0.7
    row[torch.rand(V, generator=generator) < 0.2] = -INF
    row[V // 2] = 1.0
    for T in (0.5, 1.0, 3.0):
        for k in (0, 1, 3, V, V + 5):
            for p in (1.0, 0.91, 0.5, 1e-9):
                for min_p in (0.0, 0.11, 1.0):
                    found = kept(row.tolist(), T, top_k=k, top_p=p, min_p=min_p)
                    assert found == by_hand(row.tolist(), T, k, p, min_p), (T, k, p, min_p)


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
def test_what_is_off_keeps_everything_but_forbidden_tokens(off):
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
            found = reference.truncate(torch.zeros(N - 1, N), top_p=p).kept.sum(1)
            assert found.tolist() == list(range(1, N))
        assert [len(kept([0.3] * N, top_p=n / N)) for n in range(1, N)] == list(range(1, N))
    # A p as a number is not rounded: this is more than half, by less than fp32 could tell.
    assert len(kept([0.0] * 2, top_p=0.5 + 2.0**-20)) == 2


def test_the_order_decides_what_p_is_a_part_of():
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
    found = reference.truncate(
        rows,
        torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]),
        top_k=torch.tensor([2, 0, 0, 3, -1]),
        top_p=torch.tensor([1.0, 0.5, 1.0, 1.0, 2.0]),
        min_p=torch.tensor([0.0, 0.0, 0.3, 0.0, -1.0]),
    )
    assert found.kept.sum(1).tolist() == [2, 1, 2, 1, 4]


def test_rows_without_a_draw_keep_nothing():
    rows = torch.tensor([[1.0, NAN], [1.0, INF], [-INF, -INF], [1.0, 2.0], [1.0, 2.0], [1.0, 2.0]])
    found = reference.truncate(
        rows,
        torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, 1.0]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 1.0, NAN, 1.0]),
        top_k=1,
    )
    assert found.kept.sum(1).tolist() == [0, 0, 0, 0, 0, 1]
    step = torch.tensor([0])
    expected = reference.expect(rows, step, step, truncation=found)
    assert expected.tokens.tolist() == [-1] * 5 + [1]


def test_bounds_enclose_what_rounding_of_the_logits_does():
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(6, 60, generator=generator, dtype=torch.float64)
    error = 0.01
    filters = {"top_k": 20, "top_p": 0.8, "min_p": 0.02}
    for order in (FILTER_ORDER, ("top_p", "temperature", "top_k", "min_p")):
        for name, value in [*filters.items(), (None, None)]:
            chosen = filters if name is None else {name: value}
            bounds = reference.truncate(rows, 0.7, **chosen, order=order, logits_error=error)
            moved_somewhere = False
            for _ in range(40):
                noise = error * (2 * torch.rand(rows.shape, generator=generator) - 1)
                other = reference.truncate(rows + noise, 0.7, **chosen, order=order).kept
                assert not (other & ~bounds.possibly).any()
                assert not (bounds.surely & ~other).any()
                moved_somewhere |= bool((other != bounds.kept).any())
            assert moved_somewhere
            assert (bounds.possibly & ~bounds.surely).float().mean() < 0.3


def test_top_k_of_exact_logits_leaves_nothing_to_rounding():
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    found = reference.truncate(rows, top_k=7)
    assert torch.equal(found.surely, found.kept) and torch.equal(found.possibly, found.kept)


def test_the_expected_token_is_the_best_of_the_kept():
    rows = torch.randn(64, 50, generator=torch.Generator().manual_seed(2))
    seed, step = torch.tensor([5]), torch.tensor([9])
    found = reference.truncate(rows, 2.0, top_k=4)
    masked = rows.masked_fill(~found.kept, -INF)
    expected = reference.expect(rows, seed, step, 2.0, truncation=found)
    assert torch.equal(expected.tokens, reference.expect(masked, seed, step, 2.0).tokens)
    assert not (expected.acceptable & ~found.kept).any()
    assert expected.accepts(expected.tokens).all()


def test_under_group_noise_the_draw_from_all_stands_if_it_is_kept():
    rows = torch.randn(512, 50, generator=torch.Generator().manual_seed(2))
    seed, step = torch.tensor([5]), torch.tensor([9])
    found = reference.truncate(rows, top_k=10)
    first = reference.expect(rows, seed, step, noise="group")
    second = reference.expect(rows, seed, step, truncation=found)
    both = reference.expect(rows, seed, step, noise="group", truncation=found)
    stands = found.kept.gather(1, first.tokens[:, None])[:, 0]
    assert 0.3 < stands.float().mean() < 0.9
    assert torch.equal(both.tokens, torch.where(stands, first.tokens, second.tokens))
    assert torch.equal(both.scores, torch.where(stands, first.scores, second.scores))
    assert not (both.acceptable & ~found.kept).any() and both.accepts(both.tokens).all()
    assert not both.accepts(torch.where(stands, second.tokens, first.tokens)).all()
    # Where rounding may have cut the first draw off, either is right.
    doubtful = reference.truncate(rows, top_k=10, logits_error=0.05)
    both = reference.expect(rows, seed, step, noise="group", truncation=doubtful)
    unsure = ~doubtful.surely.gather(1, first.tokens[:, None])[:, 0]
    unsure &= doubtful.possibly.gather(1, first.tokens[:, None])[:, 0]
    assert unsure.any()
    assert both.acceptable.gather(1, first.tokens[:, None])[:, 0][unsure].all()
    assert both.acceptable.gather(1, second.tokens[:, None])[:, 0][unsure].all()


def test_two_draws_have_the_law_of_one_from_the_kept():
    row = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5]]).expand(20_000, -1)
    found = reference.truncate(row, top_p=0.7)
    tokens = reference.expect(
        row, torch.tensor([1]), torch.tensor([2]), noise="group", truncation=found
    ).tokens
    law = reference.filtered_probabilities(row[:1], reference.truncate(row[:1], top_p=0.7))[0]
    counts = torch.bincount(tokens, minlength=6).double()
    assert (counts[law == 0] == 0).all()
    assert ((counts / 20_000 - law).abs() < 5 * (law * (1 - law) / 20_000).sqrt() + 1e-12).all()


def test_filtered_probabilities_are_the_softmax_of_what_is_kept():
    row = torch.tensor([probabilities(0.5, 0.25, 0.15, 0.1)], dtype=torch.float64)
    p = reference.filtered_probabilities(row, reference.truncate(row, top_k=2))
    torch.testing.assert_close(p, torch.tensor([[2 / 3, 1 / 3, 0, 0]], dtype=torch.float64))


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0, 0.5, -INF]])
    prompt = reference.token_counts([[0, 1, 1, 5]], 6)
    output = reference.token_counts([[1, 2, 2, 2, 5]], 6)
    found = reference.penalized(
        logits, prompt, output, repetition=2.0, presence=0.25, frequency=0.5
    )
    wanted = [1.0, -4.0 - 0.75, 0.5 - 1.75, -1.0, 0.5, -INF]
    assert found[0].tolist() == wanted
    same = reference.penalized(logits, prompt, output)
    assert torch.equal(same, logits)


def test_penalties_of_every_row():
    logits = torch.ones(2, 3)
    counts = reference.token_counts([[0], [0]], 3)
    found = reference.penalized(
        logits, counts, counts, repetition=torch.tensor([2.0, 1.0]), presence=torch.tensor([0, 1.0])
    )
    assert found.tolist() == [[0.5, 1.0, 1.0], [0.0, 1.0, 1.0]]


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
