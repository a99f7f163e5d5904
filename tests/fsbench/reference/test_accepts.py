"""Tokens that the oracle accepts and rejects, and the logits that are sampled."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from flash_sample_cases import NOISE, counter
from torch import Tensor

from fsbench import inputs, reference
from fsbench.problem import Problem, models
from fsbench.reference import logits as logits_module

pytestmark = pytest.mark.usefixtures("one_thread")


def normal_logits(B: int, V: int, sigma: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(B + V)
    return sigma * torch.randn(B, V, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("T", [0.0, 0.3, 1.0, 1e3])
def test_nearly_always_one_token_is_acceptable(T, noise):
    logits = normal_logits(300, 200, 3.0)
    expected = reference.expect(logits, counter(3), counter(4), T, noise)
    assert expected.accepts(expected.tokens).all()
    assert (expected.acceptable.sum(1) == 1).sum() >= 295


@pytest.mark.parametrize("T", [1e-6, 1e-12, 1e-30])
def test_a_cold_draw_accepts_only_the_largest_logit(T):
    logits = normal_logits(50, 200, 3.0)
    expected = reference.expect(logits, counter(3), counter(4), T, "group")
    assert expected.tokens.tolist() == logits.argmax(1).tolist()
    others = expected.acceptable.scatter(1, expected.tokens[:, None], False)
    clear = logits.topk(2).values.diff().abs()[:, 0] > 1e-3
    assert clear.sum() > 40 and not others[clear].any()


def test_other_groups_other_members_and_forbidden_tokens_are_rejected():
    logits = torch.zeros(50, 256, dtype=torch.float64)
    logits[:, 10] = -torch.inf
    expected = reference.expect(logits, counter(1), counter(0), 1.0, "group")
    group, member = reference.group_and_member(torch.arange(256))
    for row, token in enumerate(expected.tokens.tolist()):
        accepted = expected.acceptable[row]
        assert accepted[token] and not accepted[10]
        assert not accepted[group != group[token]].any()
        assert not accepted[(member - member[token]).abs() > 1].any()
    for wrong in (-1, 256, -2, 2**31, 2**40, -(2**40)):
        assert not expected.accepts(torch.full((50,), wrong)).any()


@pytest.mark.parametrize("side", [0, 1])
def test_a_member_is_accepted_where_u_is_within_rounding_of_its_end(side):
    """u lies 1e-7 or 1e-3 inside the interval of one of two members."""
    _, u = reference.group_noise(2, counter(1), counter(0), torch.zeros(1).long())
    u = float(u[0, 0])
    for inside, both in ((1e-7, True), (1e-3, False)):
        first = u + inside if side == 0 else u - inside
        logits = torch.tensor([[math.log(first), math.log(1 - first)]], dtype=torch.float64)
        expected = reference.expect(logits, counter(1), counter(0), 1.0, "group")
        assert expected.tokens.tolist() == [side]
        assert expected.accepts(counter(1 - side)).tolist() == [both]
        coarse = reference.expect(
            logits, counter(1), counter(0), 1.0, "group", logits_error=2 * inside
        )
        assert coarse.acceptable.all()


@pytest.mark.parametrize("noise", NOISE)
def test_a_token_is_accepted_where_its_score_is_within_rounding_of_the_best(noise):
    """Tokens 0 and 2 are of different groups and words; their scores are set apart by `gap`."""
    seed, step, row = counter(1), counter(0), torch.zeros(1).long()
    logits = torch.full((1, 4), -torch.inf, dtype=torch.float64)
    if noise == "token":
        g = reference.token_noise(4, seed, step, row)[0, [0, 2]]
    else:
        g = reference.group_noise(4, seed, step, row)[0][0, [0, 1]]
    for gap, both in ((1e-6, True), (1e-3, False)):
        logits[0, [0, 2]] = -2.0 * g + torch.tensor([gap, 0.0], dtype=torch.float64)
        expected = reference.expect(logits, seed, step, 2.0, noise)
        assert expected.tokens.tolist() == [0]
        assert expected.acceptable[0].tolist() == [True, False, both, False]
        coarse = reference.expect(logits, seed, step, 2.0, noise, logits_error=gap)
        assert coarse.acceptable[0, 2]


@pytest.mark.parametrize("noise", NOISE)
def test_greedy_takes_the_lowest_of_equal_logits(noise):
    logits = torch.zeros(3, 300, dtype=torch.float64)
    logits[1, [2, 8]] = 1.0
    logits[2, [131, 136, 200]] = 5.0
    for T in (0.0, torch.zeros(3)):
        expected = reference.expect(logits, counter(1), counter(0), T, noise)
        assert expected.tokens.tolist() == [0, 2, 131]
        assert not expected.accepts(counter(-1, 3, 130)).any()


@pytest.mark.parametrize("noise", NOISE)
def test_rows_without_a_draw(noise):
    logits = normal_logits(9, 140)
    logits[0, 139] = torch.nan
    logits[1, 0] = torch.inf
    logits[2] = -torch.inf
    logits[3, 1:] = -torch.inf  # one token is enough
    T = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, torch.nan, torch.inf, -torch.inf, 0.0])
    expected = reference.expect(logits, counter(1), counter(0), T, noise)
    drawn = torch.tensor([False, False, False, True, False, False, False, False, True])
    assert ((expected.tokens >= 0) == drawn).all()
    assert expected.tokens[3] == 0 and expected.tokens[8] == logits[8].argmax()
    assert (expected.accepts(torch.full((9,), -1)) == ~drawn).all()
    for token in (0, 139):
        assert not expected.accepts(torch.full((9,), token))[~drawn].any()
    alone = reference.expect(logits, counter(1), counter(0), float("nan"), noise)
    assert (alone.tokens == -1).all()


# What is sampled


@pytest.mark.parametrize("V", [1, 31, 32, 33, 100])
def test_a_packed_mask_is_unpacked_bit_by_bit(V):
    words = torch.randint(-(2**31), 2**31, (3, -(-V // 32))).int()
    words[0] = -1
    plain = [[bool((int(words[b, v // 32]) >> (v % 32)) & 1) for v in range(V)] for b in range(3)]
    assert logits_module.unpacked(words, V).tolist() == plain
    mask = torch.tensor(plain)
    assert torch.equal(logits_module.unpacked(mask, V), mask)


@pytest.mark.parametrize("per_row", [False, True])
def test_soft_cap_then_bias_then_mask(per_row):
    logits = normal_logits(2, 40, 5.0)
    bias = normal_logits(2, 41, 3.0)[:, :40].half()
    mask = normal_logits(2, 42)[:, :40] > 0
    logits[0, int(mask[0].int().argmin())] = torch.nan  # masked: of no consequence
    processed = reference.processed_logits(
        logits, soft_cap=4.0, bias=bias if per_row else bias[1], mask=mask
    )
    for b in range(2):
        for v in range(40):
            added = float(bias[b if per_row else 1, v])
            capped = 4.0 * math.tanh(float(logits[b, v]) / 4.0) + added
            expected = capped if mask[b, v] else -math.inf
            assert float(processed[b, v]) == pytest.approx(expected, abs=1e-12)
    assert torch.equal(reference.processed_logits(logits[1:]), logits[1:])


def test_log_probabilities_are_those_of_plain_loops():
    logits = normal_logits(4, 30, 3.0)
    logits[:, 7] = -torch.inf
    T = torch.tensor([0.0, 0.5, 1.0, 20.0])
    log_z = reference.log_partition(logits, T)
    for row, y in enumerate(logits.tolist()):
        scale = float(T[row]) or 1.0
        expected = math.log(sum(math.exp(logit / scale) for logit in y))
        assert float(log_z[row]) == pytest.approx(expected, abs=1e-9)
        for token in (0, 7, 29):
            tokens = torch.full((4,), token)
            value = float(reference.log_probability(logits, tokens, T)[row])
            assert value == pytest.approx(y[token] / scale - expected, abs=1e-9)
    for number in (0.0, 1.0):
        assert torch.equal(reference.log_partition(logits, number), reference.log_partition(logits))
    assert log_z[0] == reference.log_partition(logits)[0], "T = 0 counts as 1"


def test_log_partition_neither_overflows_nor_underflows():
    logits = torch.tensor([[1e5, 1e5], [-1e5, -1e5]])
    assert reference.log_partition(logits).tolist() == pytest.approx(
        [1e5 + math.log(2), -1e5 + math.log(2)], abs=1e-9
    )
    assert reference.log_partition(torch.full((1, 3), -torch.inf)).tolist() == [-math.inf]


def test_the_error_of_a_matmul_ignores_rows_that_are_not_finite():
    hidden, weight = torch.ones(2, 16), torch.ones(3, 16)
    error = reference.matmul_error(hidden, weight)
    assert 0 < error < 1e-4
    hidden[1, 0], weight[2, 0] = torch.nan, torch.inf
    assert reference.matmul_error(hidden, weight) <= error


def test_matmul_error_holds_for_an_accumulator_that_truncates():
    """As design/noise.md says: tensor cores that cut off, at the largest D of the named models."""
    D = max(model.D for model in models().values())
    for distribution in ("normal:1", "zipf:1", "peaked:20"):
        problem = Problem(2, D, 64, "bf16", device="cpu", logits=distribution)
        weight, hidden = inputs.make_weight(problem, 0), inputs.make_hidden(problem, 0)
        products = hidden.double()[:, None, :] * weight.double()[None]
        groups = products.reshape(2, 64, D // 16, 16).sum(-1).numpy()
        accumulator = np.zeros((2, 64))
        for step in range(D // 16):
            exact = accumulator + groups[..., step]
            rounded = exact.astype(np.float32)
            over = np.abs(rounded.astype(float)) > np.abs(exact)
            toward_zero = np.where(over, np.nextafter(rounded, np.float32(0)), rounded)
            accumulator = toward_zero.astype(float)
        error = np.abs(accumulator - products.sum(-1).numpy()).max()
        assert error < reference.matmul_error(hidden, weight)
