"""Comparison of log-probabilities, entropies, ranks and largest logits with float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsbench import reference
from fsbench.errors import VerificationFailed
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider
from fsbench.verify.check import Check
from fsbench.verify.drawing import (
    exact_head,
    random_logits,
    require_form,
    require_inside,
    require_support,
    scalar,
)
from fsbench.verify.subject import Subject

ERROR = 1e-5
"""Allowed error of fp32 sums, relative to 1 + |x|; a scaled logit adds two roundings."""

_ROWS, _TOKENS = 256, 16384  # size of a block of logits in float64


def launched_scores(launch: Launch, hidden: Tensor) -> Tensor:
    """Return the result of one launch; raises VerificationFailed unless it is fp32 [B]."""
    actual = launch(hidden, scalar(5, hidden.device), scalar(9, hidden.device))
    if actual.shape != (len(hidden),) or actual.dtype != torch.float32:
        raise VerificationFailed(
            f"log-probabilities: expected torch.float32 of shape ({len(hidden)},); got "
            f"{actual.dtype} of shape {tuple(actual.shape)}"
        )
    return actual


def _targets(problem: Problem) -> Tensor:
    return torch.tensor(problem.row_targets(), device=problem.device)


def _tolerance(expected: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """Return the allowed fp32 error of log-probabilities [B] of these logits [B, V]."""
    scaled = logits.double().abs().amax(1) / temperature
    return ERROR * (1 + expected.abs()) + 2.0**-22 * scaled


def require_close(actual: Tensor, expected: Tensor, allowed: Tensor, label: str) -> float:
    """Return the largest error of actual, [B] or [B, n]; equal infinities have no error.

    Raises:
        VerificationFailed: an error is larger than allowed [B]; the message names the first row.
    """
    error = (actual.double() - expected).abs().where(actual.double() != expected, 0.0)
    allowed = allowed.reshape(-1, *[1] * (expected.ndim - 1)).expand_as(expected)
    wrong = ~((error <= allowed) & (expected.isfinite() | (error == 0)))
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        raise VerificationFailed(
            f"{label}: row {index[0]}: expected {float(expected[index]):.7g} (float64 reference), "
            f"got {float(actual[index]):.7g} (sampler); "
            f"off by {float(error[index]):.2g}, allowed {float(allowed[index]):.2g}"
        )
    return float(error.max())


def require_equal(actual: Tensor, expected: Tensor, label: str) -> None:
    """Raise VerificationFailed, with the first row, unless integers [B, n] are equal."""
    wrong = actual.long() != expected
    if wrong.any():
        row = int(wrong.nonzero()[0][0])
        raise VerificationFailed(
            f"{label}: row {row}: expected {expected[row].tolist()} (float64 reference), "
            f"got {actual[row].tolist()} (sampler)"
        )


def check_score(subject: Subject) -> Check:
    """Check scores on exact logits: launches of a SCORE, and outside the gate full calls.

    Targets of launches include the ends of the vocabulary. Every second launch is at the second
    temperature, if the score supports it.
    """
    provider, setting, rows, errors = subject.provider, subject.setting, 0, [0.0]
    for number, (B, V) in enumerate(subject.shapes if provider.kind is Kind.SCORE else ()):
        problem = setting.problem(B, V, setting.second_temperature if number % 2 else None)
        if provider.unsupported_reason(problem):
            problem = setting.problem(B, V)
        require_support(provider, problem)
        hidden, weight, logits = exact_head(problem, random_logits(problem, number))
        actual = launched_scores(provider.build(problem, weight), hidden)
        expected = reference.log_probability(logits, _targets(problem), problem.temperature)
        allowed = _tolerance(expected, logits, problem.temperature)
        errors.append(require_close(actual, expected, allowed, f"{problem} log-probability"))
        rows += B
    if not subject.gate and (provider.sample or provider.score):
        hard = _HardRows.make(subject)
        error = _check_targets(subject, hard) if provider.score else _check_draws(subject, hard)
        errors.append(error)
        rows += len(hard.hidden)
    return Check("score", True, f"{rows} log-probabilities within {max(errors):.1e} of fp64", rows)


class _HardRows(NamedTuple):
    """Rows whose scores are hard to compute, with a T and a mask by row if the sampler has these.

    Rows in turn: normal logits; few different logits, with ties; one leader 20 T above all others;
    all equal. Every third row has a mask, the first one with three allowed tokens.

    kept: stored logits plus bias, float64 [B, V]; -inf for forbidden tokens.
    logp: log softmax(kept / T), float64 [B, V]; T = 1 in greedy rows.
    allowed: [B], the allowed fp32 error of numbers near 0.
    options: arguments of the full call.
    """

    hidden: Tensor
    weight: Tensor
    kept: Tensor
    logp: Tensor
    allowed: Tensor
    options: dict[str, Any]

    @staticmethod
    def make(subject: Subject) -> _HardRows:
        """Return rows with the sizes of `masks`, at the second temperature."""
        caps, device = subject.caps, subject.setting.device
        (B, V), base = subject.effort.filtered, subject.setting.second_temperature
        problem = subject.setting.problem(min(B, 64), V, base)
        require_support(subject.provider, problem)
        B, generator = problem.B, torch.Generator().manual_seed(47)
        rows = 2 * torch.randn(B, V, generator=generator)
        rows[1::4] = (2 * rows[1::4]).round() / 2
        rows[2::4], rows[3::4] = -20.0, 0.0
        rows[2::4, V // 3] = 0.0
        hidden, weight, logits = exact_head(problem, (min(base, 1e3) * rows).to(device))
        values = [base * part for part in (1.0, 0.5, 2.0)] if caps.per_row_temperature else []
        values += [0.0] if caps.greedy_rows else []
        values = values or [base]
        T = torch.tensor(values, device=device)[torch.arange(B, device=device) % len(values)]
        options: dict[str, Any] = {"temperature": T if caps.per_row_temperature else base}
        mask = torch.ones(B, V, dtype=torch.bool)
        if caps.mask:
            mask[::3] = torch.rand(len(mask[::3]), V, generator=generator) < 0.5
            mask[0] = False
            mask[:, [0, V // 3, V - 1]] = True
            options["mask"] = mask = mask.to(device)
        bias = torch.zeros(V)
        if caps.bias:
            bias = min(base, 1e3) * torch.randint(-4, 5, (V,), generator=generator) / 2
            options["bias"] = bias = bias.to(device)
        for name in ("logprob", "entropy", "rank"):
            if getattr(caps, name) and (name != "logprob" or subject.provider.sample):
                options[f"return_{name}"] = True
        kept = (logits + bias.to(device)).double().masked_fill(~mask.to(device), -torch.inf)
        inverse = reference.inverse_temperature(T, kept.device)
        logp = (kept * inverse).log_softmax(1)
        allowed = ERROR + 2.0**-22 * (logits.double() * inverse).abs().amax(1)
        return _HardRows(hidden, weight, kept, logp, allowed, options)

    def max_error(self, subject: Subject, result: Any, tokens: Tensor) -> float:
        """Return the largest error of log-probabilities of tokens [B, n] and of entropies.

        Raises:
            VerificationFailed: an error is too large, or a rank is wrong.
        """
        caps, worst = subject.caps, 0.0
        shape = (len(tokens),) if tokens.shape[1] == 1 else tokens.shape
        ignored = tokens == -100
        tokens = tokens.masked_fill(ignored, 0)
        if caps.logprob:
            expected = self.logp.gather(1, tokens).masked_fill(ignored, 0.0)
            allowed = self.allowed + ERROR * expected.nan_to_num(neginf=0.0).abs().amax(1)
            actual = _field(result, "logprob", shape).view_as(expected)
            worst = require_close(actual, expected, allowed, "log-probability")
        if caps.entropy:
            expected = -(self.logp.exp() * self.logp.nan_to_num(neginf=0.0)).sum(1)
            actual = _field(result, "entropy", expected.shape)
            allowed = self.allowed + ERROR * expected
            worst = max(worst, require_close(actual, expected, allowed, "entropy"))
        if caps.rank:
            above = [(self.kept > self.kept.gather(1, token[:, None])).sum(1) for token in tokens.T]
            expected = torch.stack(above, 1).masked_fill(ignored, -1)
            require_equal(_field(result, "rank", shape).view_as(expected), expected, "rank")
        return worst


def _check_draws(subject: Subject, hard: _HardRows) -> float:
    """Check the scores of one full call's draws and of the largest logits; return the error."""
    assert subject.provider.sample is not None
    device, V = hard.kept.device, hard.kept.shape[1]
    top = min(20, V) if subject.caps.top else 0
    options = {**hard.options, "return_top": top} if top else {**hard.options}
    B, n = len(hard.hidden), 3 if subject.caps.num_samples else 1
    if n > 1:
        options["num_samples"] = n
    if "top_k" in subject.caps.filters:  # changes the drawn tokens, not their scores
        options["top_k"] = max(2, V // 8)
    torch.manual_seed(0)
    result = subject.provider.sample(
        hard.hidden, hard.weight, seed=scalar(43, device), offset=scalar(0, device), **options
    )
    shape = (B, n) if n > 1 else (B,)
    tokens = require_form(result.tokens, shape).long().view(B, n)
    require_inside(tokens, V)
    worst = hard.max_error(subject, result, tokens)
    if top:
        values, order = (x[:, :top] for x in hard.kept.sort(dim=1, descending=True, stable=True))
        expected = order.masked_fill(values == -torch.inf, -1)
        require_equal(_field(result, "top_tokens", expected.shape), expected, "largest tokens")
        logp = hard.logp.gather(1, order)
        allowed = hard.allowed + ERROR * logp.nan_to_num(neginf=0.0).abs().amax(1)
        actual = _field(result, "top_logprob", expected.shape)
        worst = max(worst, require_close(actual, logp, allowed, "log-probability of the largest"))
    return worst


def _check_targets(subject: Subject, hard: _HardRows) -> float:
    """Check the scores of targets: the likeliest, the least likely, the last, -100, another."""
    assert subject.provider.score is not None
    largest, least = hard.kept.argmax(1), hard.kept.argmin(1)
    last = torch.full_like(largest, hard.kept.shape[1] - 1)
    middle = torch.arange(len(last), device=last.device) * 7919 % len(hard.kept[0])
    targets = torch.stack([largest, least, last, middle], 1)
    targets[::5, 2] = -100
    result = subject.provider.score(hard.hidden, hard.weight, targets, **hard.options)
    return hard.max_error(subject, result, targets)


def _field(result: Any, name: str, shape: tuple[int, ...]) -> Tensor:
    actual = getattr(result, name, None)
    if not isinstance(actual, Tensor) or actual.shape != shape:
        raise VerificationFailed(f"returned no {name} of shape {tuple(shape)}")
    return actual


def scores_on_problem(
    provider: Provider, problem: Problem, launch: Launch, hidden: Tensor, weight: Tensor
) -> Check:
    """Compare all rows of a launch that is about to be timed with float64.

    The tolerance is the rounding of the matmul, and of stored logits unless the score is fused.
    """
    actual = launched_scores(launch, hidden)
    T, targets = problem.temperature, _targets(problem)
    matmul = reference.matmul_error(hidden, weight)
    expected, allowed = [], []
    for rows in torch.arange(problem.B, device=hidden.device).split(_ROWS):
        h = hidden[rows].double()
        logits = torch.cat([h @ block.double().T for block in weight.split(_TOKENS)], 1)
        expected.append(reference.log_probability(logits, targets[rows], T))
        stored = 0.0 if provider.capabilities.fused else torch.finfo(hidden.dtype).eps
        error = matmul + stored * logits.abs().amax(1)
        allowed.append(2 * error / T + _tolerance(expected[-1], logits, T))
    worst = require_close(actual, torch.cat(expected), torch.cat(allowed), "log-probability")
    detail = f"{problem.B} log-probabilities within {worst:.1e} of fp64"
    return Check("problem", True, detail, problem.B)
