"""Token by token: what a sampler returns against what the reference says it must return.

Here are the checks of samplers with noise of the contract, and the one of every launch that is
about to be timed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fsbench import reference
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider
from fsbench.reference import Truncation
from fsbench.verify.check import ALPHA, Check, Setting
from fsbench.verify.drawing import exact_head, launched_tokens, random_logits, require_support

Shapes = Sequence[tuple[int, int]]

SHAPES: Shapes = ((1, 1), (3, 2), (17, 127), (1, 129), (16, 1000), (65, 5003))
"""(B, V) of the gate: tiny, odd, just above and below tile sizes, many rows."""

_PROBLEM_STEPS = {"cuda": 64, "cpu": 4}
"""Most steps of `check_on_problem`: a step on a CPU can take a good part of a second."""


def pathwise_problems(
    provider: Provider, setting: Setting, temperature: float, shapes: Shapes = SHAPES
) -> list[tuple[int, Problem]]:
    """The problems of these shapes that the sampler supports, numbered; at least one."""
    problems = [
        (number, setting.problem(B, V, temperature)) for number, (B, V) in enumerate(shapes)
    ]
    able = [item for item in problems if not provider.unsupported_reason(item[1])]
    if not able:
        require_support(provider, problems[-1][1])
    return able


def check_oracle(provider: Provider, setting: Setting, shapes: Shapes = SHAPES) -> Check:
    """The token is the one fsbench.reference gives for the same logits, row by row.

    At the second temperature, if there is one, for the last seed only.
    """
    rows = ties = 0
    problems = pathwise_problems(provider, setting, setting.temperature, shapes)
    if setting.second is not None:
        problems += pathwise_problems(provider, setting, setting.second, shapes)
    for number, problem in problems:
        hidden, weight, logits = exact_head(problem, random_logits(problem, number))
        launch = provider.build(problem, weight)
        seeds = ((0, 0), (7, -(2**63) + number), (2**32 - 1, 0x0123456789ABCDEF))
        for step, seed in seeds if problem.temperature == setting.temperature else seeds[2:]:
            tokens = launched_tokens(launch, hidden, seed, step)
            expected = reference.expect(
                logits,
                torch.tensor([seed]),
                torch.tensor([step]),
                problem.temperature,
                provider.capabilities.noise or "token",
            )
            wrong = first_wrong(expected, tokens)
            if wrong:
                where = (
                    f"B={problem.B} V={problem.V} T={problem.temperature:g} seed={seed} step={step}"
                )
                return Check("oracle", False, f"{where} {wrong}", rows)
            rows += problem.B
            ties += int((tokens != expected.tokens).sum())
    return Check("oracle", True, f"{rows} rows equal the oracle, {ties} by a rounding tie", rows)


def first_wrong(expected: reference.Expected, tokens: Tensor) -> str | None:
    """The first of tokens [B] that is not accepted, in words; None if all are."""
    wrong = ~expected.accepts(tokens)
    if not wrong.any():
        return None
    row = int(wrong.nonzero()[0])
    return f"row {row}: expected token {int(expected.tokens[row])}, got {int(tokens[row])}"


def check_undefined_rows(provider: Provider, setting: Setting) -> Check:
    """Rows with NaN, +inf or no finite logit give -1; their neighbours are not disturbed."""
    problem = setting.problem(6, 300)
    require_support(provider, problem)
    hidden, weight, _ = exact_head(problem, random_logits(problem, 0))
    weight[:, -1] = 1.0  # read by the spoiled rows only
    launch = provider.build(problem, weight)
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
    """
    B, V = problem.B, problem.V
    tokens = launched_tokens(launch, hidden, 5, 9)
    if not bool(((tokens >= 0) & (tokens < V)).all()):
        return Check("problem", False, f"a token outside [0, {V}): {tokens.tolist()[:8]}")
    able = provider.capabilities
    logits = hidden.float() @ weight.float().T
    error = reference.matmul_error(hidden, weight)
    if not able.fused:
        error += float(logits.abs().max()) * torch.finfo(hidden.dtype).eps
    if problem.penalties:
        logits = penalised(problem, logits)
        largest = max(problem.repetition_penalty, 1 / problem.repetition_penalty)
        error = error * largest + float(logits.abs().max()) * torch.finfo(torch.float32).eps
    greedy = provider.kind is Kind.GREEDY or problem.temperature == 0
    kept = None
    if (problem.filters or problem.penalties) and not greedy:
        kept = truncation(problem, able, logits, error)
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
    # Penalties change the law after the first of the two draws (docs/noise.md).
    return "token" if problem.penalties else able.noise or "token"


def penalised(problem: Problem, logits: Tensor) -> Tensor:
    """The problem's penalties on the logits [B, V] of its rows."""
    prompts, outputs = (
        reference.token_counts(tokens, problem.V).to(logits.device)
        for tokens in zip(*problem.row_histories(), strict=True)
    )
    return reference.penalised(
        logits,
        prompts,
        outputs,
        repetition=problem.repetition_penalty,
        presence=problem.presence_penalty,
        frequency=problem.frequency_penalty,
    )


def truncation(
    problem: Problem, able: Capabilities, logits: Tensor, logits_error: float = 0.0
) -> Truncation:
    """What the problem's filters keep of logits [R, V] of its first rows, as a sampler orders them.

    able: of the sampler. logits_error: how far its logits may be from these.
    """
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


def surprisal_p_value(
    tokens: Tensor, logp: Tensor, error: float = 0.0, known_deviation: float = 0.0
) -> float:
    """A bound on the chance that honest draws are as surprising, or as unsurprising, as these.

    The statistic is the sum of the surprisals -log p of the drawn tokens. Its moment generating
    function is known, E exp(t X) = sum over v of p_v^(1 - t), so Chernoff's bound holds for any
    law and any number of draws; few suffice to see tokens that have nothing to do with the law.

    Args:
        tokens: [steps, B] ids in [0, V).
        logp: [B, V] log-probabilities.
        error: bound on the error of each logit divided by T; it moves a surprisal by twice that.
        known_deviation: total variation distance from logp that is allowed (see Capabilities):
            at worst that much probability is on the token where exp(t X) is largest.
    """
    steps, B = tokens.shape
    surprisal = -float(logp.gather(1, tokens.long().T).double().sum())
    slack = 2.0 * error * steps * B
    log_bound = 0.0
    for t in (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        for sign in (1.0, -1.0):
            log_mgf = torch.logsumexp((1.0 - sign * t) * logp, 1).double()
            if known_deviation:
                worst = (-sign * t * logp).max(1).values.double()
                log_mgf = torch.logaddexp(log_mgf, worst + math.log(known_deviation))
            log_chance = steps * float(log_mgf.sum()) - t * (sign * surprisal - slack)
            log_bound = min(log_bound, log_chance)
    return min(1.0, 2.0 * math.exp(log_bound))
