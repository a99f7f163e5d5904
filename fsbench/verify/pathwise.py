"""Comparison of tokens with those of the reference.

These are the checks of samplers with noise of the contract, and the check of each launch that is
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
"""Largest number of steps of `check_on_problem`; a step on a CPU may take most of a second."""

_QUANTIZED = {"cuda": (4096, 32_768, (1, 16, 64, 256), 64), "cpu": (64, 300, (1, 17), 2)}
"""D, V, batches and steps of `check_quantized`, by device."""


OracleCase = tuple[int, Problem, Sequence[tuple[int, int]]]
"""(seed of the logits, problem, (seed, step) of each launch)."""


def pathwise_problems(subject: Subject, temperature: float) -> list[tuple[int, Problem]]:
    """Return the numbered problems of the subject's shapes that it supports; at least one."""
    problems = [
        (number, subject.setting.problem(B, V, temperature))
        for number, (B, V) in enumerate(subject.shapes)
    ]
    supported = [item for item in problems if not subject.provider.unsupported_reason(item[1])]
    if not supported:
        require_support(subject.provider, problems[-1][1])
    return supported


def check_oracle(subject: Subject) -> Check:
    """Check that each row's token is that of fsbench.reference for the same logits.

    The second temperature, if there is one, is checked for the last seed only.
    """
    setting, cases = subject.setting, []
    for T in dict.fromkeys((setting.temperature, setting.second or setting.temperature)):
        for number, problem in pathwise_problems(subject, T):
            counters = [(0, 0), (-(2**63) + number, 7), (0x0123456789ABCDEF, 2**32 - 1)]
            cases.append((number, problem, counters if setting.temperature == T else counters[2:]))
    return compare_with_oracle("oracle", subject.provider, cases)


def compare_with_oracle(name: str, provider: Provider, cases: Iterable[OracleCase]) -> Check:
    """Check that all tokens are the oracle's.

    Raises:
        VerificationFailed: a token is not; the message names the first one.
    """
    rows = ties = 0
    for number, problem, counters in cases:
        hidden, weight, logits = exact_head(problem, random_logits(problem, number))
        logits, error = penalized(problem, logits)
        kept = truncation(problem, provider.capabilities, logits, error)
        launch = provider.build(problem, weight)
        for seed, step in counters:
            tokens = launched_tokens(launch, hidden, seed, step)
            expected = _expect(problem, provider.capabilities, logits, seed, step, error, kept)
            require_accepted(expected, tokens, f"{problem} seed={seed} step={step} ")
            rows += problem.B
            ties += int((tokens != expected.tokens).sum())
    return Check(name, True, f"{rows} rows equal the oracle, {ties} by a rounding tie", rows)


def _expect(
    problem: Problem,
    caps: Capabilities,
    logits: Tensor,
    seed: int,
    step: int,
    error: float,
    kept: Truncation | None = None,
) -> reference.Expected:
    """Return the oracle's tokens; error: see `reference.expect`, logits_error."""
    return reference.expect(
        logits,
        torch.tensor([seed]),
        torch.tensor([step]),
        problem.temperature,
        noise_of(problem, caps),
        logits_error=error,
        truncation=kept,
    )


def require_accepted(expected: reference.Expected, tokens: Tensor, where: str = "") -> None:
    """Raise VerificationFailed for the first of tokens [B] that the oracle does not accept."""
    wrong = ~expected.accepts(tokens)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise VerificationFailed(
            f"{where}row {row}: expected token {int(expected.tokens[row])} (reference), "
            f"got {int(tokens[row])} (sampler)"
        )


def check_quantized(subject: Subject) -> Check:
    """Check tokens of a quantized head, on rows of a real matmul, against the oracle.

    The statistic is the number of tokens that differ from the sampler's tokens for the dequantized
    weight. Sums in another order may change a token at a rounding tie.
    """
    setting, provider = subject.setting, subject.provider
    draws = differing = 0
    D, V, batches, steps = _QUANTIZED[setting.device]
    for B in batches:
        problem = replace(setting.problem(B, V), D=D, logits="normal:3")
        require_support(provider, problem)
        hidden, weight = inputs.make_hidden(problem, 0), inputs.make_weight(problem, 0)
        logits, error = hidden.float() @ weight.float().T, reference.matmul_error(hidden, weight)
        launch = provider.build(problem, weight)
        plain = provider.build(replace(problem, weights=""), weight)
        for step in range(steps):
            expected = _expect(problem, subject.caps, logits, 5, step, error)
            tokens = launched_tokens(launch, hidden, 5, step).clone()
            require_accepted(expected, tokens, f"{problem} step={step} ")
            draws += B
            differing += int((tokens != launched_tokens(plain, hidden, 5, step)).sum())
    detail = (
        f"{draws} tokens are the oracle's, {differing} not those of the dequantized head in "
        f"{setting.dtype}"
    )
    return Check("quantized", True, detail, draws, float(differing))


