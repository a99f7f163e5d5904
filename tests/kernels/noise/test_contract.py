"""The noise contract: the fp32 Gumbel map, packed candidates, and the two forms of the noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from flash_sample_cases import NOISE, SEED, counter
from scipy.stats import chisquare

from fsbench import reference
from fsbench.discover import discover
from fsbench.errors import InvalidArgument
from fsbench.kernels.flash_sampling import PROVIDER
from fsbench.kernels.noise import keys
from fsbench.verify.check import Setting
from fsbench.verify.effort import EFFORTS
from fsbench.verify.noise import check_noise_map
from fsbench.verify.subject import Subject

pytestmark = pytest.mark.interpreter


@triton.jit
def _key_kernel(score_ptr, token_ptr, key_ptr, back_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    key = keys.ordered_key(tl.load(score_ptr + offs), tl.load(token_ptr + offs))
    tl.store(key_ptr + offs, key)
    tl.store(back_ptr + offs, keys.token_of_key(key))


MAPS = {
    entry.provider.noise_map
    for entry in discover().values()
    if entry.provider and entry.provider.noise_map is not None
}


@pytest.mark.parametrize("noise_map", MAPS)
def test_the_noise_map_is_finite_monotone_and_accurate(noise_map):
    """On a part of the codes; `verify --tier full` tries all on a GPU."""
    effort = replace(EFFORTS["ci", "cpu"], codes=2**18)
    provider = replace(PROVIDER, noise_map=noise_map)
    check = check_noise_map(Subject(provider, Setting("cpu", "fp32"), effort))
    assert check.passed and check.draws > 2**17, check


def test_keys_order_scores_first_then_lower_tokens():
    infinity = float("inf")
    scores = [-infinity, -3e38, -1.5, -1e-45, 0.0, 0.0, 1e-45, 2.5, 3e38, infinity]
    tokens = [5, 5, 7, 1, 9, 3, 0, 2**31 - 17, 4, 5]
    n = 16
    score = torch.tensor(scores + [0.0] * (n - len(scores)))
    token = torch.tensor(tokens + [0] * (n - len(tokens)), dtype=torch.int32)
    key, back = torch.zeros(2, n, dtype=torch.int64)
    _key_kernel[(1,)](score, token, key, back, N=n)
    ordered = key[: len(scores)].tolist()
    assert ordered == sorted(ordered)
    assert ordered[0] > keys.LOWEST_KEY.value
    expected = [-1, *tokens[1:-1], -1]  # infinite scores are no draw
    assert back[: len(scores)].tolist() == expected


def test_no_two_forms_share_random_bits():
    noise = (1024, SEED, counter(3), torch.zeros(1).long())
    token, (gumbel, _) = reference.token_noise(*noise), reference.group_noise(*noise)
    assert len(torch.unique(gumbel)) == gumbel.numel() and len(torch.unique(token)) == token.numel()
    assert not torch.isin(token, gumbel).any()


@pytest.mark.parametrize("noise", NOISE)
def test_the_distribution_is_softmax(noise):
    B, V, T = 40_000, 40, 0.7
    logits = 2 * torch.randn(V, generator=torch.Generator().manual_seed(4))
    logits[::9] = -torch.inf
    tokens = reference.expect(logits.expand(B, V), SEED, counter(1), T, noise).tokens
    expected = (logits / T).double().softmax(0) * B
    often = expected > 20
    seen = torch.bincount(tokens, minlength=V)
    assert not seen[expected == 0].any()
    parts = [torch.cat([x[often], x[~often].sum()[None]]).numpy() for x in (seen, expected)]
    assert chisquare(*parts).pvalue > 1e-3


def test_the_reference_refuses_other_forms():
    with pytest.raises(InvalidArgument, match="noise: expected token or group; got"):
        reference.expect(torch.zeros(2, 16), SEED, counter(0), noise="group4")
