"""No logit lies outside the screen's bound, and no possible winner outside the candidates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsbench import reference
from fsbench.kernels.screened import bounds as _screen
from fsbench.kernels.screened.bounds import (
    accumulation_error,
    candidates,
    score_bounds,
    screen_hidden,
    screen_logits,
)
from fsbench.kernels.screened.head import prepare_head

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ("normal", "heavy tails", "one entry", "one outlier", "constant", "alternating", "zero")
"""What a row may look like; a row is drawn for each of `weight` and `hidden`."""


def row(shape: str, exponent: int, D: int, draw: torch.Generator) -> Tensor:
    """float64 [D] with entries around 2^exponent."""
    x = torch.randn(D, generator=draw, dtype=torch.float64)
    if shape == "heavy tails":
        x = x * torch.exp2(40 * torch.rand(D, generator=draw, dtype=torch.float64) - 20)
    elif shape == "one entry":
        x = torch.where(torch.arange(D) == D // 2, 1.0, 0.0).double()
    elif shape == "one outlier":
        x[D // 3] = 1e4
    elif shape == "constant":
        x = torch.full((D,), 1 + 2.0**-7, dtype=torch.float64)
    elif shape == "alternating":
        x = 1.0 - 2.0 * (torch.arange(D) % 2).double()
    elif shape == "zero":
        x = torch.zeros(D, dtype=torch.float64)
    return x * 2.0**exponent


ROWS = st.tuples(st.sampled_from(SHAPES), st.integers(-160, 70))
NEAR_ONE = st.tuples(st.sampled_from(SHAPES), st.integers(-8, 4))


def matrix(rows: list[tuple[str, int]], D: int, dtype: torch.dtype, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.stack([row(*each, D, draw) for each in rows]).to(dtype)


def chopped(values: np.ndarray, bits: int) -> np.ndarray:
    """float64 cut off towards zero below 2^-bits of the largest magnitude."""
    top = np.abs(values).max()
    if top == 0 or not np.isfinite(top):
        return values
    unit = 2.0 ** (np.floor(np.log2(top)) - bits)
    return np.trunc(values / unit) * unit


def tensor_core(w: np.ndarray, h: np.ndarray, at_once: int, bits: int) -> float:
    """Products of `at_once` columns and the sum so far, cut off and added; the result cut off."""
    total = 0.0
    for d in range(0, len(w), at_once):
        terms = np.append(w[d : d + at_once] * h[d : d + at_once], total)
        total = float(chopped(chopped(terms, bits).sum(keepdims=True), 23)[0])
    return total


def fp32_sum(products: np.ndarray) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.add.accumulate(products.astype(np.float32))[-1])


def logits_of(w: Tensor, h: Tensor) -> list[float]:
    """Return the dot product of two rows, exact and by several orders of fp32 arithmetic."""
    a, b = w.double().numpy(), h.double().numpy()
    with np.errstate(invalid="ignore"):  # inf times 0, inf minus inf
        p = a * b  # exact except for fp32 inputs, where 2^-53 does not matter
        order = np.argsort(np.abs(p))
        return [
            float(np.sum(p.astype(np.longdouble))),
            float((w.float() * h.float()).sum()),
            float(w.float() @ h.float()),
            *(fp32_sum(x) for x in (p, p[::-1], p[order], p[order[::-1]], np.sort(p))),
            tensor_core(a, b, 16, 25),
            tensor_core(a, b, 8, 24),
        ]


def outside(weight: Tensor, hidden: Tensor) -> list[tuple[int, int, float, float, float]]:
    """(row, token, logit, z, bound) of every logit that is not within its bound."""
    z, bound = screen_logits(prepare_head(weight), screen_hidden(hidden))
    outliers = []
    for b, h in enumerate(hidden):
        for v, w in enumerate(weight):
            limit = float(bound[b, v])
            for logit in logits_of(w, h):
                # A logit that is not finite must not have a finite bound.
                if not abs(logit - float(z[b, v])) <= limit and limit < np.inf:
                    outliers.append((b, v, logit, float(z[b, v]), limit))
    return outliers


@settings(max_examples=120)
@given(
    weight=st.lists(ROWS, min_size=1, max_size=4) | st.lists(NEAR_ONE, min_size=1, max_size=4),
    hidden=st.lists(ROWS, min_size=1, max_size=3) | st.lists(NEAR_ONE, min_size=1, max_size=3),
    D=st.sampled_from([1, 2, 3, 8, 16, 17, 64, 100, 300, 777, 1024]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
)
@example([("constant", 49)], [("constant", 49)], 300, torch.float32, 0)
@example([("one outlier", 60)], [("one outlier", 36)], 300, torch.float32, 0)
@example([("constant", -140)], [("constant", 59)], 300, torch.float32, 0)
@example([("constant", 59)], [("normal", -140)], 300, torch.bfloat16, 0)
@example([("normal", -60)], [("normal", -63)], 300, torch.bfloat16, 0)
def test_no_logit_is_outside_its_bound_whatever_the_magnitudes(weight, hidden, D, dtype, seed):
    assert not outside(matrix(weight, D, dtype, seed), matrix(hidden, D, dtype, seed + 1))


@settings(max_examples=60)
@given(
    entries=st.lists(
        st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=4, max_size=40
    ),
    dtype=st.sampled_from(DTYPES),
)
def test_any_floats_at_all(entries, dtype):
    x = torch.tensor(entries, dtype=torch.float64).to(dtype)
    assert not outside(x[None, :], x.flip(0)[None, :])
    assert not outside(x[None, :], torch.ones_like(x)[None, :])
    assert not outside(torch.ones_like(x)[None, :], x[None, :])


@pytest.mark.parametrize("D", [16, 4096, 16_384])
@pytest.mark.parametrize("at_once, bits", [(16, 25), (8, 24), (1, 23)])
def test_cutting_off_at_its_worst_stays_within_the_bound(D, at_once, bits):
    # All terms have one sign, and each is just above a unit in the last place. The copies are
    # exact, so the bound covers only the rounding of the sum.
    weight = torch.full((1, D), 127.0)
    hidden = torch.full((1, D), 1 + 2.0**-7)
    exact = D * 127.0 * (1 + 2.0**-7)
    a, b = weight[0].double().numpy(), hidden[0].double().numpy()
    error = abs(tensor_core(a, b, at_once, bits) - exact)
    head, screened = prepare_head(weight), screen_hidden(hidden)
    z, bound = screen_logits(head, screened)
    assert abs(float(z) - exact) <= float(bound)
    assert error + abs(float(z) - exact) <= float(bound)
    assert accumulation_error(D) * exact <= float(bound) <= 3 * accumulation_error(D) * exact + 4
    if D == 16_384 and at_once == 1:
        assert error > 0.05 * float(bound)  # it is not a bound of anything else


def test_the_bound_is_reached():
    # Hidden along the very error of a row: Cauchy-Schwarz is an equality there.
    D = 4096
    weight = torch.randn(3, D, generator=torch.Generator().manual_seed(1))
    head = prepare_head(weight)
    error = weight.double() - head.scale.double()[:, None] * head.codes.double()
    hidden = error.float()
    z, bound = screen_logits(head, screen_hidden(hidden))
    logits = hidden.double() @ weight.double().T
    share = ((logits - z.double()) / bound.double()).diagonal()
    assert (share <= 1).all()
    assert (share > 0.85).all()


def test_rows_that_cannot_be_screened_are_unknown():
    weight = torch.ones(5, 16)
    weight[0, 3], weight[1, 3], weight[2, 3], weight[3, 3] = (
        torch.nan, torch.inf, -torch.inf, 2.0**51
    )  # fmt: skip
    z, bound = screen_logits(prepare_head(weight), screen_hidden(torch.ones(1, 16)))
    assert bound[0].isinf().tolist() == [True, True, True, True, False]
    assert torch.isfinite(z).all()
    hidden = torch.ones(4, 16)
    hidden[0, 0], hidden[1, 0], hidden[2, 0] = torch.nan, -torch.inf, 2.0**51
    z, bound = screen_logits(prepare_head(torch.ones(2, 16)), screen_hidden(hidden))
    assert bound.isinf().all(1).tolist() == [True, True, True, False]
    assert torch.isfinite(z).all()


@pytest.mark.parametrize("D", [16_384, _screen.LARGEST_STEPS])
def test_codes_of_hidden_fit_their_bytes_and_sums_fit_32_bits(D):
    x = torch.cat([torch.linspace(-1, 1, D)[None, :], torch.rand(1, D) * 1e-3 + 0.999])
    hidden = screen_hidden(x)
    codes = 256 * hidden.high.int() + hidden.low.int()
    assert codes.abs().max() == _screen.LARGEST_STEPS
    assert (hidden.high.abs() <= 127).all()
    error = x.double() - hidden.step.double()[:, None] * codes.double()
    assert (error.norm(dim=1) <= hidden.spread.double()).all()
    assert (x.double().norm(dim=1) <= hidden.reach.double()).all()
    assert 127 * 128 * 131_072 < 2**31


@settings(max_examples=80)
@given(
    sigma=st.sampled_from([0.1, 1.0, 4.0, 16.0]),
    temperature=st.sampled_from([0.0, 1e-3, 0.7, 1.0, 5.0]),
    options=st.sets(st.sampled_from(["bias", "mask", "soft_cap", "forbid"])),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_scores_are_within_their_bounds_and_winners_among_the_candidates(
    sigma, temperature, options, dtype, seed
):
    B, D, V = 3, 96, 700
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, D, generator=draw).to(dtype)
    hidden = (torch.randn(B, D, generator=draw) * sigma / D**0.5).to(dtype)
    bias = allowed = soft_cap = None
    if "bias" in options:
        bias = torch.randn(V, generator=draw) * 3
    if "forbid" in options:
        bias = torch.zeros(V) if bias is None else bias
        bias[::3] = -torch.inf
    if "mask" in options:
        allowed = torch.rand(B, V, generator=draw) < 0.4
    if "soft_cap" in options:
        soft_cap = 2.5
    T = torch.full((B, 1), temperature)
    noise = reference.token_noise(V, torch.tensor([seed]), torch.tensor([3]), torch.arange(B))
    # The sampler's noise may have the error that the contract allows.
    error = (torch.rand(noise.shape, generator=draw) * 2 - 1) * reference.GUMBEL_ERROR
    z, bound = screen_logits(prepare_head(weight), screen_hidden(hidden))
    lower, upper = score_bounds(z, bound, noise, T, soft_cap=soft_cap, bias=bias, allowed=allowed)
    logits = reference.processed_logits(
        hidden.float() @ weight.float().T, soft_cap=soft_cap, bias=bias, mask=allowed
    )
    scores = logits + T * (noise + error).float()  # rounded as in a kernel: T g, then the sum
    assert ((lower <= scores) & (scores <= upper)).all()
    chosen = candidates(lower, upper)
    finite = torch.isfinite(scores).any(1)
    assert chosen.gather(1, scores.argmax(1, keepdim=True))[:, 0][finite].all()
    assert not (chosen & (scores == -torch.inf)).any()


def test_forbidden_and_undefined_tokens():
    z, bound = torch.zeros(1, 6), torch.full((1, 6), 0.5)
    bound[0, 4:] = torch.inf  # tokens of rows with undefined entries
    bias = torch.tensor([0.0, -torch.inf, torch.nan, torch.inf, 0.0, -torch.inf])
    none, T = torch.zeros(1, 6), torch.zeros(1, 1)
    lower, upper = score_bounds(z, bound, none, T, bias=bias)
    # The second is forbidden. The last is too, unless its logit is NaN: that must be looked at.
    assert candidates(lower, upper).tolist() == [[True, False, True, True, True, True]]
    allowed = torch.tensor([[False, True, False, False, False, False]])
    lower, upper = score_bounds(z, bound, none, T, bias=bias, allowed=allowed)
    assert not candidates(lower, upper).any()


def test_a_temperature_too_high_to_add_up_makes_everything_a_candidate():
    z, bound = torch.tensor([[0.0, 100.0]]), torch.full((1, 2), 0.5)
    for T in (2.0**101, torch.inf, torch.nan):
        lower, upper = score_bounds(z, bound, torch.ones(1, 2), torch.tensor([[T]]))
        assert candidates(lower, upper).all()
