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


def changed(**changes: Callable) -> Sampler:
    """honest, with options changed: by a function of the option and of the batch size.

    An option that was not given is not changed.
    """

    def sampler(hidden, weight, **options):
        for name, change in changes.items():
            if options.get(name) is not None:
                options[name] = change(options[name], len(hidden))
        return honest(hidden, weight, **options)

    return sampler


def answered(name: str, change: Callable) -> Sampler:
    """honest, with a field of its result changed, if it is there."""

    def sampler(hidden, weight, **options):
        result = honest(hidden, weight, **options)
        if getattr(result, name) is None:
            return result
        return result._replace(**{name: change(getattr(result, name))})

    return sampler


def of_tensors(change: Callable) -> Callable:
    """A change of temperatures that are not a number."""
    return lambda T, B: change(T) if isinstance(T, Tensor) else T


def other_noise(hidden, weight, **options):
    return flash_sample(hidden, weight, noise="group", **options)


def stored_logits(hidden, weight, *, seed, **_):
    logits = hidden @ weight.T
    return Sample(logits.argmax(1), seed.bool())


def noise_by_another_row(hidden, weight, *, offset, **options):
    """Not found by batches of other sizes: in these the row stays."""
    other = int(hidden[min(len(hidden) - 1, 5)].argmax()) if len(hidden) > 1 else 5
    return honest(hidden, weight, offset=offset + other, **options)


def logprob_at_one(hidden, weight, **options):
    result = honest(hidden, weight, **options)
    if result.logprob is None:
        return result
    logp = torch.log_softmax(hidden.float() @ weight.float().T, 1)
    return result._replace(logprob=logp.gather(1, result.tokens[:, None])[:, 0])


def without_replacement(hidden, weight, *, num_samples=1, **_):
    p = torch.softmax(hidden.float() @ weight.float().T, 1)
    return Sample(torch.multinomial(p, num_samples), torch.ones(len(p), dtype=torch.bool))


def first_sample_again(tokens):
    return tokens[:, :1].expand_as(tokens) if tokens.ndim == 2 else tokens


def every_sample_twice(tokens):
    return tokens[:, : tokens.shape[1] // 2].repeat_interleave(2, 1) if tokens.ndim == 2 else tokens


WRONG: dict[str, tuple[str, Sampler]] = {  # mistake -> (the promise that it breaks, sampler)
    "tokens as floats": ("dtypes", answered("tokens", lambda tokens: tokens.float())),
    "the next token": ("dtypes", answered("tokens", lambda tokens: (tokens + 1) % 200)),
    "other noise": ("noise", other_noise),
    "half of the seed": ("noise", changed(seed=lambda seed, _: seed % 2**32)),
    "never quite greedy": ("zero_temperature", changed(temperature=lambda T, _: max(T, 0.5))),
    "stored logits": ("fused", stored_logits),
    "noise by batch size": ("batch_invariant", changed(seed=lambda seed, B: seed + B)),
    "noise by another row": ("batch_invariant", noise_by_another_row),
    "the first row's temperature": (
        "per_row_temperature",
        changed(temperature=of_tensors(lambda T: float(T[0]))),
    ),
    "temperatures of the rows behind": (
        "per_row_temperature",
        changed(temperature=of_tensors(lambda T: T.roll(1))),
    ),
    "greedy rows at one": (
        "greedy_rows",
        changed(temperature=of_tensors(lambda T: T.where(T > 0, 1.0))),
    ),
    "greedy if any row is": (
        "greedy_rows",
        changed(temperature=of_tensors(lambda T: 0.0 if (T == 0).any() else T)),
    ),
    "no bias": ("bias", changed(bias=lambda bias, _: None)),
    "the first row's bias": (
        "bias",
        changed(bias=lambda bias, _: bias if bias.ndim == 1 else bias[0].contiguous()),
    ),
    "half of the bias": ("bias", changed(bias=lambda bias, _: bias / 2)),
    "no mask": ("mask", changed(mask=lambda mask, _: None)),
    "no packed mask": (
        "mask",
        changed(mask=lambda mask, _: mask if mask.dtype == torch.bool else None),
    ),
    "the first row's mask": ("mask", changed(mask=lambda mask, B: mask[:1].repeat(B, 1))),
    "row numbers too": (
        "per_request_seed",
        changed(seed=lambda seed, _: seed + torch.arange(len(seed))),
    ),
    "the first seed for all": (
        "per_request_seed",
        changed(seed=lambda seed, _: seed[:1].repeat(len(seed))),
    ),
    "no logprob": ("logprob", changed(return_logprob=lambda *_: False)),
    "logprob at one": ("logprob", logprob_at_one),
    "logprob in bits": ("logprob", answered("logprob", lambda logprob: logprob / 0.6931)),
    "the same sample again": ("num_samples", answered("tokens", first_sample_again)),
    "every sample twice": ("num_samples", answered("tokens", every_sample_twice)),
    "without replacement": ("num_samples", without_replacement),
    "samples before rows": (
        "num_samples",
        answered("tokens", lambda tokens: tokens.T.contiguous()),
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_sampler_that_does_not_is_found_out(mistake):
    capability, sampler = WRONG[mistake]
    with pytest.raises(AssertionError):
        CHECKS[capability](made_up(sampler), "cpu", "bf16")


def test_every_check_can_fail():
    """Those that need CUDA: in the GPU tier."""
    assert {capability for capability, _ in WRONG.values()} == set(CHECKS) - NEED_CUDA
