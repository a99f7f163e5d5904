"""Sums of device.mass in the interpreter: exact in any order, and near float64."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from flash_sample_cases import same_bits

from fsbench.kernels.device.mass import (
    add_masses,
    entropy_of_mass,
    log_of_mass,
    log_probability,
    mass_of_groups,
    mass_of_rows,
    no_mass,
)

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]

GROUPS = 64


@triton.jit
def _sums_kernel(
    m_ptr,  # [orders, WAYS, GROUPS / WAYS]
    s_ptr,
    moments_ptr,
    logits_ptr,  # [orders]
    inverse_temperature,
    out_ptr,  # [3, orders]: log Z, log-probability, entropy
    orders,
    WAYS: tl.constexpr,
    EACH: tl.constexpr,
):
    """Add up EACH groups one by one in each of WAYS sums of a row, then these sums."""
    row = tl.program_id(0)
    way = row * WAYS + tl.arange(0, WAYS)[None, :]
    mass = no_mass((way * 0).to(tl.float32), True)
    for i in range(EACH):
        m = tl.load(m_ptr + way * EACH + i)
        s = tl.load(s_ptr + way * EACH + i)
        moments = tl.load(moments_ptr + way * EACH + i)
        mass = add_masses(mass, mass_of_groups(m, s, inverse_temperature, moments))
    mass = mass_of_rows(mass)
    logit = tl.load(logits_ptr + row + tl.arange(0, 1))
    pointers = out_ptr + row + tl.arange(0, 1)
    tl.store(pointers, log_of_mass(mass))
    tl.store(pointers + orders, log_probability(logit, mass, inverse_temperature))
    tl.store(pointers + 2 * orders, entropy_of_mass(mass))


def sums(
    m: torch.Tensor, s: torch.Tensor, moments: torch.Tensor, logits: torch.Tensor, T: float,
    ways: int,
) -> torch.Tensor:  # fmt: skip
    """(log Z, log-probabilities, entropy) [3, orders] of masses s exp(m / T), [orders, GROUPS]."""
    orders = len(m)
    out = torch.empty(3, orders)
    _sums_kernel[(orders,)](
        m_ptr=m.contiguous(),
        s_ptr=s.contiguous(),
        moments_ptr=moments.contiguous(),
        logits_ptr=logits,
        inverse_temperature=float(torch.tensor(1.0) / torch.tensor(T)),
        out_ptr=out,
        orders=orders,
        WAYS=ways,
        EACH=GROUPS // ways,
    )
    return out


SPREADS = {
    "one window": (1.0, 1.0, 3.0),
    "several windows": (1.0, 30.0, 0.0),
    "many windows": (1.0, 300.0, -1000.0),
    "far up": (1.0, 20.0, 2e5),
    "sharp": (1e-5, 3.0, 0.0),
    "sharpest": (2.0**-119, 30.0, 0.0),
    "flat": (1e30, 1e3, 0.0),
}
"""T, the spread of the logits, and their mean."""


@pytest.mark.parametrize("name", SPREADS)
def test_masses_have_one_sum_in_any_order(name):
    T, spread, shift = SPREADS[name]
    draw = torch.Generator().manual_seed(4)
    m = spread * torch.randn(GROUPS, generator=draw) + shift
    m[::9] = -torch.inf
    m[1::9] = m[3]  # ties
    s = torch.where(m == -torch.inf, 0.0, 1 + 31 * torch.rand(GROUPS, generator=draw))
    moments = -torch.rand(GROUPS, generator=draw) * (s - 1).clamp_min(0) / 2
    orders = torch.stack([torch.randperm(GROUPS, generator=draw) for _ in range(4)])
    logit = m.max().expand(len(orders)).contiguous()
    results = [sums(m[orders], s[orders], moments[orders], logit, T, ways) for ways in (4, 32)]
    for each in results:
        assert same_bits(each, results[0][:, :1].expand_as(each).contiguous())

    logprob = -((m - logit[0]).double() / T + s.double().log()).logsumexp(0)
    logz = float(logit[0]) / T - logprob
    torch.testing.assert_close(results[0][0, 0].double(), logz, rtol=3e-7, atol=1e-6)
    # y / T is computed from 1 / T in fp32; the difference of two y / T loses no more than that.
    torch.testing.assert_close(results[0][1, 0].double(), logprob, rtol=1e-6, atol=1e-6)
    z = (m - logit[0]).double() / T
    of_groups = z.exp() * (s * z + moments * 0.6931471805599453)
    entropy = -logprob - of_groups.masked_fill(z == -torch.inf, 0.0).sum() * logprob.exp()
    # Where T is small, the rounding of 1 / T changes the weights of two windows' masses.
    torch.testing.assert_close(results[0][2, 0].double(), entropy, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("largest", [0, -32])
def test_groups_one_window_below_the_largest_count(largest):
    """63 groups of 32 tokens, 2^-31 of the largest each: log Z includes their sum, 2^-20."""
    m = torch.full((2, GROUPS), (largest - 31) * 0.6931471805599453)
    m[0, 0] = m[1, -1] = largest * 0.6931471805599453
    s = torch.full((2, GROUPS), 32.0)
    s[0, 0] = s[1, -1] = 1.0
    _, logprob, entropy = sums(m, s, torch.zeros_like(m), m.amax(1), 1.0, 4)
    assert same_bits(entropy[:1], entropy[1:])
    mass = 63 * 2.0**-26  # each group's is 2^-26, of x = -31
    torch.testing.assert_close(float(entropy[0]), mass * (1 + 31 * 0.693), rtol=0.3, atol=0)
    assert same_bits(logprob[:1], logprob[1:])
    assert -1.3 * mass < float(logprob[0]) < -0.7 * mass


def test_a_certain_token_has_log_probability_0_and_a_forbidden_one_none():
    m = torch.full((3, GROUPS), -torch.inf)
    m[:, 5] = torch.tensor([0.0, -700.0, 9e3])
    s = torch.zeros(3, GROUPS)
    s[:, 5] = 1.0
    for logits, expected in ((m[:, 5], 0.0), (m[:, 0], -torch.inf)):
        _, logprob, entropy = sums(m, s, torch.zeros_like(m), logits.contiguous(), 0.7, 32)
        torch.testing.assert_close(entropy, torch.zeros(3), atol=5e-7, rtol=0)
        torch.testing.assert_close(logprob, torch.full((3,), expected), atol=5e-7, rtol=0)
        assert (logprob <= 0).all()
