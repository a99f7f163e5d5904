"""The Hopper kernel on a GPU: bitwise the results of the portable kernel, with all options."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from flash_sample_cases import same_bits
from gpu_cases import counter, problem

from fsbench import reference
from fsbench.errors import InvalidArgument
from fsbench.graphs import capture
from fsbench.kernels import Sample, describe, flash_sample, score, truncated_sample
from fsbench.kernels.configs.choice import default_config, portable_rows
from fsbench.kernels.configs.hopper import HopperConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]

SEED = 2**40 + 77


def options(names: str, B: int, V: int) -> dict[str, Any]:
    """Return the arguments of options that are named in a string."""
    generator = torch.Generator("cuda").manual_seed(V)
    row = torch.arange(B, device="cuda")
    values: dict[str, dict[str, Any]] = {
        "plain": {},
        "greedy": {"temperature": 0.0},
        "T": {"temperature": (row % 4) / 2.0},
        "seeds": {"seed": row * 7919, "offset": row + 2**33},
        "bias": {"bias": torch.randn(V, device="cuda", generator=generator).bfloat16()},
        "row_bias": {"bias": torch.randn(B, V, device="cuda", generator=generator)},
        "mask": {
            "mask": torch.randint(
                -(2**31), 2**31, (B, -(-V // 32)), device="cuda", generator=generator
            ).int()
        },
        "cap": {"soft_cap": 5.0},
        "logprob": {"return_logprob": True},
        "logz": {"return_logz": True},
        "n2": {"num_samples": 2},
        "n4": {"num_samples": 4},
        "n6": {"num_samples": 6},
    }
    return {key: value for name in names.split() for key, value in values[name].items()}


def draw(hidden, weight, kernel: str, **arguments) -> Sample:
    return flash_sample(hidden, weight, kernel=kernel, **{"seed": counter(SEED), **arguments})


def assert_equal(hidden, weight, **arguments) -> None:
    """Check that all fields have the bits of the portable kernel's; outputs are poisoned before."""
    expected = draw(hidden, weight, "portable", **{**arguments, "config": None})
    out = Sample(
        expected.tokens * 0 - 777,
        ~expected.valid,
        *[None if x is None else torch.full_like(x, 777) for x in expected[2:]],
    )
    draw(hidden, weight, "hopper", **arguments, out=out)
    for field, expected_field in zip(out, expected, strict=True):
        if field is not None and field.is_floating_point():
            assert same_bits(field, expected_field)
        else:
            assert field is expected_field is None or torch.equal(field, expected_field)


SHAPES = [(5003, 72), (33793, 1152), (129, 2880), (1, 64), (2, 5120), (50257, 4096), (151936, 64)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("V", "D"), SHAPES)
def test_tokens_are_those_of_the_portable_kernel(V, D, dtype):
    whole, weight = problem(1024, V, D, dtype)
    for B in (
        1,
        3,
        9,
        16,
        17,
        24,
        33,
        40,
        64,
        65,
        77,
        96,
        128,
        129,
        192,
        200,
        256,
        257,
        1000,
        1024,
    ):
        assert_equal(whole[:B].contiguous(), weight)


EVERYTHING = "T seeds row_bias mask cap logprob logz n6"


SIZES = [3, 64, 129, 200, 256]
"""A batch size for each form of tile."""
ALONE = ["greedy", "T", "seeds", "bias", "row_bias", "mask", "cap", "logprob", "logz", "n4"]


# Each combination compiles both kernels. An option alone has two forms of tile.
@pytest.mark.parametrize(
    "names, B",
    [
        *product((EVERYTHING, "T seeds logprob", "greedy logprob", "bias mask T"), SIZES),
        *((name, SIZES[(i + more) % 5]) for i, name in enumerate(ALONE) for more in (0, 2)),
    ],
)
def test_options(names, B):
    # For a D that is no multiple of 16 Triton compiles all kernels again.
    odd = 72 if names == EVERYTHING else 80
    for V, D in ((1, 64), (31, 64), (129, 256), (5003, odd), (40000, 512)):
        hidden, weight = problem(B, V, D)
        assert_equal(hidden, weight, **options(names, B, V))


