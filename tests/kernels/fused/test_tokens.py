"""flash_sample in the interpreter: tokens against the oracle, at shapes that fill no tile."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from flash_sample_cases import (
    NOISE,
    SEED,
    TILES,
    check,
    counter,
    exact_logits,
    normal_logits,
    packed,
    problem,
    same_bits,
    stored,
)

from fsbench import inputs
from fsbench.kernels import Sample, flash_sample

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize(
    ("B", "V", "D", "dtype", "temperature"),
    [
        (1, 1, 15, torch.float16, 1.0),
        (3, 127, 40, torch.float16, 0.3),
        (17, 129, 72, torch.float16, 1.0),
        (1, 1000, 72, torch.float32, 1.0),
        (4, 300, 15, torch.float32, 2.5),  # rows that TMA cannot load take the pointer path
        (70, 50, 24, torch.float32, 1.0),  # more blocks of rows than programs
    ],
    ids=str,
)
def test_tokens_are_the_oracles(B, V, D, dtype, temperature, noise):
    hidden, weight = problem(B, V, D, dtype)
    check(
        hidden=hidden,
        weight=weight,
        seed=counter(-(V**3)),
        offset=counter(D),
        temperature=temperature,
        noise=noise,
    )


@pytest.mark.parametrize("unaligned", ["hidden", "weight"])
def test_an_unaligned_base_address_takes_the_pointer_path(unaligned):
    matrices = dict(zip(("hidden", "weight"), problem(3, 100, 16, torch.float16), strict=True))
    aligned = matrices[unaligned]
    flat = torch.empty(aligned.numel() + 1, dtype=torch.float16)
    matrices[unaligned] = flat[1:].view(aligned.shape).copy_(aligned)
    assert matrices[unaligned].data_ptr() % 16 != 0
    check(**matrices, noise="token")


def test_the_stride_of_a_single_row_does_not_matter():
    hidden, weight = problem(4, 1, 19, torch.float16)
    check(hidden=hidden[:1, :16], weight=weight[:, :16], noise="token")  # torch: contiguous


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-42, 1e-38, 1e-30, 0.3, 1, 1e30], ids=str)
def test_temperature(temperature, noise):
    """By a temperature that fp32 cannot divide by, draws are greedy."""
    logits = normal_logits(9, 128)
    call = {**stored(logits), "noise": noise, "config": TILES}
    for form in (temperature, torch.full((9,), float(temperature))):
        tokens = check(**call, temperature=form).tokens
        if temperature < 1e-20:
            assert tokens.tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("form", ["number", "tensor", "tensor, with log Z"])
@pytest.mark.parametrize("logits", ["zeros", "near 1e-30"])
def test_greedy_rows_take_the_lowest_token_of_the_largest_logit(logits, form, noise):
    """-0 and +0 are equal; numbers that differ in their last bit are not."""
    drawn = torch.randint(0, 3, (8, 200), generator=torch.Generator().manual_seed(2))
    values = {"zeros": [-0.0, 0.0, -1e-45], "near 1e-30": [1e-30, 1.0000001e-30, 9.999999e-31]}
    rows = torch.tensor(values[logits])[drawn]
    rows[0] = -rows[0].abs()
    temperature = 0.0 if form == "number" else torch.zeros(8)
    call = {**stored(rows), "noise": noise, "temperature": temperature, "config": TILES}
    with_logz = form.endswith("log Z")
    sample = check(**call, return_logprob=with_logz, return_logz=with_logz)
    assert sample.tokens.tolist() == rows.argmax(1).tolist()
    assert sample.tokens.tolist() == [int((row == row.max()).nonzero()[0]) for row in rows]


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize(
    ("seed", "offset"),
    [
        (-1, 2**32 - 1),
        (2**63 - 1, 0),
        (-(2**63), 2**32 + 1),
        (0x0123456789ABCDEF, -1),
    ],
)
def test_all_bits_of_seed_and_the_low_half_of_offset_count(seed, offset, noise):
    call = {**stored(normal_logits(9, 100)), "noise": noise, "temperature": 5.0, "config": TILES}
    sample = check(**call, seed=counter(seed), offset=counter(offset))
    for other in (counter(seed ^ 1 << 62), counter(seed ^ 1)):
        changed = flash_sample(**call, seed=other, offset=counter(offset))
        assert changed.tokens.tolist() != sample.tokens.tolist()
    for bit, same in ((31, False), (32, True)):
        changed = flash_sample(**call, seed=counter(seed), offset=counter(offset ^ 1 << bit))
        assert (changed.tokens.tolist() == sample.tokens.tolist()) == same


@pytest.mark.parametrize(
    ("noise", "configs"),
    [
        (
            "group",
            [
                replace(TILES, block_b=32, block_v=256, block_d=32, flatten=True),
                replace(TILES, v_on_m=True, slice=16, block_d=16, ctas_per_sm=3),
            ],
        ),
        (
            "token",
            [
                replace(TILES, block_b=32, block_v=256, slice=32, flatten=True),
                replace(TILES, v_on_m=True, block_d=16, ctas_per_sm=3),
            ],
        ),
    ],
    ids=NOISE,
)
def test_results_do_not_depend_on_the_tiles(noise, configs):
    head, weight = inputs.head_with_logits(normal_logits(16, 300), torch.float16, 40)
    call = {
        "hidden": head[torch.arange(17) % 16],
        "weight": weight,
        "noise": noise,
        "temperature": torch.linspace(0, 2, 17),
        "offset": counter(*range(17)),
        "mask": packed(normal_logits(17, 300) > 0),
        "return_logprob": True,
        "return_logz": True,
    }
    first = check(**call, config=TILES)
    for config in configs:
        sample = check(**call, config=config)
        assert sample.tokens.tolist() == first.tokens.tolist(), config
        assert same_bits(sample.logprob, first.logprob), config
        assert same_bits(sample.logz, first.logz), config


@pytest.mark.parametrize("shift", [0.0, -300.0])
def test_log_z_depends_on_the_logits_alone(shift):
    """Not on the noise, the tiles, the row's number or its neighbours, nor on greedy companions."""
    logits = normal_logits(5, 700, sigma=12.0) + shift
    T = torch.tensor([1.0, 0.3, 1e-6, 50.0, 1.0])
    wide = replace(TILES, block_v=256, slice=16)
    whole = flash_sample(**stored(logits), seed=SEED, temperature=T, return_logz=True).logz
    assert whole.isfinite().all()
    for noise, config in product(NOISE, (TILES, wide)):
        call = {"seed": SEED, "return_logz": True, "noise": noise, "config": config}
        for row in range(5):
            alone = flash_sample(**stored(logits[[row]]), **call, temperature=float(T[row]))
            assert same_bits(alone.logz, whole[[row]]), (row, noise, config)
        greedy = flash_sample(**stored(logits), **call, temperature=0.0)
        assert same_bits(greedy.logz[[0, 4]], whole[[0, 4]])


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_a_tile_never_wins(temperature, noise):
    """Its logits are below all others, however negative these are."""
    logits = normal_logits(4, 33) - 1000.0
    tokens = check(**stored(logits), temperature=temperature, noise=noise, config=TILES).tokens
    assert (tokens < 33).all()


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "drawn"])
def test_rows_without_a_draw_are_minus_one_and_disturb_no_other(temperature, noise):
    logits = normal_logits(8, 200)
    call = {"temperature": temperature, "noise": noise, "offset": counter(9)}
    clean = check(**stored(logits), **call).tokens
    logits[0, 199] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    logits[4] = torch.nan
    logits[6, 5] = torch.nan
    logits[6, 70] = torch.inf
    sample = check(**stored(logits), **call, return_logprob=True, return_logz=True)
    assert sample.tokens[[0, 2, 3, 4, 6]].tolist() == [-1] * 5
    assert sample.valid.tolist() == [False, True, False, False, False, True, False, True]
    assert sample.tokens[[1, 5, 7]].tolist() == clean[[1, 5, 7]].tolist()


def test_what_is_returned_by_default():
    hidden, weight = problem(5, 140, 32, torch.float16)
    sample = flash_sample(hidden, weight, seed=SEED)
    assert isinstance(sample, Sample)
    assert (sample.tokens.dtype, sample.tokens.shape) == (torch.int64, (5,))
    assert (sample.valid.dtype, sample.valid.shape) == (torch.bool, (5,))
    assert sample.valid.all()
    assert sample.logprob is None and sample.logz is None
    group = check(hidden=hidden, weight=weight, noise="group")
    assert sample.tokens.tolist() == group.tokens.tolist(), "auto is group"
    assert (
        group.tokens.tolist() != check(hidden=hidden, weight=weight, noise="token").tokens.tolist()
    )


def test_operands_are_left_as_they_were():
    hidden, weight = problem(3, 140, 32)
    before = exact_logits(hidden, weight)
    seed, offset = counter(4), counter(5)
    flash_sample(hidden, weight, seed=seed, offset=offset)
    assert torch.equal(exact_logits(hidden, weight), before)
    assert (seed.tolist(), offset.tolist()) == ([4], [5])
