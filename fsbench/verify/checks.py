"""The checks of one sampler, as plain functions: used by pytest, `fsbench verify` and `run`'s gate.

Each takes a provider and returns a `Check`. Inputs are made so that every logit is one stored
number (fsbench.inputs.head_with_logits): then a sampler's logits are known exactly, and what is
tested is its noise, its selection and its handling of partial tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2
from torch import Tensor

from fsbench import inputs, reference
from fsbench.errors import UnsupportedProblem, VerificationFailed
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider

ALPHA = 1e-6
"""Chance that a test rejects an honest sampler. Seeds are fixed, so a verdict never flickers."""

MIN_EXPECTED = 25
"""Draws that every bin of a goodness-of-fit test must expect; rarer tokens are pooled."""

_SHAPES = ((1, 1), (3, 2), (17, 127), (1, 129), (16, 1000), (65, 5003))
"""(B, V) of the pathwise checks: tiny, odd, just above and below tile sizes, many rows."""


_PROBLEM_STEPS = {"cuda": 64, "cpu": 4}
"""Most steps of `check_on_problem`: a step on a CPU can take a good part of a second."""


@dataclass(frozen=True)
class Check:
    """One verdict. `detail` says in words what was seen; p_value and draws where they apply.

    detects: root-mean-square relative error of the token probabilities that the check finds with
        probability 0.9 (None for checks that are not statistical).
    """

    name: str
    passed: bool
    detail: str
    draws: int = 0
    p_value: float | None = None
    detects: float | None = None


@dataclass(frozen=True)
class Setting:
    """Where and at what temperature a provider is checked."""

    device: str
    dtype: str
    temperature: float = 1.0

    def problem(self, B: int, V: int, temperature: float | None = None) -> Problem:
        """The Problem of a check; D = 64 leaves room for 64 different rows of logits."""
        T = self.temperature if temperature is None else temperature
        return Problem(B, 64, V, self.dtype, T, self.device)


def _tokens(launch: Launch, hidden: Tensor, seed: int, step: int) -> Tensor:
    """The tokens of one step; raises VerificationFailed unless they are B integers."""
    B, device = hidden.shape[0], hidden.device
    tokens = launch(
        hidden,
        torch.tensor([seed], dtype=torch.int64, device=device),
        torch.tensor([step], dtype=torch.int64, device=device),
    )
    return _checked_form(tokens, B)


def _checked_form(tokens: Tensor, B: int) -> Tensor:
    if tuple(tokens.shape) != (B,) or tokens.dtype not in (torch.int32, torch.int64):
        raise VerificationFailed(
            f"tokens: expected int32 or int64 of shape {(B,)}; got {tokens.dtype} of shape "
            f"{tuple(tokens.shape)}"
        )
    return tokens


def _random_logits(problem: Problem, seed: int) -> Tensor:
    """Normal logits for as many different rows as fit, [<= D, V] fp32 on the problem's device.

    In every fourth row the last token dominates and in every fourth the first: a sampler that
    cannot return a token at the edge of the vocabulary is found at once.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(min(problem.B, problem.D), problem.V, generator=generator)
    logits[1::4, -1] = 10.0
    logits[2::4, 0] = 10.0
    return logits.to(problem.device)


