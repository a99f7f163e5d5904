"""Quantized heads: the bits of a 16-bit or fp32 weight with the same numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from flash_sample_cases import SEED, TILES, check, counter, problem, same_bits, stored
from imitated_gpus import H200, imitate_gpu
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import (
    QuantizedHead,
    TileConfig,
    VocabShard,
    describe,
    flash_sample,
    prepare_draft_vocabulary,
    prepare_head,
    quantize_head,
    score,
    screened_sample,
    truncated_sample,
)
from fsbench.kernels.configs import choice as _choice
from fsbench.kernels.configs.hopper import MANY_ROWS, ONE_BYTE, HopperConfig

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]

INT8, E4M3 = torch.int8, torch.float8_e4m3fn
SIXTEEN_BITS = HopperConfig(1, 128, 128, 4, False)
V_FIRST = TileConfig(16, 128, 128, 32, True, True, 4, 1, 1)


def numbers(V: int, D: int, dtype: torch.dtype) -> Tensor:
    """[V, D], with the largest and the smallest numbers of the dtype in it."""
    generator = torch.Generator().manual_seed(V + D)
    values = (40 * torch.randn(V, D, generator=generator)).round().clamp(-128, 127).to(dtype)
    ends = (-128, 127) if dtype == INT8 else (-448.0, 448.0, 2.0**-9, -(2.0**-9), 2.0**-6)
    values.view(-1)[: len(ends)] = torch.tensor(ends, dtype=torch.float32).to(dtype)
    return values


def powers(V: int) -> Tensor:
    """Scales that round nothing: fp32 [V]."""
    return 2.0 ** -(torch.arange(V) % 5 + 7).float()


def assert_same_bits(result: Any, expected: Any) -> None:
    for name, field in expected._asdict().items():
        value = getattr(result, name)
        assert (field is None) == (value is None), name
        if field is not None:
            assert same_bits(field, value) if field.is_floating_point() else field.equal(value), (
                name
            )


@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=str)
@pytest.mark.parametrize(
    ("B", "V", "D", "hidden_dtype", "config"),
    [
        (1, 1, 16, torch.float16, None),
        (3, 131, 48, torch.float16, V_FIRST),
        (5, 200, 19, torch.float32, TILES),  # rows that TMA cannot load
        (5, 70, 72, torch.float32, None),  # of hidden it could, of the weight it cannot
        (3, 40, 32, torch.bfloat16, None),  # by the reference
    ],
    ids=str,
)
def test_scales_that_round_nothing_give_the_bits_of_the_weight_with_those_numbers(
    B, V, D, hidden_dtype, config, dtype
):
    hidden = problem(B, V, D, hidden_dtype)[0]
    weight, scale = numbers(V, D, dtype), powers(V)
    options: dict[str, Any] = {
        "temperature": torch.linspace(0, 2, B),
        "seed": counter(*range(B)),
        "bias": torch.linspace(-1, 1, V),
        "soft_cap": 9.0,
        "return_logprob": True,
        "return_logz": True,
        "return_entropy": True,
        "config": config,
    }
    for scales, exact in (
        (scale, weight.float() * scale[:, None]),
        (torch.tensor(2.0**-8), weight.float() * 2.0**-8),
    ):
        expected = flash_sample(hidden, exact.to(hidden_dtype), **options)
        drawn = flash_sample(hidden, QuantizedHead(weight, scales), **options)
        assert drawn.valid.all() and drawn.tokens.lt(V).all()
        assert_same_bits(drawn, expected)


@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=str)
@pytest.mark.parametrize("noise", ["group", "token"])
def test_draws_are_those_of_the_heads_own_logits(dtype, noise):
    """The logits are scale[v] (hidden . q[v]), rounded once, also for scales that round."""
    hidden, weight = problem(4, 150, 40, torch.float16)
    head = quantize_head(weight, dtype)
    options: dict[str, Any] = {"noise": noise, "num_samples": 3, "return_logprob": True}
    drawn = flash_sample(hidden, head, seed=SEED, vocab_size=140, **options)
    logits = (hidden.float() @ head.weight.float().T * head.scale)[:, :140].contiguous()
    expected = check(**stored(logits), **options)
    assert drawn.tokens.equal(expected.tokens)
    torch.testing.assert_close(drawn.logprob, expected.logprob, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=str)
@pytest.mark.parametrize("hidden_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_and_ranks_are_those_of_the_weight_with_those_numbers(hidden_dtype, dtype):
    hidden = problem(3, 131, 48, hidden_dtype)[0]
    weight, scale = numbers(131, 48, dtype), powers(131)
    targets = torch.tensor([[0, 130], [17, -100], [64, 2]])
    options: dict[str, Any] = {"return_entropy": True, "return_rank": True, "soft_cap": 20.0}
    exact = (weight.float() * scale[:, None]).to(hidden_dtype)
    head = QuantizedHead(weight, scale)
    assert_same_bits(
        score(hidden, head, targets, **options), score(hidden, exact, targets, **options)
    )
    options |= {"seed": SEED, "return_logprob": True, "return_top": 3}
    drawn = flash_sample(hidden, head, **options)
    assert_same_bits(drawn, flash_sample(hidden, exact, **options))
    scored = score(hidden, head, drawn.tokens, soft_cap=20.0)
    assert drawn.logprob is not None and same_bits(scored.logprob, drawn.logprob)


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [-1.0, torch.nan, torch.inf, -torch.inf])
def test_an_undefined_scale_leaves_no_row_a_draw_unless_its_token_is_forbidden(bad, hidden_dtype):
    hidden = problem(2, 100, 16, hidden_dtype)[0]
    head = quantize_head(problem(2, 100, 16)[1])
    head.scale[40] = bad
    mask = torch.ones(2, 100, dtype=torch.bool)
    mask[1, 40] = False
    drawn = flash_sample(hidden, head, seed=SEED, mask=mask)
    assert drawn.valid.tolist() == [False, True] and drawn.tokens[0] == -1
    assert flash_sample(hidden, head, seed=SEED, vocab_size=40).valid.all()


def test_a_scale_of_0_and_an_undefined_number():
    weight = numbers(60, 16, E4M3)
    head = QuantizedHead(weight, torch.zeros(60))
    uniform = flash_sample(torch.ones(2, 16), head, seed=SEED, return_logz=True)
    torch.testing.assert_close(uniform.logz, torch.full((2,), 60.0).log())
    weight[7, 3] = torch.nan  # which the interpreter reads as 480; bf16 takes the reference
    assert not flash_sample(torch.ones(2, 16).bfloat16(), head, seed=SEED).valid.any()


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quantize_head_rounds_to_the_nearest_number(weight_dtype, dtype, per_row):
    weight = (
        problem(1, 300, 24, weight_dtype)[1] * torch.logspace(-6, 3, 300).to(weight_dtype)[:, None]
    )
    weight[5] = 0
    weight[6] = (
        1e-42 if weight_dtype == torch.float32 else 0
    )  # of which no scale is a normal number
    head = quantize_head(weight.requires_grad_(), dtype, per_row=per_row)
    assert head.weight.dtype == dtype and not head.weight.requires_grad
    assert head.scale.shape == ((300,) if per_row else ())
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    every = every[every.isfinite() & (every != -128)].unique()
    ratio = weight.detach().double() / head.scale.double().expand(300)[:, None]
    nearest = (ratio[:, :, None] - every).abs().amin(2)
    # e4m3 is rounded from fp32 entries.
    error = (ratio - head.weight.double()).abs()
    assert (error <= nearest + 2.0**-23 * ratio.abs()).all()
    if per_row:
        largest = head.weight.double().abs().amax(1)
        assert (largest[7:] == every.max()).all() and (largest[5:7] == 0).all()


GOOD = quantize_head(torch.ones(100, 16))
HIDDEN = torch.ones(2, 16)
TYPE, VALUE = InvalidType, InvalidArgument


PARTS = [
    ("1", torch.ones(4), TYPE, "weight: expected a tensor; got str"),
    (torch.ones(4, 8), torch.ones(4), TYPE, "weight: expected dtype .*; got .*float32"),
    (torch.ones(4, 8).to(torch.float8_e5m2), torch.ones(4), TYPE, "got .*float8_e5m2"),
    (GOOD.weight[:, :8], GOOD.scale, VALUE, "weight: expected it contiguous"),
    (GOOD.weight[0], GOOD.scale, VALUE, "weight: expected a non-empty matrix"),
    (GOOD.weight, 1.0, TYPE, "scale: expected a tensor; got float"),
    (GOOD.weight, torch.ones(2, 1), VALUE, r"got \[2, 1\]: scales per block are not supported"),
    (GOOD.weight, GOOD.scale[:, None], VALUE, r"scale: expected .*: pass scale\.flatten"),
    (GOOD.weight, GOOD.scale.half(), TYPE, "scale: expected dtype .*float32"),
    (GOOD.weight, GOOD.scale[:16], VALUE, r"scale: .* got \[16\]"),
    (GOOD.weight, GOOD.scale.to("meta"), VALUE, "scale: expected it on cpu"),
]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *((partial(QuantizedHead, weight, scale), *error) for weight, scale, *error in PARTS),
        (lambda: quantize_head(torch.ones(4, 8), torch.float8_e5m2), TYPE, "dtype: expected"),
        (lambda: quantize_head(GOOD.weight), TYPE, "weight: expected dtype"),
        (lambda: quantize_head(torch.tensor([[1.0], [torch.inf]])), VALUE, "in row 1"),
        (lambda: quantize_head(torch.ones(4, 8), per_row=1), TYPE, "per_row: expected True"),
        (lambda: flash_sample(torch.ones(2, 8), GOOD, seed=SEED), VALUE, "weight: expected shape"),
        (lambda: flash_sample(HIDDEN, GOOD.weight, seed=SEED), TYPE, "weight: expected dtype"),
        (lambda: flash_sample(HIDDEN, GOOD, seed=SEED, kernel="hopper"), VALUE, "capability 9.0"),
        (lambda: truncated_sample(HIDDEN, GOOD, top_k=3, seed=SEED), TYPE, "QuantizedHead"),
        (lambda: screened_sample(HIDDEN, GOOD, seed=SEED), TYPE, "QuantizedHead"),
        (lambda: prepare_head(GOOD), TYPE, "QuantizedHead"),
        (lambda: prepare_draft_vocabulary(GOOD, torch.arange(8)), TYPE, "QuantizedHead"),
        (lambda: VocabShard(GOOD), TYPE, "QuantizedHead"),
    ],
)  # fmt: skip
def test_bad_heads_and_calls_that_take_none(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_describe_and_the_choice_on_a_gpu(monkeypatch):
    assert "pointers" in describe(torch.ones(2, 24), quantize_head(torch.ones(100, 24)))
    assert describe(HIDDEN, GOOD, why=True).startswith("b16v256d64s128N")
    gpu = imitate_gpu(monkeypatch, H200)
    arguments: dict[str, Any] = {"by_tma": True, "noise": "group", "kernel": "auto", "config": None}
    full, short = (4096, 151_936, gpu, 1), (8192, 128_256, gpu, 1)  # of blocks, in the last round
    for B in (1, 16, 32):
        config = _choice.config_for(B, *full, **arguments)
        assert isinstance(config, TileConfig) and config.v_on_m and config.num_stages > 1
        assert "is at most 32 rows" in _choice.explanation(B, *full, **arguments)
        assert _choice.config_for(B, *short, **arguments) == ONE_BYTE
        assert "read 57 MB more" in _choice.explanation(B, *short, **arguments)
    for B, expected in ((33, ONE_BYTE), (64, ONE_BYTE), (65, MANY_ROWS), (300, MANY_ROWS)):
        assert _choice.config_for(B, *full, **arguments) == expected
        assert "is above 32 rows" in _choice.explanation(B, *full, **arguments)
        assert _choice.config_for(B, *short, **arguments) == expected
        token = _choice.config_for(B, *full, **{**arguments, "noise": "token"})
        assert isinstance(token, TileConfig)
        with pytest.raises(InvalidArgument, match="config: expected one_byte=True"):
            _choice.config_for(B, *full, **{**arguments, "config": SIXTEEN_BITS})
    hopper_arguments = {**arguments, "kernel": "hopper", "config": ONE_BYTE}
    with pytest.raises(InvalidArgument, match="config: expected one_byte=False"):
        _choice.config_for(64, 4096, 151_936, gpu, 2, **hopper_arguments)
    with pytest.raises(InvalidArgument, match="at most 64 rows with 4 stages"):
        _choice.config_for(65, *full, **hopper_arguments)


def test_fp8_is_refused_where_triton_cannot_convert_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(InvalidArgument, match=r"expected int8 on a GPU of compute capability 8\.0"):
        _choice._check_fp8(torch.device("cuda", 6))
