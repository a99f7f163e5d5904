"""Quantized heads on a GPU: the bits of a 16-bit weight that has the same numbers."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from flash_sample_cases import same_bits
from gpu_cases import counter, problem

from fsbench.kernels import QuantizedHead, flash_sample, quantize_head, score
from fsbench.kernels.device.quantized import converted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@triton.jit
def converting_kernel(numbers_ptr, out_ptr, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(out_ptr + index, converted(tl.load(numbers_ptr + index), out_ptr.dtype.element_ty))


@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_byte_becomes_the_number_that_it_is(dtype, weight_dtype):
    every = torch.arange(256, device="cuda", dtype=torch.uint8).view(weight_dtype)
    drawn = torch.empty(256, device="cuda", dtype=dtype)
    converting_kernel[(1,)](numbers_ptr=every, out_ptr=drawn, N=256)
    expected = every.float()
    nan = expected.isnan()
    assert nan.sum() == (0 if weight_dtype == torch.int8 else 2)
    assert drawn.isnan().equal(nan) and drawn[~nan].float().equal(expected[~nan])
    assert drawn[~nan].signbit().equal(expected[~nan].signbit())


def kernels(B: int, D: int) -> list[str]:
    """Those that can draw from a quantized head here."""
    hopper = torch.cuda.get_device_capability() == (9, 0) and D % 16 == 0
    return ["portable", "hopper"] if hopper else ["portable"]


def pair(
    B: int, V: int, D: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[torch.Tensor, QuantizedHead, torch.Tensor]:
    """hidden, a head whose scales round nothing, and the weight of its numbers."""
    hidden, weight = problem(B, V, D, dtype)
    head = quantize_head(weight, weight_dtype)
    head.scale.copy_(head.scale.log2().round().exp2())
    return hidden, head, (head.weight.float() * head.scale[:, None]).to(dtype)


SHAPES = [
    *((B, 1152, torch.bfloat16) for B in (1, 17, 33, 64, 200)),
    *((B, 16, torch.float16) for B in (3, 65)),
    *((B, 72, torch.bfloat16) for B in (17, 200)),
    *((B, 101, torch.float16) for B in (1, 64)),
]
"""Every tile of rows, every kind of D and both dtypes; each combination compiles four kernels."""


@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("B, D, dtype", SHAPES, ids=str)
def test_scales_that_round_nothing_give_the_bits_of_the_weight_with_those_numbers(
    B, D, dtype, weight_dtype
):
    hidden, head, exact = pair(B, 1000, D, dtype, weight_dtype)
    options = {"seed": counter(D), "return_logprob": True, "return_logz": True}
    expected = flash_sample(hidden, exact, **options)
    scored_exact = score(hidden, exact, expected.tokens, return_rank=True)
    for kernel in kernels(B, D):
        drawn = flash_sample(hidden, head, kernel=kernel, **options)
        assert drawn.valid.all() and drawn.tokens.equal(expected.tokens)
        assert same_bits(drawn.logprob, expected.logprob) and same_bits(drawn.logz, expected.logz)
        scored = score(hidden, head, drawn.tokens, kernel=kernel, return_rank=True)
        assert same_bits(scored.logprob, drawn.logprob) and scored.rank.equal(scored_exact.rank)


@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("B", [1, 16, 48, 64, 128, 256])
def test_programs_that_walk_over_many_tiles_keep_the_bits(B, weight_dtype):
    hidden, head, exact = pair(B, 100_000, 2048, torch.bfloat16, weight_dtype)
    for step in range(8):
        expected = flash_sample(hidden, exact, seed=counter(step), return_logz=True)
        for kernel in kernels(B, 2048):
            options = {"kernel": kernel, "seed": counter(step), "return_logz": True}
            drawn = flash_sample(hidden, head, **options)
            assert drawn.tokens.equal(expected.tokens) and same_bits(drawn.logz, expected.logz)


@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("B", [7, 33, 64])
def test_options_change_both_kernels_alike(B, weight_dtype):
    V = 5003
    hidden, head, exact = pair(B, V, 1088, torch.bfloat16, weight_dtype)
    row = torch.arange(B, device="cuda")
    everything = {
        "temperature": (row % 4) / 2.0,
        "seed": row * 7919,
        "offset": row + 2**33,
        "bias": torch.linspace(-1, 1, V, device="cuda"),
        "mask": (row[:, None] + torch.arange(V, device="cuda")) % 3 > 0,
        "soft_cap": 30.0,
        "return_logprob": True,
        "return_entropy": True,
    }
    several = {"seed": counter(1), "num_samples": 2, "return_logprob": True}
    largest = {"seed": counter(2), "return_top": 3, "return_rank": True, "vocab_size": V - 300}
    greedy = {"seed": counter(3), "temperature": 0.0}
    for options in (everything, several, largest, greedy):
        expected = flash_sample(hidden, exact, kernel="portable", **options)
        for kernel in kernels(B, 1088):
            drawn = flash_sample(hidden, head, kernel=kernel, **options)
            for name, field in expected._asdict().items():
                other = getattr(drawn, name)
                if field is None or not field.is_floating_point():
                    assert other is field is None or other.equal(field), (kernel, name)
                else:
                    assert same_bits(other, field), (kernel, name)


@pytest.mark.parametrize("kernel", ["portable", "hopper"])
def test_an_undefined_number_or_scale_leaves_no_row_a_draw(kernel):
    hidden, weight = problem(3, 500, 64, torch.bfloat16)
    if kernel not in kernels(3, 64):
        pytest.skip("needs a GPU of compute capability 9.0")
    options = {"seed": counter(1), "kernel": kernel}
    for dtype in (torch.int8, torch.float8_e4m3fn):
        head = quantize_head(weight, dtype)
        head.scale[100] = -1.0
        assert not flash_sample(hidden, head, **options).valid.any()
    numbers = quantize_head(weight, torch.float8_e4m3fn).weight
    numbers[7, 3] = torch.nan
    one = torch.ones((), device="cuda")
    assert not flash_sample(hidden, QuantizedHead(numbers, one), **options).valid.any()
