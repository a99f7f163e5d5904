"""The oracle's draws compared with published vectors, plain loops, and softmax."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from flash_sample_cases import NOISE, counter
from torch import Tensor

from fsbench import reference
from fsbench.verify.noise import KNOWN_ANSWERS
from fsbench.verify.statistics import goodness_of_fit

pytestmark = pytest.mark.usefixtures("one_thread")

MASK32 = 2**32 - 1


def normal_logits(B: int, V: int, sigma: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(B + V)
    return sigma * torch.randn(B, V, generator=generator, dtype=torch.float64)


# Plain loops over Python's integers and floats


def plain_philox(words: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (second >> 32) ^ words[1] ^ key[0],
            second & MASK32,
            (first >> 32) ^ words[3] ^ key[1],
            first & MASK32,
        ]
        key = [(key[0] + 0x9E3779B9) & MASK32, (key[1] + 0xBB67AE85) & MASK32]
    return words


def plain_words(index: int, row: int, step: int, stream: int, seed: int) -> list[int]:
    return plain_philox([index, row, step & MASK32, stream], [seed & MASK32, seed >> 32 & MASK32])


def plain_gumbel(bits: int) -> float:
    return -math.log(-math.log1p(-(bits + 0.5) / 2**32))


def plain_token_draw(y: list[float], T: float, row: int, step: int, sample: int, seed: int) -> int:
    scores = []
    for v, logit in enumerate(y):
        word = v // 16 * 4 + v % 8 // 2
        lane = v % 2 + 2 * (v % 16 // 8)
        scores.append(logit + T * plain_gumbel(plain_words(word, row, step, sample, seed)[lane]))
    return scores.index(max(scores))


def plain_group_draw(y: list[float], T: float, row: int, step: int, sample: int, seed: int) -> int:
    groups: dict[int, list[int]] = {}
    for v in range(len(y)):
        groups.setdefault(v // 128 * 4 + v % 8 // 2, []).append(v)
    best, drawn = -math.inf, -1
    for group, tokens in groups.items():
        mass = sum(math.exp(y[v] / T) for v in tokens)
        words = plain_words(group, row, step, 2**16 + sample, seed)
        score = T * (math.log(mass) + plain_gumbel(words[0]))
        if score > best:
            best, reached = score, 0.0
            for v in tokens:
                reached += math.exp(y[v] / T)
                if reached > words[1] // 256 / 2**24 * mass:
                    drawn = v
                    break
    return drawn


PLAIN = {"group": plain_group_draw, "token": plain_token_draw}


@pytest.mark.parametrize(("words", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_vectors(words, key, expected):
    tensors = tuple(counter(word) for word in words)
    result = reference.philox4x32(tensors, tuple(counter(word) for word in key))
    assert tuple(int(word) for word in result) == expected
    assert plain_philox(list(words), list(key)) == list(expected)


@pytest.mark.parametrize("V", [16, 1024])
def test_tokens_and_lanes_of_words_are_one_to_one(V):
    word, lane = reference.word_and_lane(torch.arange(V))
    assert (word * 4 + lane).sort().values.tolist() == list(range(V))
    assert word[[0, 1, 8, 9]].tolist() == [0] * 4 and lane[[0, 1, 8, 9]].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("V", [128, 1024])
def test_tokens_and_members_of_groups_are_one_to_one_and_in_order(V):
    tokens = torch.arange(V)
    group, member = reference.group_and_member(tokens)
    assert (group * 32 + member).sort().values.tolist() == list(range(V))
    for g in range(V // 32):
        members = tokens[group == g]
        assert member[group == g].tolist() == list(range(32))
        assert (members // 128 == g // 4).all() and (members % 8 // 2 == g % 4).all()


def test_gumbel_is_finite_at_both_ends_and_decreasing():
    bits = counter(0, 1, 2**16, 2**31, 2**32 - 2, 2**32 - 1)
    values = reference.gumbel(bits)
    assert values.tolist() == pytest.approx([plain_gumbel(int(b)) for b in bits], abs=1e-12)
    assert (values[1:] < values[:-1]).all()
    assert values[0] == pytest.approx(33 * math.log(2), abs=1e-9)
    assert values[-1] == pytest.approx(-math.log(33 * math.log(2)), abs=1e-9)


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize(
    ("seed", "step", "sample", "T"),
    [(0, 0, 0, 1.0), (-1, 2**32 + 5, 1, 0.25), (-(2**63) + 3, -2, 2**16 - 1, 4.0)],
)
def test_the_token_is_that_of_plain_loops(seed, step, sample, T, noise):
    logits = normal_logits(3, 200, 2.0)
    drawn = reference.expect(logits, counter(seed), counter(step), T, noise, sample=sample)
    expected = [
        PLAIN[noise](y, T, row, step, sample, seed) for row, y in enumerate(logits.tolist())
    ]
    assert drawn.tokens.tolist() == expected
    assert drawn.accepts(drawn.tokens).all()


@pytest.mark.parametrize("noise", NOISE)
def test_seeds_and_steps_per_row_are_taken_row_by_row(noise):
    logits = normal_logits(4, 150, 2.0)
    seeds, steps = counter(-7, 2**40, 5, 5), counter(3, 2**31, 0, 0)
    logits[3] = logits[2]
    T = torch.tensor([0.5, 1.0, 2.0, 2.0])
    tokens = reference.expect(logits, seeds, steps, T, noise).tokens.tolist()
    expected = [
        PLAIN[noise](y, float(T[row]), 0, int(steps[row]), 0, int(seeds[row]))
        for row, y in enumerate(logits.tolist())
    ]
    assert tokens == expected
    assert tokens[2] == tokens[3]


@pytest.mark.parametrize(("T", "noise"), [(0.5, "group"), (2.0, "token")])
def test_tokens_follow_the_softmax(T, noise):
    logits = normal_logits(1, 300, 1.5)
    rows = logits.expand(4096, 300)
    counts = np.zeros(300, dtype=int)
    for step in range(4):
        tokens = reference.expect(
            rows, counter(1), counter(step), T, noise, sample=step % 3, find_acceptable=False
        ).tokens
        counts += np.bincount(tokens.numpy(), minlength=300)
    fit = goodness_of_fit(counts, torch.softmax(logits[0] / T, 0).numpy())
    assert fit.passed, fit