def _exact_head(problem: Problem, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden [B, D], weight [V, D], logits [B, V] as stored), the given rows repeated up to B."""
    dtype = inputs.TORCH_DTYPES[problem.dtype]
    hidden, weight = inputs.head_with_logits(logits, dtype, problem.D)
    row = torch.arange(problem.B, device=problem.device) % len(logits)
    return hidden[row].contiguous(), weight, weight[:, row].T.float()


def _require_support(provider: Provider, problem: Problem) -> None:
    reason = provider.unsupported_reason(problem)
    if reason:
        raise UnsupportedProblem(f"cannot be checked at {problem}: {reason}")


def _pathwise_problems(
    provider: Provider, setting: Setting, temperature: float
) -> list[tuple[int, Problem]]:
    """The problems of _SHAPES that the sampler supports, numbered; at least one."""
    problems = [
        (number, setting.problem(B, V, temperature)) for number, (B, V) in enumerate(_SHAPES)
    ]
    able = [item for item in problems if not provider.unsupported_reason(item[1])]
    if not able:
        _require_support(provider, problems[-1][1])
    return able


def check_oracle(provider: Provider, setting: Setting) -> Check:
    """The token is the one fsbench.reference gives for the same logits, row by row."""
    rows = ties = 0
    for number, problem in _pathwise_problems(provider, setting, setting.temperature):
        hidden, weight, logits = _exact_head(problem, _random_logits(problem, number))
        launch = provider.build(problem, weight)
        for step, seed in ((0, 0), (7, -(2**63) + number), (2**32 - 1, 0x0123456789ABCDEF)):
            tokens = _tokens(launch, hidden, seed, step)
            expected = reference.expect(
                logits,
                torch.tensor([seed]),
                torch.tensor([step]),
                problem.temperature,
                provider.capabilities.noise or "token",
            )
            wrong = ~expected.accepts(tokens)
            if wrong.any():
                row = int(wrong.nonzero()[0])
                return Check(
                    "oracle",
                    False,
                    f"B={problem.B} V={problem.V} seed={seed} step={step} row {row}: expected "
                    f"token {int(expected.tokens[row])}, got {int(tokens[row])}",
                    rows,
                )
            rows += problem.B
            ties += int((tokens != expected.tokens).sum())
    return Check("oracle", True, f"{rows} rows equal the oracle, {ties} by a rounding tie", rows)


def check_greedy(provider: Provider, setting: Setting) -> Check:
    """At T = 0 the token's logit is the row's maximum, also where all logits are negative."""
    rows = 0
    for number, problem in _pathwise_problems(provider, setting, 0.0):
        B, V = problem.B, problem.V
        hidden, weight, _ = _exact_head(problem, _random_logits(problem, number))
        # All-negative logits expose padding filled with zero.
        for shift in (0.0, -40.0):
            head = weight + torch.tensor(shift, dtype=weight.dtype, device=weight.device)
            values = hidden.float() @ head.float().T
            tokens = _tokens(provider.build(problem, head), hidden, 1, number)
            inside = (tokens >= 0) & (tokens < V)
            picked = values.gather(1, tokens.long().clamp(0, V - 1)[:, None])[:, 0]
            wrong = ~inside | (picked != values.max(1).values)
            if wrong.any():
                row = int(wrong.nonzero()[0])
                return Check(
                    "greedy",
                    False,
                    f"B={B} V={V} row {row}: expected {int(values[row].argmax())}, "
                    f"got {int(tokens[row])}",
                    rows,
                )
            rows += B
    return Check("greedy", True, f"{rows} rows have the maximum logit", rows)


def check_undefined_rows(provider: Provider, setting: Setting) -> Check:
    """Rows with NaN, +inf or no finite logit give -1; their neighbours are not disturbed."""
    problem = setting.problem(6, 300)
    _require_support(provider, problem)
    hidden, weight, _ = _exact_head(problem, _random_logits(problem, 0))
    weight[:, -1] = 1.0  # read by the spoiled rows only
    launch = provider.build(problem, weight)
    clean = _tokens(launch, hidden, 3, 1)
    spoiled = hidden.clone()
    spoiled[1] = float("nan")
    spoiled[3:5] = 0.0
    spoiled[3, -1] = -float("inf")
    spoiled[4, -1] = float("inf")
    tokens = _tokens(launch, spoiled, 3, 1)
    expected = clean.clone()
    expected[[1, 3, 4]] = -1
    passed = bool((tokens == expected).all()) and bool((clean >= 0).all())
    detail = f"rows 1 (NaN), 3 (all -inf), 4 (+inf) expect -1: got {tokens.tolist()}"
    return Check("undefined rows", passed, detail, problem.B)


def check_fit(provider: Provider, setting: Setting, draws: int) -> Check:
    """G-tests of the tokens of one row of logits against softmax(logits / T).

    Tokens are binned in order of probability, each bin expecting at least MIN_EXPECTED draws; the
    rarest are pooled, never dropped, and an id outside [0, V) fails outright. The logits scale
    with T, so the law is much the same at every T; the first and the last token are likely ones.
    A shorter test comes first, of the same law with all logits negative: padding of the
    vocabulary that is taken for a logit of zero shows there.
    """
    V, B = 500, 256
    T = setting.temperature or 1.0
    problem = setting.problem(B, V, T)
    _require_support(provider, problem)
    row = 2.0 * torch.randn(1, V, generator=torch.Generator().manual_seed(5))
    row[0, [0, -1]] = 4.0
    # Capped, because fp16 ends at 65504.
    rows = min(T, 1e3) * torch.cat([row - 20.0, row]).to(problem.device)
    hidden, weight, logits = _exact_head(problem, rows)
    launch = provider.build(problem, weight)
    seed = torch.tensor([11], dtype=torch.int64, device=problem.device)
    step = torch.zeros(1, dtype=torch.int64, device=problem.device)
    torch.manual_seed(11)
    for number, (what, wanted) in enumerate((("all logits negative: ", 2**13), ("", draws))):
        same = hidden[number].expand(B, -1).contiguous()
        counts = torch.zeros(V, dtype=torch.int64, device=problem.device)
        for _ in range(math.ceil(min(wanted, draws) / B)):
            tokens = _checked_form(launch(same, seed, step), B).long()
            step += 1
            outside = (tokens < 0) | (tokens >= V)
            if outside.any():
                first = int(tokens[outside][0])
                return Check("fit", False, f"{what}drew token {first} outside [0, {V})", B)
            counts += torch.bincount(tokens, minlength=V)
        p = torch.softmax(logits[number].double() / T, 0).cpu().numpy()
        check = goodness_of_fit(counts.cpu().numpy(), p, provider.capabilities.known_deviation)
        if not check.passed:
            return replace(check, detail=what + check.detail)
    return check


def goodness_of_fit(counts: np.ndarray, p: np.ndarray, known_deviation: float = 0.0) -> Check:
    """G-test of counts [V] against probabilities p [V], pooled (see check_fit).

    A sampler with a known deviation need not pass it, but the total variation distance of counts
    from p must be within that deviation and what chance adds: with probability ALPHA at most, the
    distance of K bins exceeds sqrt((K ln 2 + ln 1/ALPHA) / 2n) (Bretagnolle-Huber-Carol).
    """
    n = int(counts.sum())
    order = np.argsort(-p, kind="stable")
    # Close a bin each time the expected draws pass MIN_EXPECTED; the last, short one joins its
    # neighbour.
    edges, gathered = [], 0.0
    for position, token in enumerate(order):
        if gathered == 0.0:
            edges.append(position)
        gathered += n * p[token]
        if gathered >= MIN_EXPECTED:
            gathered = 0.0
    if gathered > 0.0 and len(edges) > 1:
        edges.pop()
    if len(edges) < 2:
        raise VerificationFailed(f"fit: expected two tokens of {MIN_EXPECTED} draws each; got {n}")
    observed = np.add.reduceat(counts[order], edges).astype(float)
    expected = n * np.add.reduceat(p[order], edges)
    hit = observed > 0
    g = 2.0 * float(np.sum(observed[hit] * np.log(observed[hit] / expected[hit])))
    df = len(edges) - 1
    p_value = float(chi2.sf(g, df))
    if known_deviation and p_value <= ALPHA:
        distance = 0.5 * float(np.abs(observed - expected).sum()) / n
        chance = math.sqrt((len(edges) * math.log(2) - math.log(ALPHA)) / (2 * n))
        return Check(
            "fit",
            distance <= known_deviation + chance,
            f"not exact (G = {g:.1f} over {len(edges)} bins); total variation {distance:.4f}, "
            f"of which {known_deviation:g} is known and {chance:.4f} may be chance",
            n,
            p_value,
        )
    return Check(
        "fit",
        p_value > ALPHA,
        f"G = {g:.1f} over {len(edges)} bins",
        n,
        p_value,
        detectable_bias(df, n),
    )


def detectable_bias(df: int, draws: int, power: float = 0.9) -> float:
    """Rms relative error of bin probabilities that a G-test at ALPHA finds with this power.

    The statistic is noncentral chi-squared with noncentrality draws * bias^2.
    """
    critical = chi2.isf(ALPHA, df)
    needed = brentq(lambda x: ncx2.sf(critical, df, x) - power, 1e-3, 100 * (critical + df))
    return math.sqrt(needed / draws)


def check_on_problem(
    provider: Provider, problem: Problem, launch: Launch, hidden: Tensor, weight: Tensor
) -> Check:
    """On the inputs and with the launch that are about to be timed: ids in range, tokens right.

    A sampler with noise of the contract must return the oracle's token for logits recomputed in
    fp32, within the rounding of the matmul (and of stored logits, unless it is fused); so must
    greedy decoding.
    Exact samplers with noise of their own draw a few times, and the tokens' probabilities must
    be such as honest draws have (`surprisal_p_value`).
    """
    B, V = problem.B, problem.V
    tokens = _tokens(launch, hidden, 5, 9)
    if not bool(((tokens >= 0) & (tokens < V)).all()):
        return Check("problem", False, f"a token outside [0, {V}): {tokens.tolist()[:8]}")
    able = provider.capabilities
    logits = hidden.float() @ weight.float().T
    error = reference.matmul_error(hidden, weight)
    if not able.fused:
        error += float(logits.abs().max()) * torch.finfo(hidden.dtype).eps
    greedy = provider.kind is Kind.GREEDY or problem.temperature == 0
    if greedy or able.noise is not None:
        expected = reference.expect(
            logits,
            torch.tensor([5]),
            torch.tensor([9]),
            0.0 if greedy else problem.temperature,
            able.noise or "token",
            logits_error=error,
        )
        accepted = expected.accepts(tokens)
        equal = int((tokens == expected.tokens).sum())
        detail = f"{equal} of {B} tokens equal the oracle's, {int(accepted.sum())} accepted"
        return Check("problem", bool(accepted.all()), detail, B)
    if provider.kind is not Kind.EXACT:
        return Check("problem", True, "ids in range", B)
    steps = min(math.ceil(64 / B), _PROBLEM_STEPS[problem.device])
    # Cloned: a launch may write every step's tokens to the same place.
    drawn = [_tokens(launch, hidden, 5, 9 + step).clone() for step in range(steps)]
    logp = torch.log_softmax(logits / problem.temperature, dim=1)
    p_value = surprisal_p_value(
        torch.stack(drawn), logp, error / problem.temperature, able.known_deviation
    )
    detail = f"the probabilities of {steps * B} drawn tokens are as they should be"
    if p_value <= ALPHA:
        detail = f"the probabilities of {steps * B} drawn tokens are not as they should be"
    return Check("problem", p_value > ALPHA, detail, steps * B, p_value)


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
