"""Checks of greedy decoding and of extreme logits, at sizes around those of tiles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsbench import inputs
from fsbench.errors import VerificationFailed
from fsbench.provider import Kind
from fsbench.verify.call import is_greedy
from fsbench.verify.check import Check
from fsbench.verify.drawing import (
    exact_head,
    launched_tokens,
    random_logits,
    require_inside,
    stored_head,
)
from fsbench.verify.pathwise import pathwise_problems
from fsbench.verify.subject import Subject

CERTAIN = 100.0
"""Difference of two logits, in units of T, that no draw may cross: e^-100 in probability."""

_LOWEST = -6e4  # fp16 ends at -65504


def check_greedy(subject: Subject) -> Check:
    """Check that the token at T = 0 has the largest logit, also if all logits are negative.

    With noise of the contract it must be the first of equal tokens; some rows have many.
    """
    rows = 0
    for number, problem in pathwise_problems(subject, 0.0):
        B, V = problem.B, problem.V
        logits = random_logits(problem, number)
        if subject.caps.noise is not None:
            logits[3::4] = logits[3::4].clamp_max(0.0)
        hidden, weight, _ = exact_head(problem, logits)
        # All-negative logits expose padding filled with zero.
        for shift in (0.0, -40.0):
            head = weight + torch.tensor(shift, dtype=weight.dtype, device=weight.device)
            head = inputs.stored(problem, head)
            values = hidden.float() @ head.float().T
            tokens = launched_tokens(subject.provider.build(problem, head), hidden, 1, number)
            wrong = ~is_greedy(values, tokens.long()[:, None], subject.caps.noise)[:, 0]
            if wrong.any():
                row = int(wrong.nonzero()[0])
                raise VerificationFailed(
                    f"B={B} V={V} row {row}: expected {int(values[row].argmax())}, "
                    f"the largest logit; the sampler gave {int(tokens[row])}"
                )
            rows += B
    return Check("greedy", True, f"{rows} rows have the maximum logit", rows)


def check_edges(subject: Subject) -> Check:
    """No token is drawn that has no probability: ids out of range, padding, far below the leader.

    The rows: one token CERTAIN above all others, at either end and inside of the vocabulary; the
    same with all logits negative, which exposes padding that counts as zero; two such tokens, tied;
    all logits equal and negative; one logit of zero and all others at the bottom of the range.
    """
    T = 0.0
    if subject.provider.kind is not Kind.GREEDY:
        T = min(subject.setting.sampled_temperature, -_LOWEST / CERTAIN / 2)
    rows = 0
    problems = pathwise_problems(subject, T)
    for number, problem in problems:
        B, V, device = problem.B, problem.V, problem.device
        gap = CERTAIN * (T or 1.0)
        # One byte cannot represent the gap next to the bottom of the range.
        lowest = -4 * gap if problem.weights else _LOWEST
        logits, allowed = (part.to(device) for part in _edge_rows(V, gap, lowest))
        hidden, weight = stored_head(problem, logits)
        launch = subject.provider.build(problem, weight)
        torch.manual_seed(number)
        for step in range(math.ceil(len(logits) / B)):  # until each row has had its turn
            row = (torch.arange(B, device=device) + step * B) % len(logits)
            tokens = launched_tokens(launch, hidden[row].contiguous(), 3 + number, step).long()
            require_inside(tokens, V)
            wrong = ~allowed[row, tokens]
            if wrong.any():
                index = int(wrong.nonzero()[0])
                raise VerificationFailed(
                    f"B={B} V={V} row {index}: drew token {int(tokens[index])}, of probability 0"
                )
            rows += B
    detail = f"{rows} rows of {len(problems)} shapes: no token without probability"
    return Check("edges", True, detail, rows)


def _edge_rows(V: int, gap: float, lowest: float) -> tuple[Tensor, Tensor]:
    """Logits [9, V] fp32, and which tokens have probability: bool [9, V]."""
    logits = torch.full((9, V), -2 * gap)
    for number, place in enumerate((0, V // 2, V - 1)):
        logits[number, place] = -gap
        logits[3 + number] = 0.0
        logits[3 + number, place] = gap
    logits[6, [V // 3, V - 1]] = -gap
    logits[7] = -gap
    logits[8] = lowest
    logits[8, V // 3] = 0.0
    return logits, logits == logits.max(1, keepdim=True).values
