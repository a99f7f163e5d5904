"""The fused kernel in the interpreter against the oracle, at shapes that fill no tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsbench import inputs, reference
from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import _workspace, flash_sample
from fsbench.kernels._flash_sample_op import default_config
from fsbench.kernels._flash_sampling_config import (
    BUCKETS,
    TileConfig,
    bucket,
    config_for,
    space,
)

interpreter = pytest.mark.interpreter
CPU = torch.device("cpu")
TILES = TileConfig(16, 64, 32, 16, False, False, True, 4, 1, 1)


def problem(B: int, V: int, D: int, dtype: torch.dtype, sigma: float = 2.0):
    generator = torch.Generator().manual_seed(B * 7919 + V * 31 + D)
    hidden = torch.randn(B, D, generator=generator).to(dtype)
    weight = (sigma * torch.randn(V, D, generator=generator) / D**0.5).to(dtype)
    return hidden, weight


def scalar(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64)


def assert_matches_oracle(hidden, weight, temperature=1.0, seed=1, offset=0, config=None):
    """Poisoned outputs, the oracle's tokens, and a workspace left as it was found."""
    sample = flash_sample(
        hidden,
        weight,
        temperature=temperature,
        seed=scalar(seed),
        offset=scalar(offset),
        config=config,
    )
    expected = reference.expect(
        hidden.double() @ weight.double().T,
        scalar(seed),
        scalar(offset),
        temperature,
        logits_error=reference.matmul_error(hidden, weight),
    )
    assert expected.accepts(sample.tokens).all(), (sample.tokens, expected.tokens)
    assert sample.valid.tolist() == (expected.tokens >= 0).tolist()
    work = _workspace.workspace(hidden.shape[0], CPU)
    assert (work.keys == _workspace.LOWEST_KEY).all()
    assert (work.arrivals == 0).all()
    return sample


@interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("D", [16, 40, 72])
@pytest.mark.parametrize("V", [1, 127, 129, 1000])
@pytest.mark.parametrize("B", [1, 3, 17])
def test_tokens_are_the_oracles(B, V, D, dtype):
    assert_matches_oracle(*problem(B, V, D, dtype), seed=V, offset=D)


@interpreter
@pytest.mark.parametrize("D", [15, 17, 70])
def test_rows_that_tma_cannot_load_take_the_pointer_path(D):
    hidden, weight = problem(3, 130, D, torch.float16)
    assert_matches_oracle(hidden, weight)


@interpreter
def test_an_unaligned_base_address_takes_the_pointer_path():
    flat = torch.randn(3 * 16 + 1).half()
    hidden = flat[1:].view(3, 16)
    assert hidden.data_ptr() % 16 != 0
    assert_matches_oracle(hidden, problem(1, 100, 16, torch.float16)[1])


@interpreter
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
def test_temperature(temperature):
    hidden, weight = problem(5, 300, 40, torch.float32)
    sample = assert_matches_oracle(hidden, weight, temperature)
    if temperature == 0:
        assert sample.tokens.tolist() == (hidden @ weight.T).argmax(1).tolist()


@interpreter
@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
@pytest.mark.parametrize("offset", [0, 1, 2**32 - 1])
def test_all_bits_of_seed_and_offset_count_as_in_the_oracle(seed, offset):
    assert_matches_oracle(*problem(2, 200, 16, torch.float32), seed=seed, offset=offset)


@interpreter
def test_tokens_do_not_depend_on_the_tiles():
    hidden, weight = problem(17, 500, 48, torch.float32)
    first = assert_matches_oracle(hidden, weight).tokens
    for tiles in (
        replace(TILES, block_b=32, block_v=128, slice=32),
        replace(TILES, block_v=16, block_d=16, rotate=False),
        replace(TILES, v_on_m=True, block_v=256, slice=64, ctas_per_sm=3),
        replace(TILES, flatten=True, block_d=64),
    ):
        assert assert_matches_oracle(hidden, weight, config=tiles).tokens.tolist() == first.tolist()


@interpreter
def test_tokens_do_not_depend_on_the_rows_behind():
    hidden, weight = problem(40, 300, 32, torch.float32)
    whole = assert_matches_oracle(hidden, weight).tokens
    for B in (1, 15, 16, 33):
        part = assert_matches_oracle(hidden[:B].contiguous(), weight).tokens
        assert part.tolist() == whole[:B].tolist()


@interpreter
def test_more_rows_than_one_block_share_the_programs():
    tiles = replace(TILES, ctas_per_sm=2)
    assert_matches_oracle(*problem(70, 333, 24, torch.float32), config=tiles)


@interpreter
def test_all_negative_logits_never_pick_the_padding():
    hidden, weight = problem(4, 33, 16, torch.float32)
    weight -= 50 * hidden.mean(0).sign() / 4
    assert_matches_oracle(hidden, weight, 0.0)