@pytest.mark.parametrize("B", [8, 200])
def test_padding_is_never_drawn_even_if_every_logit_is_lower_than_the_cap(B):
    """Capping what lies beyond the vocabulary would give it a logit of -cap."""
    V = 129
    hidden = torch.ones(B, 64, dtype=torch.bfloat16, device="cuda")
    weight = torch.full((200, 64), -10.0, dtype=torch.bfloat16, device="cuda")
    bias = torch.full((V,), -50.0, device="cuda")
    for step in range(20):
        sample = draw(
            hidden, weight, "hopper", offset=counter(step), soft_cap=1.0, bias=bias, vocab_size=V
        )
        assert sample.valid.all() and (sample.tokens >= 0).all() and (sample.tokens < V).all()


@pytest.mark.parametrize("values", [(-0.0, 0.0, -1e-45), (1e-30, 1.0000001e-30, 9.999999e-31)])
def test_greedy_rows_take_the_lowest_token_of_the_largest_logit(values):
    """-0 and +0 are equal; numbers that differ in their last bit are not. In both kernels."""
    B, V = 70, 1000
    hidden = torch.zeros(B, 64, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(V, 64, dtype=torch.bfloat16, device="cuda")
    drawn = torch.randint(0, 3, (B, V), generator=torch.Generator().manual_seed(2))
    bias = torch.tensor(values)[drawn].cuda()
    expected = (bias == bias.amax(1, keepdim=True)).int().argmax(1)
    for temperature in (0.0, torch.zeros(B, device="cuda")):
        for more in ({}, {"return_logprob": True}, {"num_samples": 2}):
            for kernel in ("hopper", "portable"):
                sample = draw(hidden, weight, kernel, bias=bias, temperature=temperature, **more)
                assert (sample.tokens.view(B, -1) == expected[:, None]).all(), (kernel, more)


def test_bad_rows_are_invalid_and_alone():
    for B in (5, 70, 256):
        hidden, weight = problem(B, 3000, 256)
        clean = draw(hidden, weight, "hopper", return_logprob=True)
        hidden[1] = torch.nan
        hidden[3, 0] = torch.inf
        sample = draw(hidden, weight, "hopper", return_logprob=True)
        bad = torch.zeros(B, dtype=torch.bool, device="cuda")
        bad[1] = bad[3] = True
        assert torch.equal(sample.valid, ~bad)
        assert torch.equal(sample.tokens, torch.where(bad, -1, clean.tokens))
        assert torch.equal(sample.logprob[~bad], clean.logprob[~bad])
        assert sample.logprob[bad].isnan().all()
        repeated = draw(hidden, weight, "hopper")  # the workspace was reset
        assert torch.equal(repeated.tokens, sample.tokens)


CONFIGS = [
    HopperConfig(warpgroups, block_v, block_d, stages, contiguous)
    for (warpgroups, block_v, block_d, stages), contiguous in product(
        [
            (1, 128, 128, 4),
            (1, 128, 64, 9),
            (1, 256, 64, 5),
            (2, 128, 64, 7),
            (2, 256, 64, 4),
            (3, 128, 64, 5),
            (3, 128, 128, 2),
            (3, 256, 64, 4),
        ],
        (False, True),
    )
]
PAIRED = HopperConfig(3, 256, 64, 4, False, paired=True)
MIXED = HopperConfig(2, 256, 64, 4, False, extra_rows=16)
SHARED_ROWS = [PAIRED, replace(PAIRED, contiguous=True), MIXED, replace(MIXED, extra_rows=32)]
"""Rows of blocks that two warpgroups share, each with half of a tile's tokens."""


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_config_draws_the_same_tokens(config):
    for V, D in ((40961, 512), (777, 2048)):
        hidden, weight = problem(256, V, D)
        for B in (7, 33, 65, 97, 130, 200, 256):
            assert_equal(hidden[:B].contiguous(), weight, config=config, return_logprob=True)


SPLIT = HopperConfig(1, 128, 128, 4, False, split=True)


@pytest.mark.parametrize("config", SHARED_ROWS, ids=str)
@pytest.mark.parametrize(
    "names", ["plain", "T seeds logprob", "row_bias mask cap", "greedy logprob", "n6 logz"]
)
def test_shared_rows_have_the_bits_of_the_portable_kernel(config, names):
    """With shared rows that are not there, few, all, and of a second pair; V of any size."""
    odd = 72 if names == "plain" else 80  # as in test_options
    for V, D in ((100, 64), (129, odd), (33_793, 256), (40_961, 1152)):
        whole, weight = problem(700, V, D)
        for B in (1, 65, 128, 129, 144, 145, 160, 161, 200, 256, 257, 300, 320, 321, 600, 700):
            hidden = whole[:B].contiguous()
            assert_equal(hidden, weight, config=config, **options(names, B, V))


@pytest.mark.parametrize("config", SHARED_ROWS, ids=str)
def test_shared_rows_take_what_is_counted_and_stored(config):
    hidden, weight = problem(320, 40_961, 256)
    arguments = {
        "return_rank": True,
        "return_top": 5,
        "return_entropy": True,
        "return_logprob": True,
    }
    assert_equal(hidden, weight, config=config, **arguments)
    targets = torch.randint(0, 40_961, (320, 2), device="cuda")
    drawn, expected = (
        score(hidden, weight, targets, return_entropy=True, return_rank=True, **kernel_or_config)
        for kernel_or_config in ({"config": config}, {"kernel": "portable"})
    )
    assert torch.equal(drawn.rank, expected.rank) and torch.equal(drawn.valid, expected.valid)
    for name in ("logprob", "logz", "entropy"):
        assert same_bits(getattr(drawn, name), getattr(expected, name))


@pytest.mark.parametrize("config", SHARED_ROWS, ids=str)
def test_filters_read_the_logits_of_shared_rows(config):
    hidden, weight = problem(321, 40_961, 256)
    for B in (150, 321):
        rows = hidden[:B].contiguous()
        portable = default_config(B, 256, rows.device, 2)
        drawn, expected = (
            truncated_sample(rows, weight, seed=counter(SEED), top_p=0.9, config=tiles)
            for tiles in (config, portable)
        )
        assert torch.equal(drawn.tokens, expected.tokens) and drawn.valid.all()


@pytest.mark.parametrize("D", [64, 72, 1152, 4096])
def test_split_blocks_have_the_bits_of_whole_ones(D):
    """With less than a block for each program, a block, a little more, and several."""
    for V in (100, 132 * 128, 132 * 128 + 1, 19_000, 33_793, 49_155):
        whole, weight = problem(64, V, D)
        for B in (1, 9, 17, 33, 48, 64):
            hidden = whole[:B].contiguous()
            assert_equal(hidden, weight, config=SPLIT, return_logprob=True, return_logz=True)


@pytest.mark.parametrize("sizes", [(64, 9), (256, 2)])
def test_blocks_are_split_at_steps_of_any_size(sizes):
    hidden, weight = problem(64, 19_000, 1152)
    config = HopperConfig(1, 128, *sizes, False, split=True)
    assert_equal(hidden, weight, config=config, return_logz=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": 0.0, "return_logprob": True},
        {"num_samples": 6},
        {"return_rank": True, "return_top": 5},
        {"noise": "token"},
        {"names": EVERYTHING},
    ],
)
def test_a_split_takes_options(arguments):
    hidden, weight = problem(48, 19_000, 1152)
    if "names" in arguments:
        arguments = options(arguments["names"], 48, 19_000)
    assert_equal(hidden, weight, config=SPLIT, **arguments)


