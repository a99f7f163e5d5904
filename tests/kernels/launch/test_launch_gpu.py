"""Calls like an earlier one on GPUs: the tokens of first calls, on any stream and device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from gpu_cases import counter, problem

from fsbench.graphs import capture
from fsbench.kernels import flash_sample, truncated_sample
from fsbench.kernels.launch import launch_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def drawn_both_ways(
    hidden, weight, seed, offset, temperature, **filters
) -> tuple[list[int], list[int]]:
    """Tokens of a call that is launched from the cache, and of one that finds nothing there."""
    arguments = {"seed": seed, "offset": offset, "temperature": temperature, **filters}
    call = truncated_sample if filters else flash_sample
    for _ in range(2):
        drawn = call(hidden, weight, **arguments)
    assert launch_cache.LAUNCHES
    with mock.patch.object(launch_cache, "LAUNCHES", {}):
        first = call(hidden, weight, **arguments)
    assert drawn.valid.all() and first.valid.all()
    return drawn.tokens.tolist(), first.tokens.tolist()


@pytest.mark.parametrize("D", [512, 101], ids=["TMA", "pointers"])
@pytest.mark.parametrize("B", [1, 16, 200])
def test_tokens_are_those_of_first_calls(B, D):
    hidden, weight = problem(B, 3000, D)
    for temperature in (1.0, 0.3, 0.0, torch.linspace(0, 2, B, device="cuda")):
        for inputs in (hidden, hidden.clone(), torch.cat([hidden[:1], hidden])[1:]):
            drawn, first = drawn_both_ways(inputs, weight, counter(3), counter(5), temperature)
            assert drawn == first


@pytest.mark.parametrize("top_p", [0.9, 0.5, 0.2, "rows"])
@pytest.mark.parametrize("top_k", [0, 50, 600, "rows"])
def test_tokens_under_filters_are_those_of_first_calls(top_k, top_p):
    """The numbers of later calls differ from those of the first call of their key."""
    hidden, weight = problem(16, 3000, 512)
    rows = {"top_k": torch.arange(16, device="cuda") * 50}
    rows["top_p"] = torch.linspace(0.1, 1.0, 16, device="cuda")
    filters = {"top_k": top_k, "top_p": top_p}
    filters = {name: rows[name] if x == "rows" else x for name, x in filters.items()}
    for temperature in (1.0, 0.3, torch.linspace(0, 2, 16, device="cuda")):
        for min_p in (0.01, 1e-4, 0.0):
            for inputs in (hidden, hidden.clone()):
                drawn, first = drawn_both_ways(
                    inputs, weight, counter(3), counter(5), temperature, min_p=min_p, **filters
                )
                assert drawn == first


def test_streams_at_once_have_workspaces_of_their_own():
    hidden, weight = problem(64, 30_000, 512)
    seed, offset = counter(4), counter(8)
    _, expected = drawn_both_ways(hidden, weight, seed, offset, 1.0)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    tokens = []
    for _ in range(100):
        for stream in streams:
            with torch.cuda.stream(stream):
                tokens.append(flash_sample(hidden, weight, seed=seed, offset=offset).tokens)
    torch.cuda.synchronize()
    assert all(each.tolist() == expected for each in tokens)


def test_a_captured_call_reads_what_its_tensors_hold_at_each_replay():
    hidden, weight = problem(16, 3000, 512)
    seed, offset = counter(4), counter(8)
    drawn_both_ways(hidden, weight, seed, offset, 1.0)

    def launch(hidden, seed, offset):
        return flash_sample(hidden, weight, seed=seed, offset=offset).tokens

    replay = capture(launch, hidden, seed, offset)
    for step in (8, 9):
        offset.fill_(step)
        _, expected = drawn_both_ways(hidden, weight, seed, counter(step), 1.0)
        assert replay().tolist() == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_is_that_of_the_tensors():
    hidden, weight = problem(16, 3000, 512)
    _, expected = drawn_both_ways(hidden, weight, counter(3), counter(5), 1.0)
    elsewhere = [x.to("cuda:1") for x in (hidden, weight, counter(3), counter(5))]
    drawn, first = drawn_both_ways(*elsewhere, 1.0)
    assert drawn == first == expected
    assert torch.cuda.current_device() == 0
