"""The steady state against cases worked out by hand, and against a simulation."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsbench.errors import InvalidArgument
from fsbench.simple.pipeline import Outcome, Pipeline, Sampling, steady_state

LAST = Sampling("last stage", on_stage_us=50)
BESIDE = Sampling("CPUs", beside_us=(50,))


def outcome(stage_us, microbatches, sampling, batch=1) -> Outcome:
    return steady_state(Pipeline(stage_us, microbatches, batch), sampling)


@pytest.mark.parametrize(
    ("stages", "microbatches", "sampling", "cycle", "bubbles"),
    [
        # One stage, one batch: everything in a row, wherever sampling is.
        ((100,), 1, LAST, 150, (0,)),
        ((100,), 1, BESIDE, 150, (1 / 3,)),
        # A second batch fills the time that the CPUs need.
        ((100,), 2, BESIDE, 100, (0,)),
        # Two stages: the last one takes 150, the first waits a third of the time.
        ((100, 100), 2, LAST, 150, (1 / 3, 0)),
        # On CPUs with as many microbatches as stages: a loop of 250 for two.
        ((100, 100), 2, BESIDE, 125, (1 / 5, 1 / 5)),
        # One more, and it is hidden.
        ((100, 100), 3, BESIDE, 100, (0, 0)),
        # CPUs slower than a stage set the pace.
        ((100, 100), 9, Sampling("slow CPUs", beside_us=(140,)), 140, (2 / 7, 2 / 7)),
        # The bus and the CPUs overlap for different microbatches.
        ((100, 100), 4, Sampling("bus, CPUs", beside_us=(90, 100)), 100, (0, 0)),
        # A fused kernel that is faster than the matmul it replaces.
        ((100, 100), 2, Sampling("fused", on_stage_us=-20), 100, (0, 1 / 5)),
        # Four stages, section 3: sampling of 40 % of a stage leaves 2 / 7 of the others idle.
        ((100,) * 4, 4, Sampling("last stage", on_stage_us=40), 140, (2 / 7,) * 3 + (0,)),
    ],
)
def test_cases_worked_out_by_hand(stages, microbatches, sampling, cycle, bubbles):
    found = outcome(stages, microbatches, sampling, batch=32)
    assert found.cycle_us == pytest.approx(cycle)
    assert found.bubbles == pytest.approx(bubbles, abs=1e-9)
    assert found.tokens_per_s == pytest.approx(32e6 / cycle)
    assert found.step_us == pytest.approx(cycle * microbatches)


def simulated_cycle(services, m, steps=100):
    """Microbatches go round through services that take one at a time: the time between two."""
    free, finished = [0.0] * len(services), []
    waiting = [(0.0, batch, 0) for batch in range(m)]  # ready, order of arrival, service
    while len(finished) < steps * m:
        ready, order, service = heapq.heappop(waiting)
        free[service] = end = max(ready, free[service]) + services[service]
        following = (service + 1) % len(services)
        if not following:
            finished.append(end)
        heapq.heappush(waiting, (end, order + m, following))
    return (finished[-1] - finished[-1 - m * (steps // 2)]) / (m * (steps // 2))


times = st.floats(1, 1000)


@given(st.lists(times, min_size=1, max_size=8), st.integers(1, 9))
def test_the_cycle_is_that_of_a_simulation(services, m):
    stage, *beside = services
    found = outcome((stage,), m, Sampling("", beside_us=tuple(beside)))
    assert found.cycle_us == pytest.approx(simulated_cycle(services, m), rel=1e-6)


def test_bubbles_grow_with_the_share_of_sampling_as_in_section_3():
    """22 to 40 % of the other stages' time: sampling of 0.28 to 0.67 of a stage."""
    for share, bubble in ((0.28, 0.22), (0.67, 0.40)):
        found = outcome((100,) * 4, 4, Sampling("", on_stage_us=100 * share))
        assert found.bubbles[0] == pytest.approx(bubble, abs=0.005)


def test_enough_microbatches():
    assert outcome((100, 100), 1, BESIDE).enough_in_flight == 3
    assert outcome((100, 100), 1, LAST).enough_in_flight == 2
    assert outcome((100,), 1, Sampling("", beside_us=(100, 100))).enough_in_flight == 3


def test_wrong_arguments_are_refused():
    for call in (
        lambda: Pipeline((), 1),
        lambda: Pipeline((0.0,), 1),
        lambda: Pipeline((1.0,), 0),
        lambda: Pipeline((1.0,), 1, 0),
        lambda: steady_state(Pipeline((1.0,), 1), Sampling("", on_stage_us=-2)),
    ):
        with pytest.raises(InvalidArgument, match="expected"):
            call()