@interpreter
def test_rows_without_a_draw_are_minus_one_and_disturb_no_other():
    hidden, weight = problem(6, 200, 32, torch.float32)
    weight[:, -1] = 1.0
    hidden[:, -1] = 0.0
    clean = assert_matches_oracle(hidden, weight).tokens
    hidden[1] = torch.nan
    hidden[3] = 0.0
    hidden[3, -1] = -torch.inf
    hidden[4] = 0.0
    hidden[4, -1] = torch.inf
    sample = assert_matches_oracle(hidden, weight)
    assert sample.tokens[[1, 3, 4]].tolist() == [-1, -1, -1]
    assert sample.tokens[[0, 2, 5]].tolist() == clean[[0, 2, 5]].tolist()


@interpreter
def test_equal_scores_give_the_lowest_token():
    hidden, weight = inputs.head_with_logits(torch.zeros(3, 300), torch.float32)
    sample = flash_sample(hidden, weight, temperature=0.0, seed=scalar(0), offset=scalar(0))
    assert sample.tokens.tolist() == [0, 0, 0]


MATRIX = torch.zeros(4, 32, dtype=torch.float32)
GOOD = {"hidden": MATRIX, "weight": torch.zeros(100, 32), "seed": scalar(0), "offset": scalar(0)}


@interpreter
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": [[0.0]]}, InvalidType, "hidden: expected a tensor; got list"),
        ({"seed": 5}, InvalidType, "seed: expected a tensor; got int"),
        ({"hidden": MATRIX.double()}, InvalidType, "hidden: expected dtype .* got torch.float64"),
        ({"weight": torch.zeros(100, 32).half()}, InvalidType, "weight: expected dtype"),
        ({"hidden": MATRIX[0]}, InvalidArgument, r"hidden: expected a non-empty matrix; got .*32"),
        ({"hidden": MATRIX[:0]}, InvalidArgument, "hidden: expected a non-empty matrix"),
        ({"weight": torch.zeros(0, 32)}, InvalidArgument, "weight: expected a non-empty matrix"),
        ({"hidden": MATRIX.T}, InvalidArgument, "hidden: expected it contiguous"),
        ({"weight": torch.zeros(32, 100).T}, InvalidArgument, "weight: expected it contiguous"),
        ({"weight": torch.zeros(100, 16)}, InvalidArgument, r"weight: expected shape \[V, 32\]"),
        ({"temperature": -0.1}, InvalidArgument, "temperature: expected a finite number >= 0"),
        ({"temperature": float("nan")}, InvalidArgument, "temperature: .* got nan"),
        ({"temperature": float("inf")}, InvalidArgument, "temperature: .* got inf"),
        ({"temperature": "1"}, InvalidType, "temperature: expected a number; got str"),
        ({"temperature": True}, InvalidType, "temperature: expected a number; got bool"),
        ({"seed": torch.zeros(1)}, InvalidType, "seed: expected dtype torch.int64"),
        (
            {"seed": torch.zeros(2, dtype=torch.int64)},
            InvalidArgument,
            r"seed: expected shape \[1\]",
        ),
        ({"offset": torch.tensor(0)}, InvalidArgument, r"offset: expected shape \[1\]; got \(\)"),
        ({"offset": scalar(0).int()}, InvalidType, "offset: expected dtype torch.int64"),
        (
            {"weight": torch.zeros(100, 32, device="meta")},
            InvalidArgument,
            "weight: expected it on",
        ),
    ],
)
def test_bad_arguments_are_named_before_anything_runs(change, error, message):
    with pytest.raises(error, match=message):
        flash_sample(**{**GOOD, **change})


def test_bf16_is_refused_in_the_interpreter_which_would_compute_it_wrong():
    bf16 = {name: GOOD[name].bfloat16() for name in ("hidden", "weight")}
    with pytest.raises((InvalidType, InvalidArgument), match="hidden: expected"):
        flash_sample(**{**GOOD, **bf16})


def test_every_batch_size_has_a_config_that_fits_small_gpus():
    assert [bucket(B) for B in (1, 16, 17, 64, 65, 256, 1000)] == [16, 16, 32, 64, 128, 256, 256]
    for B in BUCKETS:
        for limit in (99 * 1024, 163 * 1024, 227 * 1024):
            fitted = config_for(B, 4096, "NVIDIA GeForce").fitted(limit, 2)
            assert fitted.shared_bytes(2) <= limit
            assert fitted.num_stages >= 2
        for D in (2048, 8192):
            assert config_for(B, D, "NVIDIA H200") in space(B)
    assert default_config(5, 64, CPU, 4).block_b == 16
