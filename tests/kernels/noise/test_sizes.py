"""Groups of 1, 4, 8, 16 and 32 tokens: every kernel that draws returns the oracle's tokens."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from flash_sample_cases import NOISE, SEED, TILES, check, counter, problem, same_bits
from scipy.stats import chisquare
from tiers import first_quick
from truncated_cases import check as check_truncated

from fsbench import reference
from fsbench.errors import InvalidArgument
from fsbench.kernels import flash_sample

pytestmark = pytest.mark.usefixtures("one_thread")

SMALLER = ("group8", "group4", "group16")
"""Forms of the noise between token noise and groups of 32."""
ALL = (*SMALLER, *NOISE)
ROWS_T = torch.tensor([0.0, 0.4, 1.0, 3.0, 2.0**-121])
OPTIONS = {
    "plain": {},
    "rows of temperatures": {"temperature": ROWS_T},
    "greedy": {"temperature": 0.0},
    "bad temperatures": {"temperature": torch.tensor([1.0, -1.0, torch.nan, torch.inf, 2.0])},
    "mask": {"mask": torch.arange(5 * 300).view(5, 300) % 7 < 2},
    "nothing allowed": {"mask": (torch.arange(5)[:, None] != 2).expand(5, 300).contiguous()},
    "seeds": {"seed": counter(5, 5, -7, 2**40, 0), "offset": counter(0, 1, 2, 2**33, 4)},
    "all": {
        "temperature": ROWS_T,
        "bias": torch.linspace(-2, 2, 1500).view(5, 300),
        "mask": torch.arange(5 * 300).view(5, 300) % 5 < 3,
        "soft_cap": 5.0,
        "vocab_size": 290,
    },
}


def of_options(options: dict) -> dict:
    V = options.get("vocab_size", 300)
    parts = {
        name: options[name][:, :V].contiguous() for name in ("bias", "mask") if name in options
    }
    return {**options, **parts}


@pytest.mark.parametrize("size", [4, 8, 16, 32])
def test_groups_are_parts_of_those_of_32_and_their_ids_ascend(size):
    tokens = torch.arange(1024)
    group, member = reference.group_and_member(tokens, size)
    assert torch.equal(reference.token_of_member(group, member, size), tokens)
    assert (torch.bincount(group) == size).all() and len(
        torch.unique(group * size + member)
    ) == 1024
    whole, place = reference.group_and_member(tokens)
    for g in range(0, 1024 // size, 7):
        own = group == g
        assert len(torch.unique(whole[own])) == 1
        assert (place[own].diff() == 1).all() and (member[own].diff() == 1).all()


def test_no_two_groups_of_any_form_share_random_bits():
    drawn = [
        reference.group_noise(1024, SEED, counter(3), torch.zeros(1).long(), size=size)
        for size in (4, 8, 16, 32)
    ] + [(reference.token_noise(1024, SEED, counter(3), torch.zeros(1).long()),) * 2]
    for noise in drawn:
        assert len(torch.unique(noise[0])) == noise[0].numel()
    for (a, u), (b, w) in combinations(drawn, 2):
        assert not torch.isin(a, b).any() and not torch.isin(u, w).any()


@pytest.mark.parametrize("noise", ALL)
def test_the_law_is_softmax(noise):
    B, V, T = 40_000, 40, 0.7
    logits = 2 * torch.randn(V, generator=torch.Generator().manual_seed(4))
    logits[::9] = -torch.inf
    tokens = reference.expect(logits.expand(B, V), SEED, counter(1), T, noise).tokens
    law = (logits / T).double().softmax(0) * B
    often = law > 20
    seen = torch.bincount(tokens, minlength=V)
    assert not seen[law == 0].any()
    parts = [torch.cat([x[often], x[~often].sum()[None]]).numpy() for x in (seen, law)]
    assert chisquare(*parts).pvalue > 1e-3


@pytest.mark.interpreter
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("noise", first_quick(SMALLER))
def test_fused_tokens_are_the_oracles(noise, name):
    hidden, weight = problem(5, 300, 32)
    call = {"hidden": hidden, "weight": weight, "noise": noise, **of_options(OPTIONS[name])}
    check(**call, return_logprob=True, return_logz=True, num_samples=2, config=TILES)
    check(**call)


@pytest.mark.interpreter
def test_log_z_has_the_same_bits_with_any_noise():
    hidden, weight = problem(5, 300, 32)
    call = {"temperature": ROWS_T, "seed": SEED, "return_logz": True}
    found = [flash_sample(hidden, weight, **call, noise=noise).logz for noise in ALL]
    assert all(same_bits(one, found[0]) for one in found)


@pytest.mark.interpreter
@pytest.mark.parametrize("filters", [{"top_k": 20, "top_p": 0.8}, {"min_p": 0.1}, {}], ids=str)
@pytest.mark.parametrize("noise", ALL)
def test_truncated_tokens_are_the_oracles(noise, filters):
    hidden, weight = problem(5, 200, 32)
    check_truncated(
        hidden=hidden, weight=weight, temperature=ROWS_T, noise=noise, counting_only=True, **filters
    )


def test_other_sizes_are_refused():
    hidden, weight = problem(2, 64, 16)
    for noise in ("group2", "group32", "group1"):
        with pytest.raises(InvalidArgument, match="noise: expected auto or token or group4 or"):
            flash_sample(hidden, weight, seed=SEED, noise=noise)
