"""Log-probabilities of given tokens against float64: of exact logits, and before timing."""

from __future__ import annotations

import torch
from torch import Tensor

from fsbench import reference
from fsbench.errors import VerificationFailed
from fsbench.problem import Problem
from fsbench.provider import Launch, Provider
from fsbench.verify.check import Check
from fsbench.verify.drawing import exact_head, random_logits, require_support, scalar
from fsbench.verify.subject import Subject

ERROR = 1e-5
"""Of 1 + |x|: what fp32 may be off in sums; a scaled logit may be off by two roundings more."""

_ROWS, _TOKENS = 256, 16384  # of the problem's logits that are held at once in float64


def launched_scores(launch: Launch, hidden: Tensor) -> Tensor:
    """What one launch returns; raises VerificationFailed unless it is fp32 [B]."""
    found = launch(hidden, scalar(5, hidden.device), scalar(9, hidden.device))
    if found.shape != (len(hidden),) or found.dtype != torch.float32:
        raise VerificationFailed(
            f"log-probabilities: expected torch.float32 of shape ({len(hidden)},); got "
            f"{found.dtype} of shape {tuple(found.shape)}"
        )
    return found


def _targets(problem: Problem) -> Tensor:
    return torch.tensor(problem.row_targets(), device=problem.device)


def _rounding(wanted: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """How far fp32 may be from log-probabilities [B] of these logits [B, V]."""
    scaled = logits.double().abs().amax(1) / temperature
    return ERROR * (1 + wanted.abs()) + 2.0**-22 * scaled


def require_near(found: Tensor, wanted: Tensor, allowed: Tensor, what: str) -> float:
    """How far found [N] is from wanted [N] at most; raises if a number is further than allowed.

    Equal infinities are near.

    Raises:
        VerificationFailed: it names the first row and its error.
    """
    error = (found.double() - wanted).abs().where(found.double() != wanted, 0.0)
    wrong = ~(error <= allowed)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise VerificationFailed(
            f"{what}: row {row}: expected {float(wanted[row]):.7g}, got {float(found[row]):.7g}; "
            f"off by {float(error[row]):.2g}, allowed {float(allowed[row]):.2g}"
        )
    return float(error.max())


def check_score(subject: Subject) -> Check:
    """Of exact logits: targets at the ends of the vocabulary and inside, likely and not."""
    rows, worst = 0, 0.0
    for number, (B, V) in enumerate(subject.shapes):
        problem = subject.setting.problem(B, V)
        require_support(subject.provider, problem)
        hidden, weight, logits = exact_head(problem, random_logits(problem, number))
        found = launched_scores(subject.provider.build(problem, weight), hidden)
        wanted = reference.log_probability(logits, _targets(problem), problem.temperature)
        allowed = _rounding(wanted, logits, problem.temperature)
        worst = max(worst, require_near(found, wanted, allowed, f"{problem} log-probability"))
        rows += B
    return Check("score", True, f"{rows} log-probabilities within {worst:.1e} of fp64", rows)


def scores_on_problem(
    provider: Provider, problem: Problem, launch: Launch, hidden: Tensor, weight: Tensor
) -> Check:
    """On the inputs and with the launch that are about to be timed, every row against float64.

    Allowed is the rounding of the matmul, and unless it is fused that of stored logits.
    """
    found = launched_scores(launch, hidden)
    T, targets = problem.temperature, _targets(problem)
    matmul = reference.matmul_error(hidden, weight)
    wanted, allowed = [], []
    for rows in torch.arange(problem.B, device=hidden.device).split(_ROWS):
        h = hidden[rows].double()
        logits = torch.cat([h @ block.double().T for block in weight.split(_TOKENS)], 1)
        wanted.append(reference.log_probability(logits, targets[rows], T))
        stored = 0.0 if provider.capabilities.fused else torch.finfo(hidden.dtype).eps
        error = matmul + stored * logits.abs().amax(1)
        allowed.append(2 * error / T + _rounding(wanted[-1], logits, T))
    worst = require_near(found, torch.cat(wanted), torch.cat(allowed), "log-probability")
    detail = f"{problem.B} log-probabilities within {worst:.1e} of fp64"
    return Check("problem", True, detail, problem.B)
