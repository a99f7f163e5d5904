"""truncated_sample in the interpreter: tokens and kept counts against the oracle."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from flash_sample_cases import (
    SEED,
    TILES,
    counter,
    exact_logits,
    guarded_memory,
    logits_error,
    normal_logits,
    packed,
    problem,
    stored,
)

from fsbench import reference
from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import Penalties, TokenHistory, flash_sample, truncated_sample
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.flash_sampling_topk_topp import PROVIDER
from fsbench.kernels.truncated import api as module
from fsbench.kernels.truncated import gathered as _gathered_draw
from fsbench.kernels.truncated import launch as launches
from fsbench.kernels.truncated import rows as _row_kernels
from fsbench.kernels.truncated.filters import Filters
from fsbench.verify.check import Setting
from fsbench.verify.drawing import exact_head, random_logits
from fsbench.verify.pathwise import penalised, truncation
from fsbench.verify.truncation import PENALISED

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]

FILTERS = ("top_k", "top_p", "min_p")


def check(
    *,
    temperature=1.0,
    seed=SEED,
    offset=None,
    penalties=None,
    config=None,
    counting_only=False,
    **arguments,
):
    """Call truncated_sample; its tokens must be the oracle's, its counts those of the reference.

    Without counting it ends earlier, and must draw the same; counting_only leaves that out.
    """
    filters = {name: arguments.pop(name) for name in FILTERS if name in arguments}
    call = {"temperature": temperature, "seed": seed, "offset": offset, "penalties": penalties}
    with guarded_memory():
        sample = truncated_sample(**arguments, **call, **filters, config=config, return_kept=True)
        if not counting_only:
            plain = truncated_sample(**arguments, **call, **filters, config=config)
            assert plain.kept is None and torch.equal(plain.tokens, sample.tokens)
            assert torch.equal(plain.valid, sample.valid)
    logits, error = exact_logits(**arguments), logits_error(**arguments)
    if penalties is not None:
        counts = penalties.history.dense(logits.shape[1])
        logits = reference.penalised(
            logits.float(), *counts, **dict(zip(penalties._fields[1:], penalties[1:], strict=True))
        ).double()
        error += 1e-6 * float(logits.nan_to_num(0, 0, 0).abs().max())
    kept = reference.truncate(logits, temperature, **filters, logits_error=error)
    step = counter(0) if offset is None else offset
    noise = "group" if penalties is None else "token"
    expected = reference.expect(
        logits, seed, step, temperature, noise, truncation=kept, logits_error=error
    )
    accepted = expected.accepts(sample.tokens)
    assert accepted.all(), (sample.tokens.tolist(), expected.tokens.tolist())
    assert torch.equal(sample.valid, sample.tokens >= 0)
    assert (sample.kept >= kept.surely.sum(1)).all(), (sample.kept, kept.surely.sum(1))
    assert (sample.kept <= kept.possibly.sum(1)).all(), (sample.kept, kept.possibly.sum(1))
    return sample


@pytest.mark.parametrize(
    ("B", "V", "D", "dtype", "filters"),
    [
        (1, 1, 15, torch.float16, {"top_k": 3}),
        (3, 2, 40, torch.float16, {"top_p": 0.4}),
        (3, 31, 40, torch.float16, {"top_k": 5, "top_p": 0.9}),
        (2, 33, 40, torch.float16, {"min_p": 0.3}),
        (17, 129, 24, torch.float16, {"top_k": 20, "top_p": 0.8, "min_p": 0.02}),
        (2, 1000, 72, torch.float32, {"top_k": 50, "top_p": 0.9}),
        (2, 5003, 24, torch.float32, {"top_p": 0.95}),
        (1, 5003, 24, torch.float32, {"top_k": 700, "min_p": 0.01}),
    ],
    ids=str,
)
def test_tokens_and_counts_are_the_oracles(B, V, D, dtype, filters):
    hidden, weight = problem(B, V, D, dtype)
    for seed in (-(V**3), V):
        check(hidden=hidden, weight=weight, seed=counter(seed), offset=counter(D), **filters)


@pytest.mark.parametrize("temperature", [1e-30, 0.2, 1.0, 7.0, 1e30])
def test_filters_act_after_the_temperature(temperature):
    call = {**stored(normal_logits(3, 200)), "temperature": temperature}
    for filters in ({"top_k": 9, "top_p": 0.7}, {"top_p": 0.5}, {"min_p": 0.2}):
        check(**call, **filters)


ROWS = {
    "top_k": torch.tensor([0, 1, 2, 7, 64, 300, 1000, -5]),
    "top_p": torch.tensor([1.0, 0.9, 0.5, 1.5, 0.3, 0.99, 1e-9, -1.0]),
    "min_p": torch.tensor([0.0, 0.5, 0.0, 0.1, 0.01, -1.0, 0.0, 2.0]),
}


@pytest.mark.parametrize("logits", ["normal", "tied", "flat", "one finite", "two levels"])
def test_ties_at_every_boundary(logits):
    """Exactly k are kept and the lowest tokens go first, also where nearly all are equal."""
    V = 300
    rows = {
        "normal": normal_logits(8, V),
        "tied": normal_logits(8, V).round(),
        "flat": torch.full((8, V), -3.25),
        "one finite": torch.full((8, V), -math.inf).index_fill(1, torch.tensor([299]), -7.0),
        "two levels": (torch.arange(8 * V).view(8, V) % 3 == 0).float() * 2 - 1000,
    }[logits]
    check(**stored(rows), **ROWS)
    check(**stored(rows), **{**ROWS, "top_p": torch.ones(8)})
    check(**stored(rows), top_p=ROWS["top_p"])


def test_zeros_of_both_signs_are_equal():
    rows = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -5.0, 0.0]])
    for k in range(1, 6):
        check(**stored(rows), top_k=k)


@pytest.mark.parametrize("top_k", [1, 20, 40])
def test_more_groups_than_are_in_registers_at_once(top_k):
    """Equal maxima everywhere: every group must be read, a chunk of them at a time."""
    V = 32 * 80 + 5
    rows = normal_logits(2, V).clamp_max(1.0)
    assert (rows == 1.0).sum() > 400 and launches.chunk(top_k) < 80
    check(**stored(rows), top_k=top_k)
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


def test_neither_tiles_nor_neighbours_matter():
    hidden, weight = problem(18, 300, 32, torch.float16)
    rows = {name: value.repeat(3)[:18] for name, value in ROWS.items()}
    call = {"weight": weight, "temperature": torch.linspace(0, 2, 18)}
    whole = check(hidden=hidden, config=TILES, **call, **rows, counting_only=True)
    for config in (
        replace(TILES, block_b=32, block_v=256, block_d=32, flatten=True),
        replace(TILES, v_on_m=True, block_d=16, ctas_per_sm=3),
    ):
        other = check(hidden=hidden, config=config, **call, **rows, counting_only=True)
        assert torch.equal(other.tokens, whole.tokens) and torch.equal(other.kept, whole.kept)
    part = check(
        hidden=hidden[:5],
        weight=weight,
        temperature=call["temperature"][:5],
        **{name: value[:5] for name, value in rows.items()},
        counting_only=True,
    )
    assert torch.equal(part.tokens, whole.tokens[:5]) and torch.equal(part.kept, whole.kept[:5])


def test_a_filter_for_all_rows_is_the_same_as_for_each():
    call = stored(normal_logits(4, 150))
    whole = check(**call, top_k=9, top_p=0.6, min_p=0.01)
    each = check(
        **call,
        top_k=torch.full((4,), 9, dtype=torch.int32),
        top_p=torch.full((4,), 0.6),
        min_p=torch.full((4,), 0.01),
    )
    assert torch.equal(whole.tokens, each.tokens) and torch.equal(whole.kept, each.kept)


@pytest.mark.parametrize("others", [{}, {"top_p": 0.6}], ids=str)
def test_a_top_k_of_at_least_all_tokens_is_off(others):
    """Whatever its 32 lower bits are."""
    V = 150
    call = {**stored(normal_logits(8, V)), **others}
    off = check(**call)
    large = torch.tensor([V, V + 1, 2**31, 2**32, 2**32 + 1, 2**53 + 1, 2**63 - 2, 2**63 - 1])
    for top_k in (large, -large, V, 2**31, 2**32 + 1, sys.maxsize, 2**64 + 1, -(2**40) + 1):
        sample = check(**call, top_k=top_k)
        assert torch.equal(sample.tokens, off.tokens) and torch.equal(sample.kept, off.kept)


def test_the_reference_keeps_all_tokens_at_a_large_top_k(monkeypatch):
    monkeypatch.setattr(module, "runs_kernels", lambda *_: False)
    test_a_top_k_of_at_least_all_tokens_is_off({"top_p": 0.6})


def test_a_request_with_a_seed_of_its_own_may_move():
    hidden, weight = problem(5, 200, 24)
    seeds, offsets = counter(3, 1, 4, 1, 5), counter(9, 2, 6, 5, 3)
    call = {"weight": weight, "top_k": 30, "temperature": 3.0}
    whole = check(hidden=hidden, seed=seeds, offset=offsets, **call)
    order = torch.tensor([4, 2, 0])
    moved = check(
        hidden=hidden[order].contiguous(), seed=seeds[order], offset=offsets[order], **call
    )
    assert torch.equal(moved.tokens, whole.tokens[order])


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


# Penalties


def history(B: int, V: int, capacity: int = 80) -> TokenHistory:
    generator = torch.Generator().manual_seed(B + V)
    prompts, outputs = (
        [torch.randint(0, V, (n,), generator=generator).tolist() for n in range(B)]
        for _ in range(2)
    )
    outputs[-1] += outputs[-1] * 2  # several times
    return TokenHistory.of(prompts, outputs, capacity, "cpu")


@pytest.mark.parametrize(
    "amounts",
    [
        (1.3, 0.0, 0.0),
        (1.0, 0.7, 0.2),
        (0.8, -0.5, -0.4),  # seen tokens are preferred: the largest of a run grows
        (torch.linspace(0.5, 2, 9), torch.linspace(-1, 1, 9), torch.linspace(1, 0, 9)),
    ],
    ids=["repetition", "presence and frequency", "rewards", "of every row"],
)
def test_penalties(amounts):
    V = 150
    penalties = Penalties(history(9, V), *amounts)
    for filters in ({"top_k": 6}, {"top_p": 0.7, "min_p": 0.05}):
        check(**stored(normal_logits(9, V)), penalties=penalties, **filters, temperature=0.7)


def test_penalties_act_on_the_processed_logits_and_spare_forbidden_tokens():
    hidden, weight = problem(5, 100, 24)
    mask = normal_logits(5, 100) > 0
    penalties = Penalties(history(5, 100), 0.5, -3.0, 0.1)
    sample = check(
        hidden=hidden, weight=weight, mask=mask, soft_cap=4.0, penalties=penalties, top_k=9
    )
    assert mask.gather(1, sample.tokens[:, None]).all()


def test_a_long_history_takes_several_blocks():
    V = 400
    seen = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:200].tolist()
    penalties = Penalties(TokenHistory.of([seen], [seen[:70] * 2], 256, "cpu"), 1.5, 0.5, 0.1)
    check(**stored(normal_logits(1, V)), penalties=penalties, top_k=5, top_p=0.9)


# Arguments


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"top_k": 2.0}, InvalidType, "top_k: expected an integer; got float"),
        ({"top_k": True}, InvalidType, "top_k: expected an integer; got bool"),
        ({"top_k": torch.zeros(3)}, InvalidType, "top_k: expected dtype torch.int32 or"),
        ({"top_k": torch.zeros(2).int()}, InvalidArgument, r"top_k: expected shape \[3\]"),
        ({"top_p": "0.9"}, InvalidType, "top_p: expected a number or a tensor; got str"),
        ({"top_p": math.nan}, InvalidArgument, "top_p: expected a finite number; got nan"),
        ({"min_p": torch.zeros(3, 1)}, InvalidArgument, r"min_p: expected shape \[3\]"),
        ({"temperature": -1.0}, InvalidArgument, "temperature: expected a finite number >= 0"),
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
        ({"penalties": Penalties(None)}, InvalidType, "penalties.history: expected a TokenHistory"),
        ({"return_kept": 1}, InvalidType, "return_kept: expected True or False; got int"),
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


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 40},
        {"top_k": 40, "top_p": 0.6},
        {"top_k": torch.tensor([40, 900, 0]), "top_p": torch.tensor([0.9, 1.0, 0.02])},
        {"min_p": 0.05, "top_p": 0.9},
    ],
    ids=str,
)
def test_tokens_of_many_groups_are_gathered(filters):
    """168 groups have one logit each that may be kept: more than a chunk, but few tokens."""
    blocks = 42
    logits = normal_logits(3, blocks * 128, sigma=0.3) - 6.0
    first = torch.arange(blocks)[:, None] * 128 + 2 * torch.arange(4)  # of each group
    logits[:, first.flatten()] = 1.0 + normal_logits(3, 168, sigma=0.2).round(decimals=1)  # ties
    check(**stored(logits), **filters)


@pytest.mark.parametrize("top_k", [113, 448])
def test_hundreds_of_tokens_are_drawn_from_in_one_launch(top_k):
    """Their groups are up to four chunks."""
    logits = normal_logits(2, 32 * 560)
    reads = mock.Mock(side_effect=AssertionError("a program reads the whole row"))
    more = mock.Mock(side_effect=AssertionError("more launches"))
    with (
        mock.patch.object(_gathered_draw, "cut_of_row", reads),
        mock.patch.object(launches, "_launch_rows", more),
    ):
        check(**stored(logits), top_k=top_k, top_p=0.9)


def test_few_groups_may_have_more_tokens_than_there_is_room_for():
    logits = torch.zeros(4, 4_300)
    logits[:, 4_100:] = 1.0  # behind those that there is room for
    check(**stored(logits), top_k=448)


def test_more_tokens_than_can_be_gathered_are_read_where_they_are():
    V = 9_000
    logits = normal_logits(1, V, sigma=0.1)
    check(**stored(logits), top_k=8_700, top_p=0.99, counting_only=True)
    check(**stored(logits), top_k=200, min_p=0.9)


LAWS = {
    "normal": lambda V: normal_logits(7, V),
    "near-uniform": lambda V: normal_logits(7, V, sigma=1e-4) + 3.0,
    "flat": lambda V: torch.zeros(7, V),
    "two levels": lambda V: (torch.arange(7 * V).view(7, V) % 3 == 0).float(),
    "peaked": lambda V: normal_logits(7, V).index_fill(1, torch.tensor([V // 2]), 12.0),
    "masked": lambda V: normal_logits(7, V).masked_fill(torch.arange(V) % 7 > 0, -torch.inf),
}
EACH = {
    "top_k": torch.tensor([0, 0, 140, 0, 4500, 4500, 2]),
    "top_p": torch.tensor([0.9, 0.3, 0.5, 1.0, 1.0, 0.7, 0.9]),
    "min_p": torch.tensor([0.0, 0.4, 0.0, 0.05, 0.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("law", LAWS)
def test_rows_for_many_programs(law):
    """Filters that keep thousands, each in its own way, of three blocks; also where all is tied."""
    V = 4_900
    logits = LAWS[law](V)
    check(**stored(logits), **EACH)
    check(**stored(logits[:3]), temperature=0.3, top_p=0.8, counting_only=True)


def test_top_p_alone_asks_for_the_mass_before_the_draw():
    """Rows of three blocks whose draw from all tokens stands or falls without a cutoff."""
    V = 4_900
    logits = normal_logits(24, V)
    # Two tokens of probability 0.45 and 0.4: the second one crosses p = 0.6 and so is kept.
    logits[12:] = 0.0
    logits[12:, 7] = math.log(3.0 * (V - 2))
    logits[12:, 4_000] = math.log(0.4 / 0.15 * (V - 2))
    call = stored(logits)
    sample = check(**call, top_p=torch.tensor([0.5, 0.6]).repeat_interleave(12))
    first = flash_sample(**call, seed=SEED).tokens
    assert 2 < (first == sample.tokens)[:12].sum() < 10
    assert (first[12:] == 4_000).sum() > 2


@pytest.mark.parametrize("filters", [{"top_k": 2_300}, {"top_p": 0.5}], ids=str)
def test_a_token_far_above_the_others_does_not_keep_the_search_from_narrowing(filters):
    """All others are in the first section. If it ended there, each step would read the row."""
    logits = normal_logits(2, 4_900) / 10
    logits[:, 4_000] = 12.0
    logits[1] /= 4
    search = mock.Mock(side_effect=AssertionError("a program reads the whole row"))
    with mock.patch.object(_row_kernels, "cut_by_scans", search):
        check(**stored(logits), **filters)


def test_the_largest_tokens_may_be_neighbours():
    """Few blocks of 128 tokens have them, in each of their groups: these must not be too many."""
    V, k = 26_700, 12
    logits = normal_logits(1, V)
    token = torch.arange(13)[:, None] * 128 + torch.arange(0, 8, 2)
    logits[0, token.flatten()] = (30.0 + torch.arange(13)).repeat_interleave(4)
    search = mock.Mock(side_effect=AssertionError("a program reads the whole row"))
    with mock.patch.object(_gathered_draw, "cut_of_row", search):
        check(**stored(logits), temperature=5.0, top_k=k)


@pytest.mark.parametrize("programs", [1, 14, 10_000])
def test_how_many_programs_share_a_row_does_not_matter(programs):
    call = {**stored(normal_logits(7, 4_900)), **EACH, "seed": SEED, "return_kept": True}
    whole = truncated_sample(**call)
    with mock.patch.dict(launches.PROGRAMS, dict.fromkeys(launches.PROGRAMS, programs)):
        other = truncated_sample(**call)
    assert torch.equal(other.tokens, whole.tokens) and torch.equal(other.kept, whole.kept)


def test_launches_that_no_row_can_need_are_left_out():
    def times(groups=200, **filters):
        return launches.searches(
            Filters(**{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}), groups
        )

    assert times(min_p=0.1) == -1
    assert times(top_k=150, top_p=0.5) == 0
    assert times(top_k=200) == times(top_p=0.9) == times(top_p=torch.ones(1)) == launches.SEARCHES
    assert times(top_k=torch.ones(1)) == launches.SEARCHES
    assert launches.is_small(448) and not launches.is_small(449) and not launches.is_small(0)


def test_the_sampler_has_the_penalties_of_its_problem():
    setting = Setting("cpu", "fp16")
    for case in ({"top_k": 20, "top_p": 0.9}, {}, {"min_p": 0.1}):
        problem = replace(setting.problem(5, 600), **case, **PENALISED)
        hidden, weight, logits = exact_head(problem, random_logits(problem, 1))
        tokens = PROVIDER.build(problem, weight)(hidden, SEED, counter(3))
        logits = penalised(problem, logits)
        kept = truncation(problem, PROVIDER.capabilities, logits, 1e-5)
        expected = reference.expect(
            logits, SEED, counter(3), truncation=kept, logits_error=1e-5
        )  # fmt: skip
        assert expected.accepts(tokens).all()
