"""Scores of tokens compared with float64: log-probabilities, entropies, ranks, largest logits."""

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
"""Of 1 + |x|: what fp32 may be off in sums; a scaled logit may be off by two roundings more."""

_ROWS, _TOKENS = 256, 16384  # of the problem's logits that are held at once in float64


def launched_scores(launch: Launch, hidden: Tensor) -> Tensor:
    """Return the result of one launch; raises VerificationFailed unless it is fp32 [B]."""
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
    """Return the allowed fp32 error of log-probabilities [B] of these logits [B, V]."""
    scaled = logits.double().abs().amax(1) / temperature
    return ERROR * (1 + wanted.abs()) + 2.0**-22 * scaled


def require_near(found: Tensor, wanted: Tensor, allowed: Tensor, what: str) -> float:
    """How far found [B] or [B, n] is from wanted at most; raises if further than allowed [B].

    Equal infinities are near.

    Raises:
        VerificationFailed: it names the first row and its error.
    """
    error = (found.double() - wanted).abs().where(found.double() != wanted, 0.0)
    allowed = allowed.reshape(-1, *[1] * (wanted.ndim - 1)).expand_as(wanted)
    wrong = ~((error <= allowed) & (wanted.isfinite() | (error == 0)))
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise VerificationFailed(
            f"{what}: row {at[0]}: expected {float(wanted[at]):.7g} (float64 reference), "
            f"got {float(found[at]):.7g} (sampler); "
            f"off by {float(error[at]):.2g}, allowed {float(allowed[at]):.2g}"
        )
    return float(error.max())


def require_equal(found: Tensor, wanted: Tensor, what: str) -> None:
    """Raise VerificationFailed, naming the first row, unless integers [B, n] are equal."""
    wrong = found.long() != wanted
    if wrong.any():
        row = int(wrong.nonzero()[0][0])
        raise VerificationFailed(
            f"{what}: row {row}: expected {wanted[row].tolist()} (float64 reference), "
            f"got {found[row].tolist()} (sampler)"
        )


def check_score(subject: Subject) -> Check:
    """Of exact logits: a SCORE's launches, and outside the gate what full calls say of tokens.

    Targets of launches are likely ones and others, with the ends of the vocabulary. Every second
    launch is at the second temperature, if the score takes that.
    """
    provider, setting, rows, worst = subject.provider, subject.setting, 0, [0.0]
    for number, (B, V) in enumerate(subject.shapes if provider.kind is Kind.SCORE else ()):
        problem = setting.problem(B, V, setting.second_temperature if number % 2 else None)
        if provider.unsupported_reason(problem):
            problem = setting.problem(B, V)
        require_support(provider, problem)
        hidden, weight, logits = exact_head(problem, random_logits(problem, number))
        found = launched_scores(provider.build(problem, weight), hidden)
        wanted = reference.log_probability(logits, _targets(problem), problem.temperature)
        allowed = _rounding(wanted, logits, problem.temperature)
        worst.append(require_near(found, wanted, allowed, f"{problem} log-probability"))
        rows += B
    if not subject.gate and (provider.sample or provider.score):
        hard = _Hard.of(subject)
        told = _of_targets(subject, hard) if provider.score else _of_draws(subject, hard)
        worst.append(told)
        rows += len(hard.hidden)
    return Check("score", True, f"{rows} log-probabilities within {max(worst):.1e} of fp64", rows)


