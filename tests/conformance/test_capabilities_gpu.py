"""Every cell of `fsbench list --capabilities`, on a GPU: all that can run here.

What CPU tensors show is also in tests/conformance/test_capabilities.py.
"""

from __future__ import annotations

import pytest
import torch
from capability_checks import CHECKS, NEED_COMPILER, claims

from fsbench.discover import discover
from fsbench.kernels import flash_sample
from fsbench.provider import Capabilities, Kind, Provider

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

CELLS = [
    pytest.param(entry, capability, dtype, id=f"{name}-{capability}-{dtype}")
    for name, entry in discover().items()
    if "cuda" in entry.provider.capabilities.devices
    for capability, dtype in claims(entry.provider)
]


@pytest.mark.parametrize(("entry", "capability", "dtype"), CELLS)
def test_it_can_do_what_it_claims(entry, capability, dtype):
    reason = entry.unavailable_reason("cuda")
    if reason:
        pytest.skip(reason)
    CHECKS[capability](entry.provider, "cuda", dtype)


# Samplers that do not do what they claim, for the checks that CPU tensors cannot show to work.


def one_offset_forever(hidden, weight, *, offset, **options):
    return flash_sample(hidden, weight, offset=torch.zeros_like(offset), **options)


def tokens_by_the_host(hidden, weight, **options):
    result = flash_sample(hidden, weight, **options)
    return result._replace(tokens=result.tokens.cpu().to(hidden.device))


def options_by_the_host(hidden, weight, *, temperature=1.0, **options):
    """A launch does well: its temperature is a number."""
    if isinstance(temperature, torch.Tensor) and not temperature.any():
        temperature = 0.0
    return flash_sample(hidden, weight, temperature=temperature, **options)


def stored_logits(hidden, weight, **options):
    result = flash_sample(hidden, weight, **options)
    return result._replace(tokens=result.tokens + (hidden @ weight.T)[:, 0].long())


WRONG = [
    ("fused", stored_logits),
    ("graph_safe", one_offset_forever),
    ("host_sync_free", tokens_by_the_host),
    ("host_sync_free", options_by_the_host),
]


@pytest.mark.parametrize(
    ("capability", "sampler"), [pytest.param(*item, id=item[1].__name__) for item in WRONG]
)
def test_a_sampler_that_does_not_is_found_out(capability, sampler):
    def build(problem, weight):
        return lambda hidden, seed, offset: sampler(hidden, weight, seed=seed, offset=offset).tokens

    able = Capabilities(noise="group", per_row_temperature=True)
    provider = Provider("made_up", "", Kind.EXACT, build, capabilities=able, sample=sampler)
    with pytest.raises(AssertionError):
        CHECKS[capability](provider, "cuda", "bf16")


def test_every_check_that_needs_a_gpu_can_fail():
    assert {capability for capability, _ in WRONG} == NEED_COMPILER
