"""The device functions of group noise, in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from fsbench import reference
from fsbench.kernels.noise.group import drawing_sums, group_candidates, group_sums, members
from fsbench.kernels.noise.keys import token_of_key

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]

# Steps at which group 0 of row 0 under seed 0 draws the smallest and the largest uniform.
LOWEST_U, HIGHEST_U = 18604741, 391783


@triton.jit
def _sums_kernel(logits_ptr, inverse_ptr, members_ptr, largest_ptr, sums_ptr, R: tl.constexpr,
                 WIDTH: tl.constexpr):  # fmt: skip
    row = tl.arange(0, R)[:, None]
    y = members(tl.load(logits_ptr + row * WIDTH + tl.arange(0, WIDTH)[None, :]))
    m, sums = group_sums(y, tl.load(inverse_ptr + row))
    index = row * (WIDTH // 32) + tl.arange(0, WIDTH // 32)[None, :]
    tl.store(largest_ptr + index, m)
    for i in tl.static_range(32):
        tl.store(members_ptr + index * 32 + i, y[i])
        tl.store(sums_ptr + index * 32 + i, sums[i])


@triton.jit
def _draw_kernel(logits_ptr, temperature_ptr, step_ptr, token_ptr, logit_ptr, v0, sample,
                 R: tl.constexpr, WIDTH: tl.constexpr, GREEDY_ROWS: tl.constexpr):  # fmt: skip
    row = tl.arange(0, R)[:, None]
    y = members(tl.load(logits_ptr + row * WIDTH + tl.arange(0, WIDTH)[None, :]))
    T = tl.load(temperature_ptr + row)
    m, sums = drawing_sums(y, T, 1.0 / T, GREEDY_ROWS)
    seed = tl.zeros((), tl.int64)
    # Row 0 for all: the same noise meets many logits.
    key, logit = group_candidates(
        y, m, sums, v0, row * 0, seed, tl.load(step_ptr), T, sample, GREEDY_ROWS
    )
    index = row * (WIDTH // 32) + tl.arange(0, WIDTH // 32)[None, :]
    tl.store(token_ptr + index, token_of_key(key))
    tl.store(logit_ptr + index, logit)


def sums_of(logits: Tensor, T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(members [R, G, 32], largest [R, G], running sums [R, G, 32]) of fp32 logits [R, WIDTH]."""
    R, WIDTH = logits.shape
    y, sums = torch.full((2, R, WIDTH // 32, 32), -777.0)
    largest = torch.full((R, WIDTH // 32), -777.0)
    _sums_kernel[(1,)](logits, 1.0 / T, y, largest, sums, R=R, WIDTH=WIDTH)
    return y, largest, sums


def drawn(
    logits: Tensor, T: Tensor, step: int = 0, v0: int = 0, sample: int = 0, greedy: bool = False
) -> tuple[Tensor, Tensor]:
    """The candidate of every group and its logit, [R, G] each; -1 for a group without one."""
    R, WIDTH = logits.shape
    tokens = torch.full((R, WIDTH // 32), -777, dtype=torch.int32)
    picked = torch.full((R, WIDTH // 32), -777.0)
    steps = torch.tensor([step])
    _draw_kernel[(1,)](
        logits, T, steps, tokens, picked, v0, sample, R=R, WIDTH=WIDTH, GREEDY_ROWS=greedy
    )
    return tokens.long(), picked


def by_group(values: Tensor) -> Tensor:
    """[R, WIDTH] -> [R, groups, 32], by the specification."""
    R, WIDTH = values.shape
    group, member = reference.group_and_member(torch.arange(WIDTH))
    grouped = torch.empty(R, WIDTH // 32, 32, dtype=values.dtype)
    grouped[:, group, member] = values
    return grouped


def normal_logits(R: int, WIDTH: int, sigma: float = 3.0) -> Tensor:
    return sigma * torch.randn(R, WIDTH, generator=torch.Generator().manual_seed(R + WIDTH))


@pytest.fixture
def fused(monkeypatch):
    """Multiply-adds with one rounding, as on a GPU; the interpreter rounds the product too."""

    def create_fma(self, x, y, z):
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(exact.astype(np.float32), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)


@pytest.mark.parametrize("WIDTH", [256])
def test_members_and_running_sums_are_those_of_the_specification(WIDTH):
    logits = normal_logits(4, WIDTH)
    logits[1, ::3] = -torch.inf
    logits[2] += 100.0
    T = torch.tensor([[1.0], [0.3], [2.0], [50.0]])
    y, largest, sums = sums_of(logits, T)
    expected = by_group(logits)
    assert torch.equal(y, expected)
    assert torch.equal(largest, expected.amax(2))
    exact = torch.exp((expected - expected.amax(2, True)).double() / T[:, :, None]).cumsum(2)
    torch.testing.assert_close(sums.double(), exact, rtol=1e-5, atol=0)
    assert (sums[:, :, 1:] >= sums[:, :, :-1]).all()


def test_a_group_without_a_finite_member_has_no_mass_and_no_nan():
    logits = normal_logits(2, 128)
    group, _ = reference.group_and_member(torch.arange(128))
    logits[0, group == 1] = -torch.inf
    logits[1] = -torch.inf
    _, largest, sums = sums_of(logits, torch.full((2, 1), 0.5))
    empty = torch.tensor([[False, True, False, False], [True] * 4])
    assert (largest[empty] == -torch.inf).all() and (sums[empty] == 0).all()
    assert torch.isfinite(largest[~empty]).all() and (sums[~empty][:, -1] >= 1).all()
    tokens, _ = drawn(logits, torch.full((2, 1), 0.5))
    assert (tokens[empty] == -1).all() and (tokens[~empty] >= 0).all()


@pytest.mark.parametrize("wild", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("token", [0, 77, 127])
def test_a_wild_member_makes_its_group_invalid_and_no_other(token, wild):
    logits = normal_logits(1, 128)
    logits[0, token] = wild
    tokens, _ = drawn(logits, torch.ones(1, 1))
    group, _ = reference.group_and_member(torch.tensor(token))
    assert (tokens == -1).tolist() == [[g == int(group) for g in range(4)]]


@pytest.mark.parametrize(("v0", "sample", "step"), [(0, 0, 0), (128, 3, 5), (12800, 2**16 - 1, -1)])
def test_candidates_are_the_oracles_group_by_group(v0, sample, step):
    logits = normal_logits(16, 128)
    T = torch.linspace(0.2, 3, 16)[:, None]
    tokens, picked = drawn(logits, T, step, v0, sample)
    group, _ = reference.group_and_member(torch.arange(128))
    for g in range(4):
        # Of a vocabulary in which this group alone is allowed.
        whole = torch.full((16, v0 + 128), -torch.inf)
        whole[:, v0:] = logits.where(group == g, -torch.inf)
        expected = reference.expect(
            whole,
            torch.zeros(16).long(),
            torch.tensor([step]),
            T,
            "group",
            sample=sample,
        )
        assert expected.accepts(tokens[:, g]).all()
        assert picked[:, g].tolist() == whole.gather(1, tokens[:, g, None])[:, 0].tolist()


def test_the_steps_with_the_extreme_uniforms_are_those():
    row = torch.zeros(1, dtype=torch.int64)
    for step, u in ((LOWEST_U, 0.0), (HIGHEST_U, 1 - 2.0**-24)):
        uniforms = reference.group_noise(128, torch.tensor([0]), torch.tensor([step]), row)[1]
        assert float(uniforms[0, 0]) == u


@pytest.mark.parametrize("zero", [-torch.inf, -300.0], ids=["forbidden", "underflow"])
def test_a_member_without_mass_is_not_drawn_at_either_end_of_u(zero):
    """Whatever the rounding of the sums: 512 of them, with holes at their beginning and end."""
    logits = normal_logits(512, 128)
    grouped = by_group(torch.arange(128)[None]).expand(512, 4, 32)
    ends = torch.arange(512)[:, None] % 15 + 1
    member = torch.arange(32)
    hole = (member < ends) | (member >= 32 - ends)
    logits.scatter_(1, grouped[:, 0][:, :], torch.where(hole, zero, by_group(logits)[:, 0]))
    T = torch.ones(512, 1)
    for step in (LOWEST_U, HIGHEST_U):
        tokens, picked = drawn(logits, T, step)
        _, members_drawn = reference.group_and_member(tokens[:, 0])
        assert not hole.gather(1, members_drawn[:, None]).any()
        assert (picked[:, 0] > -100).all()
        if step == LOWEST_U:
            assert members_drawn.tolist() == ends[:, 0].tolist(), "the first member with mass"


@pytest.mark.parametrize("step", [0, LOWEST_U, HIGHEST_U])
def test_a_lone_member_is_drawn(step):
    """One of 32 has mass: first, last or any other."""
    logits = torch.full((32, 128), -torch.inf)
    logits[torch.arange(32), by_group(torch.arange(128)[None])[0, 0]] = -4.0
    tokens, _ = drawn(logits, torch.ones(32, 1), step)
    assert reference.group_and_member(tokens[:, 0])[1].tolist() == list(range(32))
    assert (tokens[:, 1:] == -1).all()


@pytest.mark.parametrize("scale", [1e-45, 1e-38, 2.0**-60, 1e-10, 1.0, 3e38])
def test_rows_at_temperature_zero_take_the_largest_however_near_the_others_are(scale):
    """Members of one group that are neighbors among the numbers of fp32, of either sign."""
    bits = torch.tensor(scale).view(torch.int32)
    near = bits + torch.randint(-1, 2, (32, 128), generator=torch.Generator().manual_seed(1))
    logits = near.int().view(torch.float32)
    logits[16:] *= -1.0
    logits[::4, ::3] = -torch.inf
    logits[1::4, ::3] = -3e38
    T = torch.tensor([[0.0], [0.5]]).repeat(16, 1)
    for step in (0, LOWEST_U, HIGHEST_U):
        tokens, picked = drawn(logits, T, step, greedy=True)
        y = by_group(logits)
        _, member = reference.group_and_member(tokens)
        assert torch.equal(member[::2], y[::2].argmax(2))
        assert torch.equal(picked[::2], y[::2].amax(2))
        others, _ = drawn(logits, T.clamp_min(0.5), step)
        assert torch.equal(tokens[1::2], others[1::2])


@pytest.mark.parametrize("temperature", [1e-1, 1e-3, 1e-6])
def test_the_mass_is_accurate_with_fused_multiply_adds(temperature, fused):
    """To 1e-3 of its logarithm, which is what log-probabilities are good for."""
    logits = normal_logits(64, 128, sigma=10.0) + 30.0
    T = torch.full((64, 1), temperature)
    y, largest, sums = sums_of(logits, T)
    exact = torch.exp((y - largest[:, :, None]).double() / T[:, :, None].double()).sum(2)
    assert (sums[:, :, -1].double().log() - exact.log()).abs().max() < 1e-3


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
def test_a_cold_draw_takes_the_largest_with_fused_multiply_adds(temperature, fused):
    """c y + shift is not 0 for the largest member if shift is a rounded -c m."""
    logits = normal_logits(64, 128, sigma=10.0) + 20.0
    T = torch.full((64, 1), temperature)
    tokens, _ = drawn(logits, T)
    assert torch.equal(reference.group_and_member(tokens)[1], by_group(logits).argmax(2))
