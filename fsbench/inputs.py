"""Make hidden and weight whose logits follow a chosen distribution, for data-dependent samplers.

With unit-normal hidden and weight the logits at D = 4096 have a standard deviation of 64: softmax
is one-hot, and a rejection sampler never rejects. Here the distribution is an axis of the sweep.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsbench.problem import Problem, parse_logits
from fsbench.provider import Provider, QuantizedWeight

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_ONE_BYTE = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
_CALLS = ("build", "sample", "score")  # calls of a provider whose second argument is the head
_SMALLEST_EXPONENT = -15  # of a scale: its product with the least number of e4m3 is one of fp16
_ROWS_AT_ONCE = 16384  # rows of the weight made at a time: bounds the fp32 scratch
_WORDS_AT_ONCE = 2**22  # of a fingerprint: bounds its scratch to 100 MB


def make_weight(problem: Problem, seed: int) -> Tensor:
    """Make weight [V, D] of the problem's dtype and device, a function of the seed and device type.

    For a quantized head the weight has its numbers.
    """
    shape, parameter = parse_logits(problem.logits)
    device = torch.device(problem.device)
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.empty(problem.V, problem.D, dtype=TORCH_DTYPES[problem.dtype], device=device)
    sigma = parameter if shape == "normal" else 0.1
    profile = _profile(problem, shape, parameter, generator)
    for first in range(0, problem.V, _ROWS_AT_ONCE):
        rows = weight[first : first + _ROWS_AT_ONCE]
        block = torch.randn(rows.shape, generator=generator, device=device)
        block *= sigma / problem.D**0.5
        # Every row of hidden has ones as its mean (make_hidden), so this adds the profile.
        if profile is not None:
            block += profile[first : first + _ROWS_AT_ONCE, None] / problem.D
        rows.copy_(block)
    return stored(problem, weight)


def quantized(weight: Tensor, form: str) -> QuantizedWeight:
    """Round a weight [V, D] to a form of fsbench.problem.QUANTIZED.

    A row's scale is the least power of two by which its largest entry fits, and at least 2^-15. So
    bf16, fp16 and fp32 represent the head's numbers exactly, and quantizing them returns the head.
    """
    dtype, most = _ONE_BYTE[form]
    numbers = torch.empty_like(weight, dtype=dtype)
    scale = torch.empty(len(weight), device=weight.device)
    for rows, into, scales in zip(
        *(part.split(_ROWS_AT_ONCE) for part in (weight, numbers, scale)), strict=True
    ):
        mantissa, exponent = torch.frexp(rows.abs().amax(1).float() / most)
        exponent = (exponent - (mantissa == 0.5).int()).clamp_min(_SMALLEST_EXPONENT)
        scales.copy_((exponent + 127 << 23).view(torch.float32))  # a power of two, to the bit
        entries = rows.float() / scales[:, None]
        into.copy_(entries.round() if form == "int8" else entries)
    return QuantizedWeight(numbers, scale)


def stored(problem: Problem, weight: Tensor) -> Tensor:
    """Return the numbers [V, D] of a problem's head for a weight: the weight if not quantized."""
    if not problem.weights:
        return weight
    head = quantized(weight, problem.weights)
    exact = torch.empty_like(weight)
    for rows, numbers, scales in zip(
        *(part.split(_ROWS_AT_ONCE) for part in (exact, head.weight, head.scale)), strict=True
    ):
        rows.copy_(numbers.float() * scales[:, None])
    return exact


def serving(provider: Provider, form: str) -> Provider:
    """Return a sampler that takes the numbers of a quantized head and makes the head of them.

    Args:
        form: Form of the head; a sampler that does not take it is returned unchanged.
    """
    if form not in provider.capabilities.quantized:
        return provider

    def with_head(call: Any) -> Any:
        def served(first: Any, weight: Tensor, *remaining: Any, **options: Any) -> Any:
            plain = isinstance(first, Problem) and not first.weights
            return call(first, weight if plain else quantized(weight, form), *remaining, **options)

        return call and served

    return replace(provider, **{each: with_head(getattr(provider, each)) for each in _CALLS})


def _profile(
    problem: Problem, shape: str, parameter: float, generator: torch.Generator
) -> Tensor | None:
    """Return the mean logit of every token, [V] fp32, shuffled; None if it is 0."""
    if shape == "normal":
        return None
    device = torch.device(problem.device)
    order = torch.randperm(problem.V, generator=generator, device=device)
    profile = torch.zeros(problem.V, device=device)
    if shape == "zipf":
        profile = -parameter * torch.log(torch.arange(1, problem.V + 1, device=device).float())
    else:
        profile[0] = parameter
    return profile[order]


def make_hidden(problem: Problem, seed: int) -> Tensor:
    """Make hidden [B, D]: unit normal, plus a direction common to all rows if logits need it."""
    shape, _ = parse_logits(problem.logits)
    device = torch.device(problem.device)
    generator = torch.Generator(device).manual_seed(seed + 1)
    hidden = torch.randn(problem.B, problem.D, generator=generator, device=device)
    if shape != "normal":
        hidden = 1 + 0.1 * hidden
    return hidden.to(TORCH_DTYPES[problem.dtype])


def fingerprint(tensor: Tensor) -> int:
    """Return 64 bits of a contiguous tensor that change with any byte. Waits for the device."""
    data = tensor.detach().view(-1).view(torch.uint8)
    even = data.numel() // 8 * 8
    words, remaining = data[:even].view(torch.int64), data[even:].to(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in (*words.split(_WORDS_AT_ONCE), remaining):
        # Odd factors, so that no change of a word is lost modulo 2^64; by position, so that a swap
        # changes the sum. The other odd number does the same for a swap of two parts.
        places = 2 * torch.arange(len(part), device=tensor.device) + 1
        total = total * 0x5851F42D4C957F2D + (part * places).sum()
    return int(total)


def head_with_logits(logits: Tensor, dtype: torch.dtype, D: int = 16) -> tuple[Tensor, Tensor]:
    """Make hidden [R, D] and weight [V, D] whose product is `logits` [R, V] rounded to dtype.

    hidden is one-hot, so each logit is one stored number times one, without rounding in any order
    of summation. R is at most D. Logits are finite: the zeros of another row would turn an infinity
    into NaN.
    """
    R, V = logits.shape
    if R > D:
        raise ValueError(f"logits: expected at most D={D} rows; got {R}")
    hidden = torch.eye(D, dtype=dtype, device=logits.device)[:R].contiguous()
    weight = torch.zeros(V, D, dtype=dtype, device=logits.device)
    weight[:, :R] = logits.T.to(dtype)
    return hidden, weight