def check_undefined_rows(subject: Subject) -> Check:
    """Check that rows with NaN, +inf or no finite logit return -1, and other rows do not change."""
    problem = subject.setting.problem(6, 300)
    require_support(subject.provider, problem)
    hidden, weight, _ = exact_head(problem, random_logits(problem, 0))
    weight[:, -1] = 1.0  # a nonzero factor in the spoiled rows only
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
    """Check a launch that is about to be timed, on its inputs.

    A sampler with noise of the contract, and greedy decoding, must return the oracle's tokens for
    logits recomputed in fp32, within the rounding of the matmul (and of stored logits, unless the
    sampler is fused). The tokens of other samplers must be kept by the filters; without filters,
    the probabilities of several draws must be those of correct draws (`surprisal_p_value`). See
    scores.scores_on_problem for log-probabilities.
    """
    if provider.kind is Kind.SCORE:
        return scores_on_problem(provider, problem, launch, hidden, weight)
    B, V = problem.B, problem.V
    tokens = launched_tokens(launch, hidden, 5, 9)
    if not bool(((tokens >= 0) & (tokens < V)).all()):
        return Check("problem", False, f"a token outside [0, {V}): {tokens.tolist()[:8]}")
    caps = provider.capabilities
    logits = hidden.float() @ weight.float().T
    error = reference.matmul_error(hidden, weight)
    if not caps.fused:
        error += float(logits.abs().max()) * torch.finfo(hidden.dtype).eps
    logits, error = penalized(problem, logits, error)
    greedy = provider.kind is Kind.GREEDY or problem.temperature == 0
    kept = None if greedy else truncation(problem, caps, logits, error)
    if greedy or caps.noise is not None:
        decoded = replace(problem, temperature=0.0) if greedy else problem
        expected = _expect(decoded, caps, logits, 5, 9, error, kept)
        accepted = expected.accepts(tokens)
        equal = int((tokens == expected.tokens).sum())
        detail = f"{equal} of {B} tokens equal the oracle's, {int(accepted.sum())} accepted"
        return Check("problem", bool(accepted.all()), detail, B)
    if kept is not None:
        cut = ~kept.possibly.gather(1, tokens.long()[:, None])[:, 0]
        passed = bool(caps.known_deviation) or not bool(cut.any())
        return Check("problem", passed, f"{int(cut.sum())} of {B} tokens are cut off", B)
    steps = min(math.ceil(64 / B), _PROBLEM_STEPS[problem.device])
    # Cloned: a launch may write the tokens of all steps to the same memory.
    drawn = [launched_tokens(launch, hidden, 5, 9 + step).clone() for step in range(steps)]
    logp = torch.log_softmax(logits / problem.temperature, dim=1)
    p_value = surprisal_p_value(
        torch.stack(drawn), logp, error / problem.temperature, caps.known_deviation
    )
    verdict = "right" if p_value > ALPHA else "wrong"
    detail = f"the probabilities of {steps * B} drawn tokens are {verdict}"
    return Check("problem", p_value > ALPHA, detail, steps * B, p_value=p_value)


def noise_of(problem: Problem, caps: Capabilities) -> str:
    """Return the form of noise of a sampler for a problem; greedy decoding ignores it."""
    # Penalties change the distribution after the first of the two draws (docs/design/noise.md).
    return "token" if problem.penalties else caps.noise or "token"


def penalized(problem: Problem, logits: Tensor, error: float = 0.0) -> tuple[Tensor, float]:
    """Apply the problem's penalties to logits [B, V]; return them with the resulting error."""
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
    # Rounding of a division and two subtractions.
    return logits, error * largest + float(logits.abs().max()) * 2.0**-21


def truncation(
    problem: Problem, caps: Capabilities, logits: Tensor, logits_error: float = 0.0
) -> Truncation | None:
    """Return the tokens that the problem's filters keep, in the sampler's order of filters.

    Args:
        logits: [R, V], of the first rows.
        caps: capabilities of the sampler.
        logits_error: bound on the difference between these logits and the sampler's.

    Returns:
        None if the problem has neither filters nor penalties.
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
        order=caps.filter_order,
        keeps_ties=caps.ties == "kept",
        logits_error=logits_error,
    )
