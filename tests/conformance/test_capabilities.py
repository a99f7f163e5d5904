"""Every cell of `fsbench list --capabilities` that can be exercised without a GPU.

The others, and all of them again, are in test_capabilities_gpu.py. The checks themselves
are checked: for each there are samplers that break its promise, and it must notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from capability_checks import CHECKS, NEED_COMPILER, NEED_CUDA, claims
from torch import Tensor

from fsbench.discover import Found, discover
from fsbench.errors import InvalidArgument
from fsbench.kernels import Sample, flash_sample
from fsbench.problem import Problem
from fsbench.provider import OPTIONS, Capabilities, Kind, Provider

pytestmark = pytest.mark.usefixtures("one_thread")

FOUND = discover()


@pytest.fixture
def eager(monkeypatch):
    """Compiled samplers without the compiler, as in test_providers.py."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def interpreted(provider: Provider) -> Provider:
    """A Triton sampler as it runs on CPU tensors: not in bf16, which the interpreter multiplies
    wrongly."""
    dtypes = tuple(dtype for dtype in provider.capabilities.dtypes if dtype != "bf16")
    return replace(provider, capabilities=replace(provider.capabilities, dtypes=dtypes))


def cells(entry: Found) -> Iterator:
    """What a sampler claims and can show on CPU tensors: (provider, capability, dtype)."""
    provider = entry.provider
    if not entry.unavailable_reason("cpu"):
        beyond, marks = NEED_CUDA, ()
    elif entry.source.startswith("fsbench.kernels.") and not provider.compute_capability:
        provider, beyond, marks = interpreted(provider), NEED_COMPILER, pytest.mark.interpreter
    else:
        return
    for capability, dtype in claims(provider):
        if capability not in beyond:
            name = f"{entry.name}-{capability}-{dtype}"
            yield pytest.param(provider, capability, dtype, id=name, marks=marks)


@pytest.mark.parametrize(
    ("provider", "capability", "dtype"), [cell for entry in FOUND.values() for cell in cells(entry)]
)
def test_it_can_do_what_it_claims(provider, capability, dtype, eager):
    CHECKS[capability](provider, "cpu", dtype)


@pytest.mark.parametrize("name", FOUND)
def test_without_the_full_call_nothing_is_claimed_of_it(name):
    provider = FOUND[name].provider
    if provider.sample is None:
        assert not [option for option in OPTIONS if getattr(provider.capabilities, option)]


@pytest.mark.parametrize("option", OPTIONS)
def test_a_claim_that_cannot_be_shown_is_refused(option):
    with pytest.raises(InvalidArgument, match=f"made_up: expected `sample`, by which {option} can"):
        Provider(
            "made_up", "", Kind.EXACT, lambda *_: None, capabilities=Capabilities(**{option: True})
        )


@pytest.mark.parametrize("name", FOUND)
def test_every_claim_is_exercised_here_or_on_a_gpu(name):
    """The GPU tier takes all claims of samplers that run there."""
    provider = FOUND[name].provider
    claimed = {capability for capability, _ in claims(provider)}
    assert "cuda" in provider.capabilities.devices or not claimed & NEED_CUDA


def test_every_capability_has_a_check():
    """But devices, where they run, and deviations, filters, penalties: verify judges these."""
    deviations = {"known_deviation", "exact_to_gap", "excess_beyond_gap", "seed_stride"}
    deviations |= {"filters", "mixed_filters", "filter_order", "ties", "penalties"}
    named = {field.name for field in fields(Capabilities)} - {"devices", *deviations}
    assert set(CHECKS) == named
    assert {*OPTIONS, *NEED_COMPILER} <= named


# Samplers that do not do what they claim. On CPU tensors in bf16 flash_sample is the reference.

Sampler = Callable[..., Sample]

honest = partial(flash_sample, noise="token")

WRONG: list[tuple[str, Sampler]] = []


def wrong(capability: str) -> Callable[[Sampler], Sampler]:
    """Marks a sampler that breaks the promise of a capability."""

    def mark(sampler: Sampler) -> Sampler:
        WRONG.append((capability, sampler))
        return sampler

    return mark


def made_up(sampler: Sampler) -> Provider:
    """A provider that claims everything and does it all by this sampler."""

    def build(problem: Problem, weight: Tensor):
        def launch(hidden, seed, offset):
            drawn = sampler(
                hidden, weight, temperature=problem.temperature, seed=seed, offset=offset
            )
            return drawn.tokens

        return launch

    able = Capabilities(devices=("cpu",), dtypes=("bf16",), noise="token")
    able = replace(able, **dict.fromkeys(set(CHECKS) - {"dtypes", "noise"}, True))
    return Provider("made_up", "", Kind.EXACT, build, capabilities=able, sample=sampler)


@pytest.mark.parametrize("capability", sorted(set(CHECKS) - NEED_COMPILER))
def test_an_honest_sampler_passes(capability):
    CHECKS[capability](made_up(honest), "cpu", "bf16")


@wrong("dtypes")
def the_next_token(hidden, weight, **options):
    result = honest(hidden, weight, **options)
    return result._replace(tokens=(result.tokens + 1) % len(weight))


@wrong("dtypes")
def tokens_as_floats(hidden, weight, **options):
    result = honest(hidden, weight, **options)
    return result._replace(tokens=result.tokens.float())


@wrong("noise")
def other_noise(hidden, weight, **options):
    return flash_sample(hidden, weight, noise="group", **options)


@wrong("noise")
def half_of_the_seed(hidden, weight, *, seed, **options):
    return honest(hidden, weight, seed=seed % 2**32, **options)