class _Hard(NamedTuple):
    """Rows that are hard to tell about, with a T and a mask of their own where that is claimed.

    By turns: normal logits; few different ones, so ties; one leader, 20 T above all others; all
    equal. Every third row has a mask, the first of them with three tokens left.

    kept: the logits as stored and the bias, float64 [B, V], and -inf of forbidden tokens.
    logp: log softmax(kept / T), float64 [B, V]; greedy rows at T = 1. allowed: what fp32 may be
    off, of numbers near 0, [B]. options: of the full call.
    """

    hidden: Tensor
    weight: Tensor
    kept: Tensor
    logp: Tensor
    allowed: Tensor
    options: dict[str, Any]

    @staticmethod
    def of(subject: Subject) -> _Hard:
        """Of the sizes of `masks`, at the second temperature."""
        able, device = subject.able, subject.setting.device
        (B, V), base = subject.effort.filtered, subject.setting.second_temperature
        problem = subject.setting.problem(min(B, 64), V, base)
        require_support(subject.provider, problem)
        B, generator = problem.B, torch.Generator().manual_seed(47)
        rows = 2 * torch.randn(B, V, generator=generator)
        rows[1::4] = (2 * rows[1::4]).round() / 2
        rows[2::4], rows[3::4] = -20.0, 0.0
        rows[2::4, V // 3] = 0.0
        hidden, weight, logits = exact_head(problem, (min(base, 1e3) * rows).to(device))
        values = [base * part for part in (1.0, 0.5, 2.0)] if able.per_row_temperature else []
        values += [0.0] if able.greedy_rows else []
        values = values or [base]
        T = torch.tensor(values, device=device)[torch.arange(B, device=device) % len(values)]
        options: dict[str, Any] = {"temperature": T if able.per_row_temperature else base}
        mask = torch.ones(B, V, dtype=torch.bool)
        if able.mask:
            mask[::3] = torch.rand(len(mask[::3]), V, generator=generator) < 0.5
            mask[0] = False
            mask[:, [0, V // 3, V - 1]] = True
            options["mask"] = mask = mask.to(device)
        bias = torch.zeros(V)
        if able.bias:
            bias = min(base, 1e3) * torch.randint(-4, 5, (V,), generator=generator) / 2
            options["bias"] = bias = bias.to(device)
        for name in ("logprob", "entropy", "rank"):
            if getattr(able, name) and (name != "logprob" or subject.provider.sample):
                options[f"return_{name}"] = True
        kept = (logits + bias.to(device)).double().masked_fill(~mask.to(device), -torch.inf)
        inverse = reference.inverse_temperature(T, kept.device)
        logp = (kept * inverse).log_softmax(1)
        allowed = ERROR + 2.0**-22 * (logits.double() * inverse).abs().amax(1)
        return _Hard(hidden, weight, kept, logp, allowed, options)

    def judge(self, subject: Subject, result: Any, tokens: Tensor) -> float:
        """How far log-probabilities of tokens [B, n], and entropies, are off; ranks are exact."""
        able, worst = subject.able, 0.0
        shape = (len(tokens),) if tokens.shape[1] == 1 else tokens.shape
        ignored = tokens == -100
        tokens = tokens.masked_fill(ignored, 0)
        if able.logprob:
            wanted = self.logp.gather(1, tokens).masked_fill(ignored, 0.0)
            allowed = self.allowed + ERROR * wanted.nan_to_num(neginf=0.0).abs().amax(1)
            found = _field(result, "logprob", shape).view_as(wanted)
            worst = require_near(found, wanted, allowed, "log-probability")
        if able.entropy:
            wanted = -(self.logp.exp() * self.logp.nan_to_num(neginf=0.0)).sum(1)
            found = _field(result, "entropy", wanted.shape)
            allowed = self.allowed + ERROR * wanted
            worst = max(worst, require_near(found, wanted, allowed, "entropy"))
        if able.rank:
            above = [(self.kept > self.kept.gather(1, token[:, None])).sum(1) for token in tokens.T]
            wanted = torch.stack(above, 1).masked_fill(ignored, -1)
            require_equal(_field(result, "rank", shape).view_as(wanted), wanted, "rank")
        return worst


def _of_draws(subject: Subject, hard: _Hard) -> float:
    """What one full call says of the tokens that it draws, and of the largest logits."""
    assert subject.provider.sample is not None
    device, V = hard.kept.device, hard.kept.shape[1]
    top = min(20, V) if subject.able.top else 0
    options = {**hard.options, "return_top": top} if top else {**hard.options}
    B, n = len(hard.hidden), 3 if subject.able.num_samples else 1
    if n > 1:
        options["num_samples"] = n
    if "top_k" in subject.able.filters:  # it changes which tokens are drawn, not what is said
        options["top_k"] = max(2, V // 8)
    torch.manual_seed(0)
    result = subject.provider.sample(
        hard.hidden, hard.weight, seed=scalar(43, device), offset=scalar(0, device), **options
    )
    shape = (B, n) if n > 1 else (B,)
    tokens = require_form(result.tokens, shape).long().view(B, n)
    require_inside(tokens, V)
    worst = hard.judge(subject, result, tokens)
    if top:
        values, order = (x[:, :top] for x in hard.kept.sort(dim=1, descending=True, stable=True))
        wanted = order.masked_fill(values == -torch.inf, -1)
        require_equal(_field(result, "top_tokens", wanted.shape), wanted, "largest tokens")
        logp = hard.logp.gather(1, order)
        allowed = hard.allowed + ERROR * logp.nan_to_num(neginf=0.0).abs().amax(1)
        found = _field(result, "top_logprob", wanted.shape)
        worst = max(worst, require_near(found, logp, allowed, "log-probability of the largest"))
    return worst


def _of_targets(subject: Subject, hard: _Hard) -> float:
    """What one full call says of targets: the likeliest, the least likely, the last, -100."""
    assert subject.provider.score is not None
    largest, least = hard.kept.argmax(1), hard.kept.argmin(1)
    last = torch.full_like(largest, hard.kept.shape[1] - 1)
    middle = torch.arange(len(last), device=last.device) * 7919 % len(hard.kept[0])
    targets = torch.stack([largest, least, last, middle], 1)
    targets[::5, 2] = -100
    result = subject.provider.score(hard.hidden, hard.weight, targets, **hard.options)
    return hard.judge(subject, result, targets)


def _field(result: Any, name: str, shape: tuple[int, ...]) -> Tensor:
    found = getattr(result, name, None)
    if not isinstance(found, Tensor) or found.shape != shape:
        raise VerificationFailed(f"gave no {name} of shape {tuple(shape)}")
    return found


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
