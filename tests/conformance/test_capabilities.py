"""Every capability of `fsbench list --capabilities`, as far as it can be exercised here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from capability_checks import BATTERY, CHECKS, NEED_COMPILER, NEED_CUDA, require
from planted_calls import (
    contract,
    logits_stored,
    one_offset_forever,
    options_by_the_host,
    tokens_by_the_host,
)
from planted_samplers import planted, tile_of_the_batch_size
from torch import Tensor

from fsbench.discover import Found, discover
from fsbench.errors import InvalidArgument
from fsbench.problem import Problem
from fsbench.provider import OPTIONS, Capabilities, Kind, Launch, Provider, QuantizedWeight
from fsbench.verify import call, invariance
from fsbench.verify.check import Check

pytestmark = pytest.mark.usefixtures("one_thread")

ENTRIES = discover()


@pytest.fixture
def small(monkeypatch, request, effort):
    """On a CPU problems of one or two tiles, one launch, no statistics, and nothing compiled."""
    params = request.node.callspec.params
    if params.get("device") == "cuda":
        return
    request.getfixturevalue("eager")
    # A fused kernel has tiles of 16 rows, a kernel over stored logits a program for each row.
    stored = "provider" in params and not params["provider"].capabilities.fused
    tiny = ((1, 1),) if params.get("check", "oracle") == "oracle" else ()
    sizes = {"shapes": (*tiny, (6, 200)), "sizes": (3,) if stored else (12,)}
    sizes |= {"any_shapes": sizes["shapes"], "any_sizes": sizes["sizes"]}
    sizes |= {"vocabulary": 300, "call_steps": 1, "filtered": (16, 200), "filter_steps": 1}
    effort("ci", **sizes)
    fits = Check("fit", True, "not asked", p_value=1.0)
    for module, values in (
        (call, {"_ROWS": 16, "_VOCABULARY": 200, "_MASK_ROWS": 4, "all_fit": lambda *_: fits}),
        (invariance, {"_BATCH": 5 if stored else 17, "_VOCABULARY": 200, "_SHARDS": (0, 128, 200)}),
    ):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


SAME_ON_CPU = {"flash_sampling_auto"}
"""On a CPU it is flash_sampling, as tests/kernels/providing/test_auto.py shows."""


# Samplers that are shipped


def on_cpu(entry: Found) -> tuple[Provider, set[str], tuple] | None:
    """Return (sampler, capabilities that it cannot show, marks) for CPU tensors, if it can run.

    A Triton sampler runs in the interpreter, but not in bf16, which the interpreter multiplies
    wrongly.
    """
    provider = entry.provider
    if not entry.unavailable_reason("cpu"):
        return provider, NEED_CUDA, ()
    if not entry.source.startswith("fsbench.kernels.") or provider.compute_capability:
        return None
    able = provider.capabilities
    dtypes = tuple(dtype for dtype in able.dtypes if dtype != "bf16")
    able = replace(able, devices=("cuda", "cpu"), dtypes=dtypes)
    return replace(provider, capabilities=able), NEED_COMPILER, (pytest.mark.interpreter,)


def cells(entry: Found) -> Iterator:
    """Yield (entry, provider, check, device, dtype): each check in one dtype, each dtype once."""
    subjects = {"cuda": (entry.provider, set(), (pytest.mark.gpu,)), "cpu": on_cpu(entry)}
    for device, subject in subjects.items():
        if subject is None or device not in subject[0].capabilities.devices:
            continue
        provider, hidden, marks = subject
        able, kind = provider.capabilities, provider.kind
        checks = {name for name in CHECKS if name not in hidden and getattr(able, name)}
        if kind is Kind.TRUNCATED or (device == "cpu" and kind is not Kind.LOWER_BOUND):
            names = {check for capability, check in BATTERY.items() if getattr(able, capability)}
            names |= {"edges", "undefined rows"} if able.noise else {"edges"}
            checks |= {"score"} if kind is Kind.SCORE else names
        if device == "cpu" and entry.name in SAME_ON_CPU:
            checks &= {"dtypes"}
        pairs = [(check, able.dtypes[0]) for check in sorted(checks)]
        for check, dtype in [*pairs, *(("dtypes", dtype) for dtype in able.dtypes[1:])]:
            name = f"{entry.name}-{check}-{dtype}-{device}"
            yield pytest.param(entry, provider, check, device, dtype, id=name, marks=marks)


@pytest.mark.parametrize(
    ("entry", "provider", "check", "device", "dtype"),
    [cell for entry in ENTRIES.values() for cell in cells(entry)],
)
def test_it_can_do_what_it_claims(entry, provider, check, device, dtype, small):
    if device == "cuda" and (reason := entry.unavailable_reason("cuda")):
        pytest.skip(reason)
    require(provider, check, device, dtype)


def test_samplers_take_quantized_heads():
    taking = {name for name, entry in ENTRIES.items() if entry.provider.capabilities.quantized}
    assert {"flash_sampling", "flash_score", "scaled_matmul"} <= taking


@pytest.mark.parametrize("option", OPTIONS)
def test_a_claim_that_cannot_be_shown_is_refused(option):
    able = Capabilities(**{option: True})
    with pytest.raises(InvalidArgument, match=f"made_up: expected `sample`, by which {option} can"):
        Provider("made_up", "", Kind.EXACT, lambda *_: None, capabilities=able)


def test_every_capability_has_a_check():
    """Except for devices (where they run), deviations, filters and penalties (verify)."""
    deviations = {"known_deviation", "exact_to_gap", "excess_beyond_gap", "seed_stride"}
    deviations |= {"filters", "mixed_filters", "filter_order", "ties", "penalties"}
    named = {field.name for field in fields(Capabilities)} - {"devices", *deviations}
    assert {*CHECKS, *BATTERY} == named and not {*CHECKS} & {*BATTERY}


# Samplers with planted mistakes


def rows_behind(T: float | Tensor, *_: object) -> float | Tensor:
    return T.roll(1) if isinstance(T, Tensor) else T


def without_scale(problem: Problem, head: QuantizedWeight | Tensor) -> Launch:
    weight = head.weight if isinstance(head, QuantizedWeight) else head
    return contract().build(problem, weight.float())


IGNORES_SCALE = replace(
    contract(),
    build=without_scale,
    capabilities=replace(contract().capabilities, quantized=("int8",)),
)
WRONG = {  # mistake -> (the promise that it breaks, sampler)
    "tokens as floats": ("dtypes", contract(tokens=lambda tokens, *_: tokens.float())),
    "the next token": ("dtypes", contract(tokens=lambda tokens, *_: (tokens + 1) % 200)),
    "half of the seed": ("noise", contract(seed=lambda seed, _: seed % 2**32)),
    "never quite greedy": ("zero_temperature", contract(temperature=lambda T, *_: max(T, 0.3))),
    "noise by batch size": (
        "batch_invariant",
        planted(tile_of_the_batch_size, batch_invariant=True),
    ),
    "temperatures of rows behind": ("per_row_temperature", contract(temperature=rows_behind)),
    "greedy rows drawn": (
        "greedy_rows",
        contract(temperature=lambda T, *_: T.clamp_min(0.3) if isinstance(T, Tensor) else T),
    ),
    "half of the bias": ("bias", contract(bias=lambda bias, _: bias / 2)),
    "the first row's bias": ("bias", contract(bias=lambda bias, _: bias.view(-1, 200)[0])),
    "no mask": ("mask", contract(mask=lambda allowed, *_: allowed | True)),
    "the first row's mask": ("mask", contract(mask=lambda allowed, *_: allowed[:1])),
    "row numbers too": (
        "per_request_seed",
        contract(seed=lambda seed, _: seed + torch.arange(len(seed))),
    ),
    "no logprob": ("logprob", contract(logprob=lambda logprob: None)),
    "logprob in bits": ("logprob", contract(logprob=lambda logprob: logprob / 0.6931)),
    "entropy in bits": ("entropy", contract(entropy=lambda H: H / 0.6931)),
    "ranks count ties": ("rank", contract(above=torch.ge)),
    "largest tokens by id": ("top", contract(order=lambda order, _: order.sort(1).values)),
    "the same sample again": ("num_samples", contract(sample=lambda key: (key[0], 0))),
    "numbers without their scale": ("quantized", IGNORES_SCALE),
}


@pytest.mark.parametrize("capability", sorted({*CHECKS, *BATTERY} - NEED_COMPILER - {"quantized"}))
def test_an_honest_sampler_passes(capability, small):
    require(contract(), BATTERY.get(capability, capability), "cpu", "fp32")


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_found(mistake, small):
    capability, sampler = WRONG[mistake]
    with pytest.raises(AssertionError):
        require(sampler, BATTERY.get(capability, capability), "cpu", "fp32")


WRONG_LAUNCHES = [
    ("fused", logits_stored),
    ("graph_safe", one_offset_forever),
    ("host_sync_free", tokens_by_the_host),
    ("host_sync_free", options_by_the_host),
]
ON_GPU = [pytest.param(*each, "cuda", marks=pytest.mark.gpu) for each in WRONG_LAUNCHES]


@pytest.mark.parametrize(
    ("capability", "sampler", "device"), [("fused", logits_stored, "cpu"), *ON_GPU]
)
def test_a_mistake_of_a_launch_is_found(capability, sampler, device):
    def build(problem, weight):
        return lambda hidden, seed, offset: sampler(hidden, weight, seed=seed, offset=offset).tokens

    able = Capabilities(noise="group", per_row_temperature=True)
    provider = Provider("made_up", "", Kind.EXACT, build, capabilities=able, sample=sampler)
    with pytest.raises(AssertionError):
        CHECKS[capability](provider, device, "bf16")


def test_every_check_can_fail():
    broken = {capability for capability, _ in (*WRONG.values(), *WRONG_LAUNCHES)}
    assert broken == {*CHECKS, *BATTERY}
