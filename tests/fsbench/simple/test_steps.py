"""The four designs against the oracle: probabilities in torch, tokens of the core step by step."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fsbench.reference.truncation import penalized, token_counts
from fsbench.simple import native
from fsbench.simple.plane import uniforms
from fsbench.simple.reference import decide
from fsbench.simple.steps import PLAIN, Controls, FullV, Offload, Parallel, Shvs, probabilities
from fsbench.simple.zipf import ZipfText

pytestmark = [
    pytest.mark.skipif(bool(native.missing()), reason=str(native.missing())),
    pytest.mark.usefixtures("one_thread"),
]

V = 3000
LOGITS = ZipfText(V, knee=300).logits(64).bfloat16().float()  # exact in a ring of either dtype
PRODUCTION = Controls(0.8, 50, 0.9, 0.02, repetition=1.1, presence=0.1, frequency=0.1)
"""All controls on, as in SIMPLE's evaluation (section 7.1, which gives no values)."""
RAISING = Controls(0.8, repetition=0.8, presence=-0.5, frequency=0.2)
GREEDY = Controls(temperature=0.0)
HISTORY = [([1, 2, 3, row, *range(500, 500 + 9 * row)], [row, row, 7]) for row in range(64)]


def oracle(controls, uniform, history):
    logits = LOGITS[: len(uniform)]
    if controls.penalizes:
        counts = (token_counts(seen, V) for seen in zip(*history, strict=True))
        logits = penalized(logits, *counts, **controls.penalties)
    return decide(logits, uniform, **controls.filters)


@pytest.mark.parametrize("temperature", [1.0, 0.8, 0.0])
def test_probabilities_in_torch_are_the_oracles(temperature):
    """The first two designs draw from them."""
    p, undefined = probabilities(LOGITS[:6], temperature)
    uniform = torch.full((6,), 0.5, dtype=torch.float64)
    expected = oracle(Controls(temperature), uniform, HISTORY[:6])
    assert not undefined.any()
    assert torch.allclose(p.double(), expected.high - expected.low, atol=1e-5)


@pytest.mark.parametrize(
    ("design", "controls"),
    [
        *((design, controls)
          for design in (Offload, partial(Shvs, hot=400), partial(Shvs, hot=400, dtype="bf16"))
          for controls in (PLAIN, PRODUCTION, RAISING, GREEDY)),
        *((Parallel, controls) for controls in (PLAIN, GREEDY)),
    ],
)  # fmt: skip
def test_designs_draw_the_oracles_tokens_step_by_step(design, controls):
    """From uniforms of the step, and with what was drawn before counted."""
    step = design(64, V, controls.temperature if design is Parallel else controls, 2)
    history = [(prompt, list(output)) for prompt, output in HISTORY]
    for row, seen in enumerate(history if controls.penalizes else ()):
        step.begin(row, *seen)
    uniform = torch.empty(64, dtype=torch.float64)
    for number in range(4):
        step.logits.copy_(LOGITS)
        if isinstance(step, Shvs):
            step.supply()
        tokens = step.tokens(torch.tensor([5]), torch.tensor([number]))
        uniforms(uniform, torch.tensor([5]), torch.tensor([number]))
        assert oracle(controls, uniform, history).accepts(tokens, uniform).all()
        for (_, output), token in zip(history, tokens.tolist(), strict=True):
            output.append(token)


def test_the_engines_sampler_draws_from_its_probabilities():
    torch.manual_seed(0)
    step = FullV(2048, V, 0.5)
    step.logits.copy_(LOGITS[:1].expand(2048, V))
    p, _ = probabilities(LOGITS[:1], 0.5)
    counts = torch.bincount(step.tokens(torch.tensor([0]), torch.tensor([0])), minlength=V)
    error = (p[0] * (1 - p[0]) / 2048).sqrt() + 1e-3
    assert ((counts / 2048 - p[0]).abs() / error).max() < 5
