"""Quantised heads on a GPU: the bits of a 16-bit weight that has the same numbers."""

from __future__ import annotations

import pytest
import torch
from flash_sample_cases import same_bits
from gpu_cases import counter, problem

from fsbench.kernels import QuantisedHead, flash_sample, quantise_head, score

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [16, 72, 101, 1152])
@pytest.mark.parametrize("B", [1, 3, 17, 33, 64, 65, 200])
def test_scales_that_round_nothing_give_the_bits_of_the_weight_with_those_numbers(
    B, D, dtype, weight_dtype
):
    hidden, weight = problem(B, 1000, D, dtype)
    head = quantise_head(weight, weight_dtype)
    head.scale.copy_(head.scale.log2().round().exp2())
    exact = (head.weight.float() * head.scale[:, None]).to(dtype)
    options = {"seed": counter(D), "return_logprob": True, "return_logz": True}
    found = flash_sample(hidden, head, **options)
    wanted = flash_sample(hidden, exact, **options)
    assert found.valid.all() and found.tokens.equal(wanted.tokens)
    assert same_bits(found.logprob, wanted.logprob) and same_bits(found.logz, wanted.logz)
    scored = score(hidden, head, found.tokens, return_rank=True)
    again = score(hidden, exact, found.tokens, return_rank=True)
    assert same_bits(scored.logprob, found.logprob) and scored.rank.equal(again.rank)


@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("B", [1, 64, 128, 256])
def test_programs_that_walk_over_many_tiles_keep_the_bits(B, weight_dtype):
    hidden, weight = problem(B, 100_000, 2048, torch.bfloat16)
    head = quantise_head(weight, weight_dtype)
    head.scale.copy_(head.scale.log2().round().exp2())
    exact = head.weight.bfloat16() * head.scale.bfloat16()[:, None]
    for step in range(8):
        found = flash_sample(hidden, head, seed=counter(step), return_logz=True)
        wanted = flash_sample(hidden, exact, seed=counter(step), return_logz=True)
        assert found.tokens.equal(wanted.tokens) and same_bits(found.logz, wanted.logz)


def test_an_undefined_number_or_scale_leaves_no_row_a_draw():
    hidden, weight = problem(3, 500, 64, torch.bfloat16)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        head = quantise_head(weight, dtype)
        head.scale[100] = -1.0
        assert not flash_sample(hidden, head, seed=counter(1)).valid.any()
    numbers = quantise_head(weight, torch.float8_e4m3fn).weight
    numbers[7, 3] = torch.nan
    one = torch.ones((), device="cuda")
    assert not flash_sample(hidden, QuantisedHead(numbers, one), seed=counter(1)).valid.any()