@wrong("zero_temperature")
def never_quite_greedy(hidden, weight, *, temperature=1.0, **options):
    return honest(hidden, weight, temperature=max(temperature, 0.5), **options)


@wrong("fused")
def stored_logits(hidden, weight, *, seed, **_):
    logits = hidden @ weight.T
    return Sample(logits.argmax(1), seed.bool())


@wrong("batch_invariant")
def noise_by_batch_size(hidden, weight, *, seed, **options):
    return honest(hidden, weight, seed=seed + len(hidden), **options)


@wrong("batch_invariant")
def noise_by_another_row(hidden, weight, *, offset, **options):
    """Not found by batches of other sizes: in these the row stays."""
    other = int(hidden[min(len(hidden) - 1, 5)].argmax()) if len(hidden) > 1 else 5
    return honest(hidden, weight, offset=offset + other, **options)


@wrong("per_row_temperature")
def the_first_rows_temperature(hidden, weight, *, temperature=1.0, **options):
    if isinstance(temperature, Tensor):
        temperature = float(temperature[0])
    return honest(hidden, weight, temperature=temperature, **options)


@wrong("per_row_temperature")
def temperatures_of_the_rows_behind(hidden, weight, *, temperature=1.0, **options):
    if isinstance(temperature, Tensor):
        temperature = temperature.roll(1)
    return honest(hidden, weight, temperature=temperature, **options)


@wrong("greedy_rows")
def greedy_rows_at_one(hidden, weight, *, temperature=1.0, **options):
    if isinstance(temperature, Tensor):
        temperature = temperature.where(temperature > 0, 1.0)
    return honest(hidden, weight, temperature=temperature, **options)


@wrong("greedy_rows")
def greedy_if_any_row_is(hidden, weight, *, temperature=1.0, **options):
    if isinstance(temperature, Tensor) and (temperature == 0).any():
        temperature = 0.0
    return honest(hidden, weight, temperature=temperature, **options)


@wrong("bias")
def no_bias(hidden, weight, *, bias=None, **options):
    return honest(hidden, weight, **options)


@wrong("bias")
def the_first_rows_bias(hidden, weight, *, bias=None, **options):
    if bias is not None and bias.ndim == 2:
        bias = bias[0].contiguous()
    return honest(hidden, weight, bias=bias, **options)


@wrong("bias")
def half_of_the_bias(hidden, weight, *, bias=None, **options):
    return honest(hidden, weight, bias=None if bias is None else bias / 2, **options)


@wrong("mask")
def no_mask(hidden, weight, *, mask=None, **options):
    return honest(hidden, weight, **options)


@wrong("mask")
def no_packed_mask(hidden, weight, *, mask=None, **options):
    if mask is not None and mask.dtype != torch.bool:
        mask = None
    return honest(hidden, weight, mask=mask, **options)


@wrong("mask")
def the_first_rows_mask(hidden, weight, *, mask=None, **options):
    if mask is not None:
        mask = mask[:1].repeat(len(mask), 1)
    return honest(hidden, weight, mask=mask, **options)


@wrong("per_request_seed")
def row_numbers_too(hidden, weight, *, seed, **options):
    if len(seed) > 1:
        seed = seed + torch.arange(len(seed))
    return honest(hidden, weight, seed=seed, **options)


@wrong("per_request_seed")
def the_first_seed_for_all(hidden, weight, *, seed, **options):
    return honest(hidden, weight, seed=seed[:1].repeat(len(seed)), **options)


@wrong("logprob")
def no_logprob(hidden, weight, *, return_logprob=False, **options):
    return honest(hidden, weight, **options)


@wrong("logprob")
def logprob_at_one(hidden, weight, *, return_logprob=False, temperature=1.0, **options):
    result = honest(hidden, weight, temperature=temperature, **options)
    if not return_logprob:
        return result
    logp = torch.log_softmax(hidden.float() @ weight.float().T, 1)
    return result._replace(logprob=logp.gather(1, result.tokens[:, None])[:, 0])


@wrong("logprob")
def logprob_in_bits(hidden, weight, **options):
    result = honest(hidden, weight, **options)
    if result.logprob is None:
        return result
    return result._replace(logprob=result.logprob / 0.6931)


@wrong("num_samples")
def the_same_sample_again(hidden, weight, *, num_samples=1, **options):
    result = honest(hidden, weight, **options)
    return result._replace(tokens=result.tokens[:, None].repeat(1, num_samples))


@wrong("num_samples")
def every_sample_twice(hidden, weight, *, num_samples=1, **options):
    result = honest(hidden, weight, num_samples=num_samples, **options)
    if num_samples == 1:
        return result
    half = result.tokens[:, : num_samples // 2]
    return result._replace(tokens=half.repeat_interleave(2, dim=1))


@wrong("num_samples")
def without_replacement(hidden, weight, *, num_samples=1, **_):
    p = torch.softmax(hidden.float() @ weight.float().T, 1)
    return Sample(torch.multinomial(p, num_samples), torch.ones(len(p), dtype=torch.bool))


@wrong("num_samples")
def samples_before_rows(hidden, weight, *, num_samples=1, **options):
    result = honest(hidden, weight, num_samples=num_samples, **options)
    return result._replace(tokens=result.tokens.T.contiguous())


@pytest.mark.parametrize(
    ("capability", "sampler"), [pytest.param(*item, id=item[1].__name__) for item in WRONG]
)
def test_a_sampler_that_does_not_is_found_out(capability, sampler):
    with pytest.raises(AssertionError):
        CHECKS[capability](made_up(sampler), "cpu", "bf16")


def test_every_check_can_fail():
    """Those that need CUDA: in the GPU tier."""
    assert {capability for capability, _ in WRONG} == set(CHECKS) - NEED_CUDA
