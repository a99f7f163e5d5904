"""Problems with a quantized head: samplers must draw from the distribution of its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from planted_calls import contract
from torch import Tensor

from fsbench.baselines import multinomial
from fsbench.inputs import make_hidden, make_weight, quantized, serving
from fsbench.kernels import scaled_matmul
from fsbench.problem import QUANTIZED, Problem
from fsbench.provider import Kind, Provider, QuantizedWeight
from fsbench.verify import verify
from fsbench.verify.battery import applicable_checks, make_subject
from fsbench.verify.check import Setting
from fsbench.verify.pathwise import check_on_problem

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKS = ["score", "oracle", "undefined rows", "greedy", "edges", "masks", "quantized"]


def numbers(head: QuantizedWeight) -> Tensor:
    """Its numbers, [V, D] fp32."""
    return head.weight.float() * head.scale[:, None]


def reading(made: Callable[[QuantizedWeight], Tensor]) -> Provider:
    """Return the reference as a sampler that takes quantized heads; `made` dequantizes them."""
    plain = contract()

    def weight_of(argument):
        return made(argument) if isinstance(argument, QuantizedWeight) else argument

    return replace(
        plain,
        capabilities=replace(plain.capabilities, quantized=QUANTIZED),
        build=lambda problem, weight: plain.build(problem, weight_of(weight)),
        sample=lambda hidden, weight, **options: plain.sample(hidden, weight_of(weight), **options),
    )


@pytest.fixture(autouse=True)
def few(effort):
    effort("ci", fit_draws=2**12, shapes=((1, 1), (17, 129)), filtered=(64, 300), filter_steps=27)


@pytest.mark.parametrize("form", QUANTIZED)
def test_a_sampler_of_the_head_passes(form):
    checks = list(verify(reading(numbers), Setting("cpu", "fp32", weights=form), "ci", CHECKS))
    assert [check.name for check in checks] == CHECKS
    assert all(check.verdict == "ok" for check in checks), checks
    assert (
        checks[-1].detail
        == "36 tokens are the oracle's, 0 not those of the dequantized head in fp32"
    )


@pytest.mark.parametrize(
    "made",
    [
        lambda head: head.weight.float() * head.scale.mean(),
        lambda head: head.weight.float() * head.scale.roll(1)[:, None],
        lambda head: numbers(head) * 1.01,
    ],
    ids=["one scale for all", "the scale of another row", "one percent"],
)
@pytest.mark.parametrize("form", QUANTIZED)
def test_a_sampler_of_other_numbers_is_found(form, made):
    checks = verify(reading(made), Setting("cpu", "fp32", weights=form), "ci", CHECKS)
    assert {check.name for check in checks if not check.passed} & {"oracle", "score"}


def test_tokens_that_are_only_not_those_of_the_dtype_are_counted():
    """A sampler that is right, but has others from the weight."""
    plain, made = contract(), reading(numbers)

    def build(problem, weight):
        if isinstance(weight, QuantizedWeight):
            return made.build(problem, weight)
        return lambda hidden, seed, offset: plain.build(problem, weight)(hidden, seed, offset) + 1

    (check,) = verify(
        replace(made, build=build), Setting("cpu", "fp32", weights="int8"), "ci", ["quantized"]
    )
    assert check.passed and check.statistic == check.draws == 36


@pytest.mark.parametrize("form", QUANTIZED)
def test_a_sampler_of_the_weight_must_have_the_same_distribution(form):
    setting = Setting("cpu", "bf16", weights=form)
    fit, edges = verify(multinomial.PROVIDER, setting, "ci", ["fit", "edges"])
    assert fit.passed and edges.passed, (fit, edges)
    problem = Problem(4, 64, 500, "bf16", 1.0, "cpu", "normal:3", weights=form)
    hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
    other = make_weight(replace(problem, weights="", logits="zipf:2"), 1)
    for actual, passes in ((weight, True), (other, False)):
        launch = multinomial.PROVIDER.build(problem, actual)
        check = check_on_problem(multinomial.PROVIDER, problem, launch, hidden, weight)
        assert check.passed == passes, check


@pytest.mark.parametrize("form", QUANTIZED)
def test_filters_are_not_checked_on_a_quantized_head(form):
    able = replace(contract().capabilities, filters=("top_k",))
    for weights in ("", form):
        setting = Setting("cpu", "fp32", weights=weights, truncated=True)
        subject = make_subject(replace(contract(), capabilities=able), setting, "gate")
        names = {name for name, _ in applicable_checks(subject)}
        assert ("truncation" in names) == (not weights)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("form", QUANTIZED)
def test_a_scaled_matmul_has_the_logits_of_a_rounded_hidden_state(form, dtype):
    problem = Problem(5, 256, 1000, dtype, 1.0, "cpu", "normal:3", weights=form)
    hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
    hidden[2] = 0
    head = quantized(weight, form)
    logits = {"fp8": scaled_matmul.fp8_logits, "int8": scaled_matmul.int8_logits}[form]
    approximate = logits(hidden, head.weight, head.scale)
    exact = hidden.double() @ weight.double().T
    assert approximate.dtype == torch.bfloat16 and not approximate[2].any()
    error = (approximate.double() - exact).std() / exact.std()
    assert 0.002 < error < {"fp8": 0.04, "int8": 0.015}[form]
    distributions = [values.double().softmax(1) for values in (approximate, exact)]
    distance = (distributions[0] - distributions[1]).abs().sum(1).max() / 2
    assert distance < scaled_matmul.PROVIDER.capabilities.known_deviation


def test_serving_quantizes_the_weight_only_for_samplers_of_quantized_heads():
    heads = []

    def watching(*arguments):
        heads.append(arguments[1])

    able = replace(contract().capabilities, quantized=("fp8",))
    made = replace(
        contract(), kind=Kind.SCORE, build=watching, sample=watching, score=watching,
        capabilities=able,
    )  # fmt: skip
    assert serving(made, "int8") is made and serving(made, "") is made
    weight, problem = torch.ones(3, 16), Problem(1, 16, 3, "fp32", device="cpu", weights="fp8")
    served = serving(made, "fp8")
    served.build(problem, weight)
    served.sample(weight, weight)
    served.score(weight, weight, weight)
    assert all(torch.equal(numbers(head), weight) for head in heads) and len(heads) == 3
    served.build(replace(problem, weights=""), weight)
    assert heads[-1] is weight
