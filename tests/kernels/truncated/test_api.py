"""truncated_sample in the interpreter: tokens and kept counts against the oracle."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from flash_sample_cases import SEED, TILES, counter, normal_logits, packed, problem, stored
from tiers import first_quick, full
from truncated_cases import check, history

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import Penalties, TokenHistory, flash_sample, truncated_sample
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.truncated import api as module
from fsbench.kernels.truncated import launch as launches

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(
    ("B", "V", "D", "dtype", "filters"),
    [
        (1, 1, 15, torch.float16, {"top_k": 3}),
        (3, 2, 40, torch.float16, {"top_p": 0.4}),
        (2, 33, 40, torch.float16, {"min_p": 0.3}),
        (17, 129, 24, torch.float16, {"top_k": 20, "top_p": 0.8, "min_p": 0.02}),
        full(2, 1000, 72, torch.float32, {"top_k": 50, "top_p": 0.9}),
        full(1, 4300, 24, torch.float32, {"top_p": 0.95}),
        full(1, 4300, 24, torch.float32, {"top_k": 700, "min_p": 0.01}),
    ],
    ids=str,
)
def test_tokens_and_counts_are_the_oracles(B, V, D, dtype, filters):
    hidden, weight = problem(B, V, D, dtype)
    check(hidden=hidden, weight=weight, seed=counter(-(V**3)), offset=counter(D), **filters)


def test_filters_act_after_the_temperature():
    call = {**stored(normal_logits(5, 200)), "temperature": torch.tensor([1e-30, 0.2, 1, 7, 1e30])}
    for filters in ({"top_k": 9, "top_p": 0.7}, {"top_p": 0.5}, {"min_p": 0.2}):
        check(**call, **filters)


ROWS = {
    "top_k": torch.tensor([0, 1, 2, 7, 64, 300, 1000, -5]),
    "top_p": torch.tensor([1.0, 0.9, 0.5, 1.5, 0.3, 0.99, 1e-9, -1.0]),
    "min_p": torch.tensor([0.0, 0.5, 0.0, 0.1, 0.01, -1.0, 0.0, 2.0]),
}


@pytest.mark.parametrize("logits", ["tied", full("flat"), full("one finite"), full("two levels")])
def test_ties_at_every_boundary(logits):
    """Exactly k are kept, the lowest tokens first, also where nearly all are equal."""
    V = 300
    rows = {
        "tied": normal_logits(8, V).round(),
        "flat": torch.full((8, V), -3.25),
        "one finite": torch.full((8, V), -math.inf).index_fill(1, torch.tensor([299]), -7.0),
        "two levels": (torch.arange(8 * V).view(8, V) % 3 == 0).float() * 2 - 1000,
    }[logits]
    check(**stored(rows), **ROWS)
    check(**stored(rows), top_p=ROWS["top_p"])


@pytest.mark.parametrize("N", [5, full(29)])
def test_p_at_round_numbers_keeps_the_tokens_that_the_reference_keeps(N):
    """Of N equal tokens n reach p = n / N, by each search of a kernel."""
    n = torch.arange(1, N)
    call = {**stored(torch.zeros(N - 1, N)), "seed": torch.arange(N - 1)}
    sample = truncated_sample(**call, top_p=n / N, return_kept=True)
    assert sample.kept.tolist() == n.tolist()
    assert torch.equal(truncated_sample(**call, top_p=n / N).tokens, sample.tokens)
    with_k = truncated_sample(**call, top_k=N, top_p=n / N, return_kept=True)
    assert torch.equal(with_k.kept, sample.kept)
    for i in range(1, N, 9):
        shared = truncated_sample(**call, top_p=i / N, return_kept=True)
        assert (shared.kept == i).all()
        drawn = truncated_sample(**call, top_p=i / N)
        assert torch.equal(drawn.tokens, shared.tokens) and (drawn.tokens < i).all()


def test_zeros_of_both_signs_are_equal():
    rows = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -5.0, 0.0]]).repeat(5, 1)
    check(**stored(rows), top_k=torch.arange(1, 6))


@pytest.mark.parametrize("top_k", first_quick([20, 1]))
def test_more_groups_than_are_in_registers_at_once(top_k):
    """Equal maxima everywhere: every group must be read, a chunk of them at a time."""
    rows = normal_logits(1, 32 * 80 + 5).clamp_max(1.0)
    assert (rows == 1.0).sum() > 200 and launches.chunk(top_k) < 80
    check(**stored(rows), top_k=top_k, top_p=0.5)


def test_without_filters_tokens_are_those_of_flash_sample():
    hidden, weight = problem(6, 300, 40)
    call = {"hidden": hidden, "weight": weight, "seed": SEED, "offset": counter(3)}
    for temperature in (0.0, 1.0, torch.linspace(0, 3, 6)):
        sample = truncated_sample(**call, temperature=temperature, return_kept=True)
        plain = flash_sample(**call, temperature=temperature)
        assert torch.equal(sample.tokens, plain.tokens)
        greedy = torch.as_tensor(temperature).expand(6) == 0
        assert torch.equal(sample.kept, torch.where(greedy, 1, 300).int())


class Stored(Exception):
    """Memory for logits is allocated."""


def test_without_filters_no_logits_are_stored(monkeypatch):
    arguments = {**stored(normal_logits(3, 200)), "seed": SEED}
    expected = flash_sample(**arguments).tokens
    monkeypatch.setattr(launches, "allocate", mock.Mock(side_effect=Stored))
    for off in ({}, {"top_p": 2.0}, {"top_k": 200, "min_p": -1.0}):
        assert truncated_sample(**arguments, **off).tokens.tolist() == expected.tolist()
    others = [{"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"return_rank": True}]
    others += [{"return_top": 2}, {"top_p": torch.ones(3)}, {"top_k": torch.zeros(3).int()}]
    for options in [*others, {"penalties": Penalties(history(3, 200))}]:
        with pytest.raises(Stored):
            truncated_sample(**arguments, **options)


def test_tiles_do_not_matter():
    hidden, weight = problem(18, 300, 32, torch.float16)
    rows = {name: value.repeat(3)[:18] for name, value in ROWS.items()}
    call = {"weight": weight, "temperature": torch.linspace(0, 2, 18)}
    expected = check(hidden=hidden, config=TILES, **call, **rows, counting_only=True)
    config = replace(TILES, block_b=32, block_v=256, block_d=32, v_on_m=True, ctas_per_sm=3)
    sample = check(hidden=hidden, config=config, **call, **rows, counting_only=True)
    assert torch.equal(sample.tokens, expected.tokens) and torch.equal(sample.kept, expected.kept)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_a_top_k_of_at_least_all_tokens_is_off(kernels, monkeypatch):
    """Whatever the lower 32 bits of top_k are."""
    if not kernels:
        monkeypatch.setattr(module, "runs_kernels", lambda *_: False)
    V = 150
    call = {**stored(normal_logits(8, V)), "top_p": 0.6, "seed": SEED, "return_kept": True}
    off = truncated_sample(**call)
    large = torch.tensor([V, V + 1, 2**31, 2**32, 2**32 + 1, 2**53 + 1, 2**63 - 2, 2**63 - 1])
    for top_k in (large, -large, V, 2**32 + 1, 2**64 + 1, -(2**40) + 1):
        sample = truncated_sample(**call, top_k=top_k)
        assert torch.equal(sample.tokens, off.tokens) and torch.equal(sample.kept, off.kept)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_a_call_inside_vmap_is_refused_by_name(kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(module, "runs_kernels", lambda *_: False)
    hidden, weight = problem(3, 50, 16)
    with pytest.raises(InvalidType, match=r"torch\.vmap"):
        torch.vmap(lambda row: truncated_sample(row[None], weight, seed=SEED).tokens)(hidden)


def test_bias_mask_soft_cap_and_padding_come_before_the_filters():
    hidden, weight = problem(4, 260, 24)
    mask = normal_logits(4, 250) > 0
    options = {
        "vocab_size": 250,
        "soft_cap": 3.0,
        "bias": 0.5 * normal_logits(4, 250),
        "mask": packed(mask, padding=True),
    }
    sample = check(hidden=hidden, weight=weight, **options, top_k=12, top_p=0.9)
    assert mask.gather(1, sample.tokens[:, None]).all()
    check(hidden=hidden, weight=weight, vocab_size=250, bias=normal_logits(1, 250)[0], top_k=3)
    check(hidden=hidden, weight=weight, mask=normal_logits(4, 260) > 1, top_p=0.5)


def test_rows_without_a_draw_are_minus_one_and_disturb_no_other():
    logits = normal_logits(9, 200)
    rows = {name: torch.cat([value, value[:1]]) for name, value in ROWS.items()}
    clean = check(**stored(logits), **rows).tokens
    logits[0, 199] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    temperature = torch.ones(9)
    temperature[4] = -1.0
    rows["top_p"][5] = torch.nan
    rows["min_p"][6] = torch.nan
    sample = check(**stored(logits), **rows, temperature=temperature)
    assert sample.tokens[[0, 2, 3, 4, 5, 6]].tolist() == [-1] * 6
    assert sample.kept[[0, 2, 3, 4, 5, 6]].tolist() == [0] * 6
    assert torch.equal(sample.tokens[[1, 7, 8]], clean[[1, 7, 8]])


# Arguments


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"top_k": 2.0}, InvalidType, "top_k: expected an integer; got float"),
        ({"top_k": True}, InvalidType, "top_k: expected an integer; got bool"),
        ({"top_k": torch.zeros(3)}, InvalidType, "top_k: expected dtype torch.int32 or"),
        ({"top_k": torch.zeros(2).int()}, InvalidArgument, r"top_k: expected shape \[3\]"),
        ({"top_p": "0.9"}, InvalidType, "top_p: expected a number or a tensor; got str"),
        ({"top_p": 10**400}, InvalidArgument, "top_p: expected a finite number; got 1000"),
        ({"top_p": math.nan}, InvalidArgument, "top_p: expected a finite number; got nan"),
        ({"min_p": torch.zeros(3, 1)}, InvalidArgument, r"min_p: expected shape \[3\]"),
        ({"penalties": 1.1}, InvalidType, "penalties: expected Penalties; got float"),
        (
            {"penalties": Penalties(TokenHistory(2, 4, "cpu"))},
            InvalidArgument,
            "penalties.history: expected 3 rows on cpu; got 2 on cpu",
        ),
        (
            {"penalties": Penalties(TokenHistory(3, 4, "cpu"), 0.0)},
            InvalidArgument,
            "penalties.repetition: expected a number > 0; got 0.0",
        ),
        (
            {"penalties": Penalties(TokenHistory(3, 4, "cpu"), presence=1e300)},
            InvalidArgument,
            r"penalties.presence: expected a finite number; got 1e\+300",
        ),
        ({"penalties": Penalties(None)}, InvalidType, "penalties.history: expected a TokenHistory"),
        ({"return_kept": 1}, InvalidType, "return_kept: expected True or False; got int"),
        ({"return_rank": None}, InvalidType, "return_rank: expected True or False; got NoneType"),
        ({"return_support": 1025}, InvalidArgument, "return_support: expected 0 to 1024; got 1025"),
        ({"return_support": True}, InvalidType, "return_support: expected an integer; got bool"),
        ({"config": 5}, InvalidType, "config: expected a TileConfig or HopperConfig; got int"),
        (
            {"config": HopperConfig(1, 128, 128, 4, False)},
            InvalidArgument,
            "got hopper, but it needs a GPU of compute capability 9.0",
        ),
        ({"seed": torch.zeros(2).long()}, InvalidArgument, "seed: expected shape"),
    ],
)
def test_bad_arguments(changes, error, message):
    hidden, weight = problem(3, 50, 16)
    with pytest.raises(error, match=message):
        truncated_sample(hidden, weight, **{"seed": SEED, **changes})


def test_a_vocabulary_that_is_too_large():
    hidden, weight = problem(1, 100, 16)
    with (
        mock.patch.object(module, "MAX_V", 99),
        pytest.raises(InvalidArgument, match="expected at most 99 tokens; got 100"),
    ):
        truncated_sample(hidden, weight, seed=SEED)


def test_on_cpu_tensors_without_the_interpreter_the_reference_draws():
    """bf16, which the interpreter multiplies wrongly."""
    hidden, weight = problem(4, 90, 16, torch.bfloat16)
    arguments = {"hidden": hidden, "weight": weight, "bias": normal_logits(4, 90)}
    penalties = Penalties(history(4, 90), 1.2, 0.1, 0.1)
    check(**arguments, top_k=9, top_p=0.8, penalties=penalties, temperature=0.5)
