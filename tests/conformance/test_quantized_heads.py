"""Samplers that claim to take quantized heads as they are draw from the numbers of these."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsbench.discover import Found, discover
from fsbench.inputs import make_hidden, make_weight, quantized
from fsbench.problem import Problem
from fsbench.provider import Kind
from fsbench.verify.pathwise import check_on_problem

pytestmark = pytest.mark.usefixtures("one_thread")

TAKING = [found for found in discover().values() if found.provider.capabilities.quantized]
ASKED = [
    pytest.param(
        found, form, device, dtype, shape, marks=mark, id=f"{found.name}-{form}-{device}-{dtype}"
    )
    for found in TAKING
    for form in found.provider.capabilities.quantized
    for device, dtype, shape, mark in (
        ("cpu", "fp16", (6, 32, 200), pytest.mark.interpreter),
        ("cuda", "bf16", (48, 256, 5003), pytest.mark.gpu),
    )
]


@pytest.mark.parametrize(("found", "form", "device", "dtype", "shape"), ASKED)
def test_it_draws_from_the_head(found: Found, form, device, dtype, shape, request):
    """As from a weight of the same numbers, where that is no matter of chance."""
    if device == "cpu":
        request.getfixturevalue("eager")
    made = found.provider
    able = replace(made.capabilities, devices=(device,))
    made = replace(made, capabilities=able)
    problem = Problem(*shape, dtype, 0.8, device, "normal:3", weights=form)
    assert made.unsupported_reason(problem) is None
    hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
    launch = made.build(problem, quantized(weight, form))
    seeds = (torch.tensor([5], device=device), torch.tensor([9], device=device))
    given = launch(hidden, *seeds).clone()
    check = check_on_problem(made, problem, launch, hidden, weight)
    assert check.passed, check
    if able.noise or made.kind is Kind.SCORE:
        plain = made.build(replace(problem, weights=""), weight)
        assert torch.equal(plain(hidden, *seeds), given)


def test_some_do():
    assert {"flash_sampling", "flash_score", "scaled_matmul"} <= {found.name for found in TAKING}