def test_the_choice_splits_the_blocks_of_small_heads():
    hidden, weight = problem(64, 19_000, 4096)
    assert describe(hidden[:1], weight) == describe(hidden, weight) == f"{SPLIT}"
    assert not describe(hidden[:1], weight[: 132 * 128]).startswith("hopper-")


def test_graphs_on_several_streams_hand_over_their_own_sums():
    """With more programs than multiprocessors, some start when others have ended."""
    hidden, weight = problem(64, 19_000, 1152)
    expected = [draw(hidden, weight, "portable", offset=counter(i)).tokens for i in range(50)]

    def launch(hidden, seed, offset):
        return flash_sample(hidden, weight, seed=seed, offset=offset, config=SPLIT).tokens

    offsets = [counter(0) for _ in range(3)]
    replays = [capture(launch, hidden, counter(SEED), offset) for offset in offsets]
    streams = [torch.cuda.Stream() for _ in offsets]
    drawn: list[list[torch.Tensor]] = [[] for _ in offsets]
    torch.cuda.synchronize()
    for i in range(50):
        for replay, offset, stream, tokens in zip(replays, offsets, streams, drawn, strict=True):
            with torch.cuda.stream(stream):
                offset.fill_(i)
                tokens.append(replay().clone())
    torch.cuda.synchronize()
    for tokens in drawn:
        assert all(torch.equal(a, b) for a, b in zip(tokens, expected, strict=True))


