"""The presets fit the samplers, the models and the plan."""

from __future__ import annotations

import pytest

from fsbench.discover import discover
from fsbench.errors import InvalidArgument
from fsbench.measure.plan import Plan
from fsbench.measure.presets import PRESETS, preset
from fsbench.problem import Problem, models
from fsbench.provider import Kind


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_valid_plan(name):
    chosen = preset(name)
    problems = [
        Problem(B, D, V, chosen.dtype, **filters)
        for D, V in chosen.shapes
        for filters in chosen.filters
        for B in chosen.batches
    ]
    assert len(set(problems)) == len(problems)
    Plan(problems, [], warmup=chosen.warmup, iters=chosen.iters, rounds=chosen.rounds)
    assert chosen.summary
    shapes = {(model.D, model.V) for model in models().values()}
    assert name == "smoke" or set(chosen.shapes) <= shapes


def test_presets_that_providers_name_exist_and_none_is_empty():
    named = [name for entry in discover().values() for name in entry.provider.presets]
    assert set(named) == set(PRESETS)


def test_paper_is_the_papers_sweep():
    paper = preset("paper")
    assert paper.shapes == ((4096, 151936), (8192, 128256))
    assert paper.batches == tuple(2**i for i in range(9))
    assert (paper.dtype, paper.warmup, paper.iters) == ("bf16", 25, 100)


def test_every_preset_compares_samplers_that_draw_with_a_lower_bound():
    for name in PRESETS:
        (D, V), (filters, *_) = preset(name).shapes[0], preset(name).filters
        problem = Problem(1, D, V, **filters)
        providers = [e.provider for e in discover().values() if name in e.provider.presets]
        kind_names = {provider.kind_on(problem) for provider in providers}
        drawn = Kind.TRUNCATED if problem.filters else Kind.EXACT
        assert kind_names >= {Kind.SCORE if name == "score" else drawn, Kind.LOWER_BOUND}


@pytest.mark.parametrize("name", ["smoke", "cpu", "truncated"])
def test_samplers_of_a_preset_can_run_it(name):
    chosen = preset(name)
    for entry in discover().values():
        if name not in entry.provider.presets:
            continue
        if name == "truncated":
            bound = entry.provider.kind in (Kind.LOWER_BOUND, Kind.GREEDY)
            assert bound or entry.provider.capabilities.filters, entry.name
        else:
            for D, V in chosen.shapes:
                problem = Problem(chosen.batches[0], D, V, chosen.dtype, device="cpu")
                assert entry.refusal(problem) is None, entry.name


def test_an_unknown_preset_gets_the_nearest_name():
    with pytest.raises(InvalidArgument, match=r"preset: expected one of .*did you mean 'paper'\?"):
        preset("papper")
