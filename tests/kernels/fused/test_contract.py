"""The contract of flash_sample: tables of calls and of options, for both kernels of noise and code.

`check` compares tokens, validity and log-probabilities with the oracle. It also checks that nothing
else is written and that the workspace is reset. A row of the table may have another condition.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from flash_sample_cases import (
    NOISE,
    SEED,
    TILES,
    check,
    counter,
    normal_logits,
    packed,
    problem,
    stored,
)

from fsbench.kernels import Sample, flash_sample
from fsbench.kernels.fused import launch as launching

pytestmark = pytest.mark.usefixtures("one_thread")
interpreted = pytest.mark.interpreter
SCORES = {"return_logprob": True, "return_logz": True}
CODE = [pytest.param("kernel", marks=interpreted), "reference"]

Row = tuple[str, dict[str, Any], Callable[[Sample], Any]]
"""A name, the call, and another condition on the result."""


def anything(sample: Sample) -> bool:
    return True


def shapes() -> Iterator[Row]:
    """Shapes that fill no tile, and addresses and rows that TMA cannot load."""
    for B, V, D, dtype, temperature in (
        (1, 1, 15, torch.float16, 1.0),
        (3, 127, 40, torch.float16, 0.3),
        (17, 129, 72, torch.float16, 1.0),
        (1, 1000, 72, torch.float32, 1.0),
        (4, 300, 15, torch.float32, 2.5),  # rows that TMA cannot load take the pointer path
        (70, 50, 24, torch.float32, 1.0),  # more blocks of rows than programs
    ):
        hidden, weight = problem(B, V, D, dtype)
        noise = {"seed": counter(-(V**3)), "offset": counter(D)}
        call = {"hidden": hidden, "weight": weight, "temperature": temperature, **noise}
        yield f"{B}, {V}, {D}", call, anything
    for name in ("hidden", "weight"):
        matrices = dict(zip(("hidden", "weight"), problem(3, 100, 16, torch.float16), strict=True))
        flat = torch.empty(matrices[name].numel() + 1, dtype=torch.float16)
        matrices[name] = flat[1:].view(matrices[name].shape).copy_(matrices[name])
        assert matrices[name].data_ptr() % 16 != 0
        yield f"unaligned {name}", matrices, anything
    hidden, weight = problem(4, 1, 19, torch.float16)
    call = {"hidden": hidden[:1, :16], "weight": weight[:, :16]}  # torch: contiguous
    yield "the stride of a single row", call, anything


def temperatures() -> Iterator[Row]:
    """A temperature by which fp32 cannot divide is greedy."""
    logits = normal_logits(9, 128)
    greedy = logits.argmax(1)
    rows = torch.tensor([0, 1e-300, 1e-42, 1e-38, 1e-30, 0.3, 1, 1e30, 0.7])
    cold = rows < 1e-20
    call = {**stored(logits), "config": TILES}
    yield (
        "T of each row",
        call | {"temperature": rows},
        lambda sample: sample.tokens[cold].equal(greedy[cold]),
    )
    for T in (0, 1e-42, 1e-30):
        yield f"T = {T}", call | {"temperature": T}, lambda sample: sample.tokens.equal(greedy)
    for T in (0.3, 1e30):
        yield f"T = {T}", call | {"temperature": T}, anything


def greedy_rows() -> Iterator[Row]:
    """The lowest token of the largest logit: -0 and +0 are equal, a last bit is a difference."""
    drawn = torch.randint(0, 3, (8, 200), generator=torch.Generator().manual_seed(2))
    for values in ([-0.0, 0.0, -1e-45], [1e-30, 1.0000001e-30, 9.999999e-31]):
        rows = torch.tensor(values)[drawn]
        rows[0] = -rows[0].abs()
        expected = [int((row == row.max()).nonzero()[0]) for row in rows]
        for T, scores in ((0.0, {}), (torch.zeros(8), {}), (torch.zeros(8), SCORES)):
            yield (
                f"greedy among {values[1]}",
                {**stored(rows), "temperature": T, "config": TILES, **scores},
                lambda sample, expected=expected: sample.tokens.tolist() == expected,
            )
    # Also across groups and words: token 2 is in a later group and word than token 8.
    ties = [(2, 8), (8, 1), (7, 128), (131, 136), (0, 199), (127, 128, 129), (16, 2, 64)]
    logits = torch.full((len(ties) + 1, 200), -5.0)
    for row, tied in enumerate(ties):
        logits[row, list(tied)] = -0.5
    lowest = [*(min(tied) for tied in ties), 0]
    for T in (0.0, torch.zeros(len(logits))):
        yield (
            "ties",
            {**stored(logits), "temperature": T},
            lambda sample: sample.tokens.tolist() == lowest,
        )


def masks() -> Iterator[Row]:
    """A forbidden token is never returned, whatever its logit."""
    only = torch.tensor([0, 1, 8, 31, 63, 64, 127, 128, 199])
    logits = normal_logits(len(only), 200, sigma=20.0)
    mask = torch.arange(200) == only[:, None]
    logits[mask] = -1000.0
    T = torch.tensor([0.0, 1.0, 1e-30, 100.0, 1.0, 0.5, 1.0, 0.2, 1.0])
    for form in (mask, packed(mask)):
        yield (
            "one allowed token",
            {**stored(logits), "mask": form, "temperature": T, "num_samples": 2, **SCORES},
            lambda sample: (
                sample.tokens.T.tolist() == [only.tolist()] * 2
                and sample.logprob.abs().max() < 1e-4
            ),
        )
    logits = normal_logits(16, 100, sigma=0.5)
    allowed = torch.rand(16, 100, generator=torch.Generator().manual_seed(116)) < 0.05
    allowed[:, [3, 40]] = True
    wild = torch.tensor([1e30, torch.nan, torch.inf, 100.0])[torch.arange(100) % 4]
    calls = {
        "masked": {**stored(torch.where(allowed, logits, wild)), "mask": packed(allowed)},
        "forbidden by a bias": stored(logits.where(allowed, -torch.inf)),
    }
    for name, call in calls.items():
        yield (
            name,
            {**call, "num_samples": 8, "config": TILES, "return_logz": True},
            lambda sample: (
                allowed.gather(1, sample.tokens).all()
                and (sample.tokens == 3).sum() > 10 < (sample.tokens == 40).sum()
            ),
        )


def wide_logits() -> Iterator[Row]:
    """Soft caps, logits far from zero, and padding of a tile, which never wins."""
    hidden, weight = problem(4, 129, 24, sigma=40.0)
    hidden[0, 3], hidden[1, 5] = 1e30, -1e30  # logits as large as they come
    hidden[2] = torch.nan
    for cap in (0.5, 30.0, 1e3):
        call = {"hidden": hidden, "weight": weight, "soft_cap": cap, "temperature": 0.6}
        yield f"soft cap {cap}", {**call, **SCORES}, anything
    for shift in (-1000.0, 1000.0):
        logits = normal_logits(3, 100) + shift
        logits[1, 7] += 200.0
        yield (
            f"logits near {shift}",
            {**stored(logits), "config": TILES, **SCORES},
            lambda sample: (sample.logprob <= 1e-4).all() and sample.logprob[1].abs() < 1e-4,
        )
    logits = normal_logits(4, 33) - 1000.0
    for T in (0.0, 1.0):
        call = {**stored(logits), "temperature": T, "config": TILES}
        yield "padding of a tile", call, lambda sample: (sample.tokens < 33).all()


def undrawn_rows() -> Iterator[Row]:
    """Rows without a draw are -1 and do not affect others."""
    logits = normal_logits(8, 200)
    logits[0, 199] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    logits[4] = torch.nan
    logits[6, 5], logits[6, 70] = torch.nan, torch.inf
    valid = [False, True, False, False, False, True, False, True]
    for T in (0.0, 0.7):
        yield (
            "rows without a draw",
            {**stored(logits), "temperature": T, "offset": counter(9), **SCORES},
            lambda sample: (
                sample.valid.tolist() == valid and (sample.tokens >= 0).tolist() == valid
            ),
        )
    logits = normal_logits(18, 100)
    logits[[3, 17]] = torch.nan
    T = torch.ones(18)
    T[5], T[6] = 0.0, -1.0
    yield (
        "several samples of them",
        {**stored(logits), "temperature": T, "num_samples": 2, "config": TILES, **SCORES},
        lambda sample: (
            sample.tokens[[3, 6, 17]].tolist() == [[-1, -1]] * 3
            and sample.tokens[5].tolist() == [int(logits[5].argmax())] * 2
        ),
    )


def samples() -> Iterator[Row]:
    """Eleven samples take three launches, the last of three samples."""
    call = {**stored(normal_logits(4, 128)), "offset": counter(7), "config": TILES}
    yield (
        "eleven samples",
        {**call, "num_samples": 11, "temperature": 2.0, **SCORES},
        lambda sample: (
            sample.tokens.shape == (4, 11)
            and all(len(set(row)) >= 8 for row in sample.tokens.tolist())
        ),
    )
    for V in (60, 300):  # nothing is written for the half beyond the vocabulary
        tiles = replace(TILES, block_v=256)
        call = {**stored(normal_logits(5, V)), "num_samples": 2, "config": tiles}
        yield (
            f"a last tile less than half full, V = {V}",
            {**call, "return_logprob": True},
            anything,
        )


def combination(number: int, dtypes=(torch.float16, torch.float32)) -> dict:
    """Return a call with random options, each of which is absent in some calls."""
    chance = random.Random(number)
    dtype = chance.choice(dtypes)
    B, V, D = chance.choice([1, 5, 18]), chance.choice([33, 127, 140]), chance.choice([15, 24, 72])
    hidden, weight = problem(B, V + chance.choice([0, 27]), D, dtype, sigma=3.0)
    weight[V:], weight[V + 1 :: 3] = 1e4 * hidden[0].sign(), torch.nan  # padding
    call = {"hidden": hidden, "weight": weight, "vocab_size": V}
    per_row = torch.linspace(0, 2, B)
    per_row[B // 2] = chance.choice([-1.0, -1e-30, torch.nan, torch.inf, -torch.inf, 0.5])
    bias = normal_logits(B, V).to(chance.choice([torch.bfloat16, torch.float16, torch.float32]))
    bias[:, 1::5] = -torch.inf
    mask = normal_logits(B, V) > 0
    mask[0] = chance.choice([True, False])
    words = packed(mask, padding=True)
    more = torch.full((B, 2), -1, dtype=torch.int32)  # of a padded vocabulary
    choices = {
        "temperature": [0.0, 0.4, 1.0, per_row, per_row],
        "bias": [None, bias, bias[0].clone()],
        "mask": [None, mask, packed(mask), words, torch.cat([words, more], 1)],
        "seed": [SEED, counter(*range(B)) - 2**50],
        "offset": [None, counter(-1), counter(*range(B)) * 2**30],
        "num_samples": [1, 2],
        "soft_cap": [None, 4.0],
        "return_logprob": [False, True],
        "return_logz": [False, True],
        "config": [None, TILES],
    }
    return call | {name: chance.choice(values) for name, values in choices.items()}


def combinations() -> Iterator[Row]:
    for number in range(10):
        yield f"combination {number}", combination(number), anything


TABLE: list[Row] = [
    row
    for rows in (
        *(shapes, temperatures, greedy_rows, masks, wide_logits, undrawn_rows, samples),
        combinations,
    )
    for row in rows()
]


@pytest.fixture
def code(request, monkeypatch) -> str:
    """The kernel in the interpreter; or the reference, as without TRITON_INTERPRET."""
    if request.param == "reference":
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        monkeypatch.setattr(launching, "launch", None)
    return request.param


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("code", CODE, indirect=True)
@pytest.mark.parametrize(
    ("call", "holds"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_it_draws_what_the_oracle_draws(call, holds, code, noise):
    assert holds(check(**call, noise=noise))


@pytest.mark.parametrize("number", range(2))
def test_bf16_is_computed_by_the_reference(number, monkeypatch):
    """Also in the interpreter, whose bf16 products are wrong."""
    monkeypatch.setattr(launching, "launch", None)
    check(**combination(number, [torch.bfloat16]))


HIDDEN, WEIGHT = problem(3, 140, 32, torch.float16)
ONLY_7 = torch.full((140,), -torch.inf)
ONLY_7[7] = 0.0
OPTIONS: dict[str, tuple[Any, Callable[[Sample, Sample], Any]]] = {
    "temperature": (
        torch.zeros(3),
        lambda x, _: x.tokens.equal((HIDDEN.float() @ WEIGHT.float().T).argmax(1)),
    ),
    "bias": (ONLY_7, lambda x, _: x.tokens.tolist() == [7, 7, 7]),
    "mask": (
        ONLY_7.isfinite().expand(3, 140).contiguous(),
        lambda x, _: x.tokens.tolist() == [7, 7, 7],
    ),
    "offset": (counter(8), lambda x, plain: not x.tokens.equal(plain.tokens)),
    "num_samples": (3, lambda x, plain: x.tokens[:, 0].equal(plain.tokens)),
    "soft_cap": (1e-6, lambda x, plain: not x.tokens.equal(plain.tokens)),
    "vocab_size": (1, lambda x, _: x.tokens.tolist() == [0, 0, 0]),
    "return_logprob": (True, lambda x, _: (x.logprob < 0).all()),
    "return_logz": (True, lambda x, _: (x.logz > 0).all()),
    "return_entropy": (True, lambda x, _: (x.entropy > 0).all()),
    "return_rank": (True, lambda x, _: (x.rank >= 0).all()),
    "return_top": (2, lambda x, _: x.top_tokens.shape == (3, 2)),
    "noise": (None, lambda x, plain: not x.tokens.equal(plain.tokens)),
    "shard": (None, lambda x, plain: x.tokens.equal(plain.tokens)),
    "out": (
        Sample(torch.zeros(3).long(), torch.zeros(3).bool()),
        lambda x, plain: x is OPTIONS["out"][0] and x.tokens.equal(plain.tokens),
    ),
    "kernel": ("portable", lambda x, plain: x.tokens.equal(plain.tokens)),
    "config": (TILES, lambda x, plain: x.tokens.equal(plain.tokens)),
}
"""Options of flash_sample: a value, and a condition on the results with and without it."""


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("code", CODE, indirect=True)
def test_every_option_takes_effect_from_the_second_call_on(code, noise):
    """After two plain calls, so that an option which is missing in the launch key would be lost."""
    plain_call = {"hidden": HIDDEN, "weight": WEIGHT, "seed": counter(3)}
    assert {*OPTIONS, *plain_call} == set(inspect.signature(flash_sample).parameters)
    for _ in range(2):
        plain = flash_sample(**plain_call, noise=noise)
    for name, (value, holds) in OPTIONS.items():
        value = NOISE[noise == NOISE[0]] if name == "noise" else value
        assert holds(flash_sample(**plain_call | {"noise": noise, name: value}), plain), name
    assert flash_sample(**plain_call, noise=noise).tokens.equal(plain.tokens)
