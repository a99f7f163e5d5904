"""Arguments of a plan, and how it divides steps and seeds."""

from __future__ import annotations

import pytest
from runner_doubles import SMALL

from fsbench.errors import InvalidArgument
from fsbench.machine import hardware
from fsbench.machine.hardware import Gpu
from fsbench.measure.plan import Plan
from fsbench.measure.preparation import spread_seed
from fsbench.problem import Problem


@pytest.mark.parametrize(("iters", "rounds"), [(100, 5), (7, 3), (5, 5), (1, 1), (11, 4)])
def test_iterations_add_up_and_differ_by_one_at_most(iters, rounds):
    plan = Plan([SMALL], [], iters=iters, rounds=rounds)
    counts = [plan.iterations(number) for number in range(rounds)]
    assert sum(counts) == iters
    assert min(counts) >= 1 and max(counts) <= min(counts) + 1
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"iters": 4, "rounds": 5}, r"^--iters: expected at least one step .* --rounds 5; got 4$"),
        ({"iters": 0, "rounds": 1}, r"^--iters: expected an integer >= 1; got 0$"),
        ({"rounds": 0}, r"^--rounds: expected an integer >= 1; got 0$"),
        ({"warmup": -1}, r"^--warmup: expected an integer >= 0; got -1$"),
        ({"seed": 2**63}, r"^--seed: expected an integer of 64 bits; got 9223372036854775808$"),
    ],
)
def test_a_plan_that_cannot_be_measured_is_refused(changes, message):
    with pytest.raises(InvalidArgument, match=message):
        Plan([SMALL], [], **changes)


def test_any_int64_is_a_seed(sampler, run):
    for name, seed in (("A", -(2**63)), ("B", 2**63 - 1)):
        assert run(sampler(name), seed=seed)[name].status == "ok"


def test_spread_seed_is_splitmix64():
    # First outputs of splitmix64 for the states 0 and 1 (prng.di.unimi.it), as signed integers.
    assert spread_seed(0) % 2**64 == 0xE220A8397B1DCDAF
    assert spread_seed(1) % 2**64 == 0x910A2DEC89025CC1
    assert all(-(2**63) <= spread_seed(seed) < 2**63 for seed in range(-50, 50))


@pytest.mark.parametrize(
    ("requested", "device", "cores", "gigabytes", "tunes", "expected"),
    [
        (None, "cuda", 16, 80, False, 12),
        (None, "cuda", 4, 80, False, 2),
        (None, "cuda", 1, 80, False, 0),
        (None, "cuda", 16, 16, False, 3),  # of 1.24 GB each, a quarter of the memory
        (None, "cpu", 16, 80, False, 0),
        (3, "cpu", 1, 0, False, 3),
        (0, "cuda", 16, 80, False, 0),
        (3, "cuda", 16, 80, True, 0),
    ],
)
def test_the_number_of_compile_processes(
    sampler, monkeypatch, requested, device, cores, gigabytes, tunes, expected
):
    gpu = Gpu(0, "A GPU", "", int(gigabytes * 1e9), "")
    monkeypatch.setattr(hardware, "gpus", lambda: [gpu])
    monkeypatch.setattr("fsbench.measure.plan.usable_cores", lambda: cores)
    problem = Problem(1, 4096, 151_936, device=device)
    assert Plan([problem], [sampler("A", tunes=tunes)]).num_warmers(requested) == expected
