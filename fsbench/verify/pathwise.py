"""Token by token: what a sampler returns against what the reference says it must return.

Here are the checks of samplers with noise of the contract, and the one of every launch that is
about to be timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fsbench import inputs, reference
from fsbench.errors import VerificationFailed
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider
from fsbench.reference import Truncation
from fsbench.verify.check import ALPHA, Check
from fsbench.verify.drawing import exact_head, launched_tokens, random_logits, require_support
from fsbench.verify.scores import scores_on_problem
from fsbench.verify.statistics import surprisal_p_value
from fsbench.verify.subject import Subject

_PROBLEM_STEPS = {"cuda": 64, "cpu": 4}
"""Most steps of `check_on_problem`: a step on a CPU can take a good part of a second."""

_QUANTIZED = {"cuda": (4096, 32_768, (1, 16, 64, 256), 64), "cpu": (64, 300, (1, 17), 2)}
"""D, V, batches and steps of `check_quantized`, by device."""


Asked = tuple[int, Problem, Sequence[tuple[int, int]]]
"""(number of its logits, problem, (seed, step) of its launches)."""


def pathwise_problems(subject: Subject, temperature: float) -> list[tuple[int, Problem]]:
    """The problems of the subject's shapes that it supports, numbered; at least one."""
    problems = [
        (number, subject.setting.problem(B, V, temperature))
        for number, (B, V) in enumerate(subject.shapes)
    ]
    able = [item for item in problems if not subject.provider.unsupported_reason(item[1])]
    if not able:
        require_support(subject.provider, problems[-1][1])
    return able


def check_oracle(subject: Subject) -> Check:
    """The token is the one fsbench.reference gives for the same logits, row by row.

    At the second temperature, if there is one, for the last seed only.
    """
    setting, asked = subject.setting, []
    for T in dict.fromkeys((setting.temperature, setting.second or setting.temperature)):
        for number, problem in pathwise_problems(subject, T):
            counters = [(0, 0), (-(2**63) + number, 7), (0x0123456789ABCDEF, 2**32 - 1)]
            asked.append((number, problem, counters if setting.temperature == T else counters[2:]))
    return compared("oracle", subject.provider, asked)


def compared(name: str, provider: Provider, asked: Iterable[Asked]) -> Check:
    """The check that all tokens are the oracle's; VerificationFailed names the first wrong one."""
    rows = ties = 0
    for number, problem, counters in asked:
        hidden, weight, logits = exact_head(problem, random_logits(problem, number))
        logits, error = penalized(problem, logits)
        kept = truncation(problem, provider.capabilities, logits, error)
        launch = provider.build(problem, weight)
        for seed, step in counters:
            tokens = launched_tokens(launch, hidden, seed, step)
            expected = reference.expect(
                logits,
                torch.tensor([seed]),
                torch.tensor([step]),
                problem.temperature,
                noise_of(problem, provider.capabilities),
                logits_error=error,
                truncation=kept,
            )
            require_accepted(expected, tokens, f"{problem} seed={seed} step={step} ")
            rows += problem.B
            ties += int((tokens != expected.tokens).sum())
    return Check(name, True, f"{rows} rows equal the oracle, {ties} by a rounding tie", rows)


def require_accepted(expected: reference.Expected, tokens: Tensor, where: str = "") -> None:
    """Raise VerificationFailed for the first of tokens [B] that is not accepted."""
    wrong = ~expected.accepts(tokens)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise VerificationFailed(
            f"{where}row {row}: expected token {int(expected.tokens[row])} (reference), "
            f"got {int(tokens[row])} (sampler)"
        )


def check_quantized(subject: Subject) -> Check:
    """Of a quantized head, rows of a real matmul: the oracle's tokens for the head's numbers.

    Beside them the tokens that the sampler draws from a weight of these numbers are counted that
    are others: sums in another order may give some, at a rounding tie.
    """
    setting, provider = subject.setting, subject.provider
    draws = others = 0
    D, V, batches, steps = _QUANTIZED[setting.device]
    for B in batches:
        problem = replace(setting.problem(B, V), D=D, logits="normal:3")
        require_support(provider, problem)
        hidden, weight = inputs.make_hidden(problem, 0), inputs.make_weight(problem, 0)
        logits, error = hidden.float() @ weight.float().T, reference.matmul_error(hidden, weight)
        launch = provider.build(problem, weight)
        plain = provider.build(replace(problem, weights=""), weight)
        for step in range(steps):
            expected = reference.expect(
                logits,
                torch.tensor([5]),
                torch.tensor([step]),
                problem.temperature,
                noise_of(problem, subject.able),
                logits_error=error,
            )
            tokens = launched_tokens(launch, hidden, 5, step).clone()
            require_accepted(expected, tokens, f"{problem} step={step} ")
            draws += B
            others += int((tokens != launched_tokens(plain, hidden, 5, step)).sum())
    told = f"{draws} tokens are the oracle's, {others} not those of its numbers in {setting.dtype}"
    return Check("quantized", True, told, draws, float(others))