@pytest.mark.parametrize("B", [33, 200])
def test_ten_thousand_replays_in_a_row(B):
    """Each draws afresh, the last is still the oracle's, and two graphs share nothing."""
    hidden, weight = problem(B, 20_000, 64)
    seed, offset = counter(SEED), counter(0)
    seen = torch.zeros(len(weight), dtype=torch.int64, device="cuda")

    def launch(hidden, seed, offset):
        tokens = flash_sample(hidden, weight, seed=seed, offset=offset, kernel="hopper").tokens
        seen.index_add_(0, tokens, torch.ones_like(tokens))
        offset.add_(1)
        return tokens

    replay = capture(launch, hidden, seed, offset)
    seen.zero_()
    offset.zero_()
    for _ in range(10_000):
        tokens = replay()
    assert int(offset) == 10_000 and int(seen.sum()) == 10_000 * B
    logits = hidden.double() @ weight.double().T
    error = reference.matmul_error(hidden, weight)
    expected = reference.expect(logits, seed, counter(9_999), 1.0, "group", logits_error=error)
    assert expected.accepts(tokens).all()
    probability = torch.softmax(logits, 1).sum(0)
    likely = probability > 0.005
    expected_counts = 10_000 * probability[likely]
    assert ((seen[likely] - expected_counts).abs() < 6 * expected_counts.sqrt()).all()


@pytest.mark.parametrize("names", ["plain", "T seeds mask logprob", "n4 bias", "T cap logz n2"])
@pytest.mark.parametrize("B", [5, 130])
def test_token_noise_draws_the_portable_tokens(B, names):
    hidden, weight = problem(B, 3000, 256)
    assert_equal(hidden, weight, **options(names, B, 3000), noise="token")


def test_the_choice_is_visible_and_can_be_forced():
    most = portable_rows(torch.device("cuda", torch.cuda.current_device()))  # 64 on an H200
    hidden, weight = problem(most + 1, 500, 64)
    assert describe(hidden, weight).startswith("hopper-")
    few = hidden[:most]
    assert not describe(few, weight).startswith("hopper-")
    assert describe(few, weight, kernel="hopper").startswith("hopper-")
    assert not describe(hidden, weight, kernel="portable").startswith("hopper-")
    assert not describe(hidden, weight, noise="token").startswith("hopper-")
    narrow = hidden[:, :60].contiguous(), weight[:, :60].contiguous()
    assert describe(*narrow).endswith("pointers")
    with pytest.raises(InvalidArgument, match="it loads by TMA"):
        flash_sample(*narrow, seed=counter(1), kernel="hopper")
    assert describe(hidden, weight, noise="token", kernel="hopper").startswith("hopper-")
    config = HopperConfig(1, 128, 64, 2, False)
    assert describe(hidden, weight, config=config) == "hopper-g1v128d64p2"
