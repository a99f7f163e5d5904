"""Distributed Group-Gumbel-Max: the merge on its own, and shards of every size."""

from __future__ import annotations

import pytest
import torch
from capability_checks import assert_law

from fsbench.kernels import group_gumbel_distributed as module
from fsbench.problem import Problem

pytestmark = pytest.mark.usefixtures("one_thread")

INF = float("inf")
DRAWS = 2**16


def launch(logits: torch.Tensor, temperature: float, draws: int = DRAWS) -> torch.Tensor:
    """Tokens of the sampler as built, for one row of logits [V]."""
    problem = Problem(draws, 1, len(logits), "fp32", temperature, "cpu")
    ignored = torch.zeros(1, dtype=torch.int64)
    return module.build(problem, logits[:, None])(torch.ones(draws, 1), ignored, ignored)


def merged(log_masses: list[float], **options: bool) -> torch.Tensor:
    """DRAWS merges of shards whose samples are their own numbers."""
    K = len(log_masses)
    masses = torch.tensor(log_masses, dtype=torch.float64)[:, None].expand(K, DRAWS)
    return module.merge(masses, torch.arange(K)[:, None].expand(K, DRAWS), **options)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(5)


@pytest.mark.parametrize(
    "log_masses",
    [
        [0.0, 1.0, -1.0, 0.5],
        [-INF, 0.0, -INF, 1.0, -INF],
        [1e4, 1e4 + 1, 1e4 - 2],
        [-1e4, -1e4 - 1],
        [-1000.5, -INF, -1000.0, -1003.0],
    ],
    ids=str,
)
def test_merge_chooses_shards_in_proportion_to_their_mass(log_masses):
    p = torch.tensor(log_masses, dtype=torch.float64).softmax(0)
    assert_law("tokens", merged(log_masses), p)


def test_merge_of_one_shard_is_its_sample():
    assert module.merge(torch.tensor([[-3.0, 9.0]]), torch.tensor([[5, 6]])).tolist() == [5, 6]


@pytest.mark.parametrize("greedy", [False, True])
def test_merge_leaves_undefined_rows_out(greedy):
    nan = torch.nan
    masses = torch.tensor([[nan, 1.0, 1.0, -INF, -INF], [1.0, nan, INF, -INF, 2.0]])
    samples = torch.tensor([[0] * 5, [7] * 5])
    assert module.merge(masses, samples, greedy).tolist() == [-1, -1, -1, -1, 7]


def test_merge_at_temperature_zero_takes_the_first_of_the_largest():
    assert set(merged([-INF, 2.0, 1.0, 2.0], greedy=True).tolist()) == {1}


def test_merges_of_rows_and_steps_are_independent():
    first, second = merged([0.0, 0.0, 0.0]), merged([0.0, 0.0, 0.0])
    uniform = torch.full((9,), 1 / 9)
    assert_law("tokens", 3 * first[0::2] + first[1::2], uniform)
    assert_law("tokens", 3 * first + second, uniform)


@pytest.mark.parametrize("temperature", [0.4, 1.0])
@pytest.mark.parametrize("V", [2, 3, 8, 20, 100])
def test_tokens_are_drawn_from_the_softmax(V, temperature):
    """V below, equal to and not a multiple of SHARDS; first and last token are likely ones."""
    logits = torch.randn(V) - 20
    logits[[0, -1]] = -19.0
    assert_law("tokens", launch(logits, temperature), (logits / temperature).softmax(0))


def test_shards_may_be_of_any_size():
    logits = torch.randn(20)
    shards = logits[:, None].split([0, 1, 0, 12, 7, 0])
    tokens = module.group_gumbel_distributed(torch.ones(DRAWS, 1), shards, 1.0)
    assert_law("tokens", tokens, logits.softmax(0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_every_kind(temperature):
    for spoiled in (torch.nan, INF):
        for at in (0, 11, 19):
            row = torch.zeros(20)
            row[at] = spoiled
            assert launch(row, temperature, 3).tolist() == [-1, -1, -1]
    row = torch.full((20,), -INF)
    assert launch(row, temperature, 3).tolist() == [-1, -1, -1]
    row[13] = -50.0  # all other shards without mass
    assert launch(row, temperature, 3).tolist() == [13, 13, 13]


def test_an_undefined_row_leaves_its_neighbours_alone():
    hidden = torch.randn(4, 8)
    hidden[1] = torch.nan
    hidden[2] = -INF
    tokens = module.group_gumbel_distributed(hidden, torch.ones(50, 8).tensor_split(8), 1.0)
    assert (tokens >= 0).tolist() == [True, False, False, True]


def test_greedy_is_the_lowest_id_among_ties():
    logits = torch.full((20,), -9.0)
    logits[[7, 8, 19]] = -3.0
    assert launch(logits, 0.0, 2).tolist() == [7, 7]
    logits = torch.full((20,), -8.9)
    logits[:3] = torch.tensor([-9.0, -8.8, -9.0])  # less mass than any other shard
    assert launch(logits, 0.0, 2).tolist() == [1, 1]