def check_undefined_rows(subject: Subject) -> Check:
    """Rows with NaN, +inf or no finite logit give -1; their neighbors are not disturbed."""
    problem = subject.setting.problem(6, 300)
    require_support(subject.provider, problem)
    hidden, weight, _ = exact_head(problem, random_logits(problem, 0))
    weight[:, -1] = 1.0  # read by the spoiled rows only
    launch = subject.provider.build(problem, weight)
    clean = launched_tokens(launch, hidden, 3, 1)
    spoiled = hidden.clone()
    spoiled[1] = float("nan")
    spoiled[3:5] = 0.0
    spoiled[3, -1] = -float("inf")
    spoiled[4, -1] = float("inf")
    tokens = launched_tokens(launch, spoiled, 3, 1)
    expected = clean.clone()
    expected[[1, 3, 4]] = -1
    passed = bool((tokens == expected).all()) and bool((clean >= 0).all())
    detail = f"rows 1 (NaN), 3 (all -inf), 4 (+inf) expect -1: got {tokens.tolist()}"
    return Check("undefined rows", passed, detail, problem.B)


def check_on_problem(
    provider: Provider, problem: Problem, launch: Launch, hidden: Tensor, weight: Tensor
) -> Check:
    """On the inputs and with the launch that are about to be timed: ids in range, tokens right.

    A sampler with noise of the contract must return the oracle's token for logits recomputed in
    fp32, within the rounding of the matmul (and of stored logits, unless it is fused); so must
    greedy decoding.
    Other samplers draw a few times, and the tokens' probabilities must be such as honest draws have
    (`surprisal_p_value`). With filters it is looked at whether their tokens are kept by these.
    Of a SCORE, see scores.scores_on_problem.
    """
    if provider.kind is Kind.SCORE:
        return scores_on_problem(provider, problem, launch, hidden, weight)
    B, V = problem.B, problem.V
    tokens = launched_tokens(launch, hidden, 5, 9)
    if not bool(((tokens >= 0) & (tokens < V)).all()):
        return Check("problem", False, f"a token outside [0, {V}): {tokens.tolist()[:8]}")
    able = provider.capabilities
    logits = hidden.float() @ weight.float().T
    error = reference.matmul_error(hidden, weight)
    if not able.fused:
        error += float(logits.abs().max()) * torch.finfo(hidden.dtype).eps
    logits, error = penalized(problem, logits, error)
    greedy = provider.kind is Kind.GREEDY or problem.temperature == 0
    kept = None if greedy else truncation(problem, able, logits, error)
    if greedy or able.noise is not None:
        expected = reference.expect(
            logits,
            torch.tensor([5]),
            torch.tensor([9]),
            0.0 if greedy else problem.temperature,
            noise_of(problem, able),
            logits_error=error,
            truncation=kept,
        )
        accepted = expected.accepts(tokens)
        equal = int((tokens == expected.tokens).sum())
        detail = f"{equal} of {B} tokens equal the oracle's, {int(accepted.sum())} accepted"
        return Check("problem", bool(accepted.all()), detail, B)
    if kept is not None:
        cut = ~kept.possibly.gather(1, tokens.long()[:, None])[:, 0]
        passed = bool(able.known_deviation) or not bool(cut.any())
        return Check("problem", passed, f"{int(cut.sum())} of {B} tokens are cut off", B)
    steps = min(math.ceil(64 / B), _PROBLEM_STEPS[problem.device])
    # Cloned: a launch may write every step's tokens to the same place.
    drawn = [launched_tokens(launch, hidden, 5, 9 + step).clone() for step in range(steps)]
    logp = torch.log_softmax(logits / problem.temperature, dim=1)
    p_value = surprisal_p_value(
        torch.stack(drawn), logp, error / problem.temperature, able.known_deviation
    )
    detail = f"the probabilities of {steps * B} drawn tokens are as they should be"
    if p_value <= ALPHA:
        detail = f"the probabilities of {steps * B} drawn tokens are not as they should be"
    return Check("problem", p_value > ALPHA, detail, steps * B, p_value=p_value)


def noise_of(problem: Problem, able: Capabilities) -> str:
    """The form of noise by which a sampler draws for a problem; greedy decoding needs none."""
    # Penalties change the distribution after the first of the two draws (docs/design/noise.md).
    return "token" if problem.penalties else able.noise or "token"


def penalized(problem: Problem, logits: Tensor, error: float = 0.0) -> tuple[Tensor, float]:
    """The problem's penalties on the logits [B, V] of its rows, and the error that these leave."""
    if not problem.penalties:
        return logits, error
    prompts, outputs = (
        reference.token_counts(tokens, problem.V).to(logits.device)
        for tokens in zip(*problem.row_histories(), strict=True)
    )
    logits = reference.penalized(
        logits,
        prompts,
        outputs,
        repetition=problem.repetition_penalty,
        presence=problem.presence_penalty,
        frequency=problem.frequency_penalty,
    )
    largest = max(problem.repetition_penalty, 1 / problem.repetition_penalty)
    # A division and two subtractions.
    return logits, error * largest + float(logits.abs().max()) * 2.0**-21


def truncation(
    problem: Problem, able: Capabilities, logits: Tensor, logits_error: float = 0.0
) -> Truncation | None:
    """What the problem's filters keep of logits [R, V] of its first rows, as a sampler orders them.

    None if it has neither filters nor penalties.

    able: of the sampler. logits_error: how far its logits may be from these.
    """
    if not (problem.filters or problem.penalties):
        return None
    filters = torch.tensor(problem.row_filters()[: len(logits)], dtype=torch.float64)
    k, p, min_p = filters.to(logits.device).unbind(1)
    return reference.truncate(
        logits,
        problem.temperature,
        top_k=k,
        top_p=p,
        min_p=min_p,
        order=able.filter_order,
        keeps_ties=able.ties == "kept",
        logits_error=logits_error,
    )
