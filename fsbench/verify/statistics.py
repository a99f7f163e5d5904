"""Tests of counts against probabilities, with what each can detect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import (
    binom,
    chi2,
    chi2_contingency,
    ks_1samp,
    ncx2,
    norm,
    poisson,
    power_divergence,
    uniform,
)
from torch import Tensor

from fsbench.errors import VerificationFailed
from fsbench.verify.check import ALPHA, FAMILY, POWER, Check

Counted = tuple[str, Tensor, Tensor]
"""(whose draws these are, counts int64 [n], probabilities float64 [n])."""

_TILTS = [
    sign * t
    for t in (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    for sign in (1.0, -1.0)
]
"""Exponents that Chernoff's bound of surprisals is tried at."""

MIN_EXPECTED = 25
"""Draws that every bin of a G-test must expect; rarer bins are pooled, never dropped."""


@dataclass(frozen=True)
class Fit:
    """A G-test: the statistic, its bins and p-value, and distances from the expected counts.

    distance: total variation of the observed from the expected shares of the bins.
    bound: upper bound on that of the sampler's law, at confidence 1 - FAMILY (`variation_bound`);
        None if the test rejects it.
    """

    g: float
    bins: int
    draws: int
    p_value: float
    distance: float
    bound: float | None


def pooled(expected: np.ndarray) -> np.ndarray:
    """Return the first index of each bin; every bin holds MIN_EXPECTED of `expected` [n].

    The indices are for np.add.reduceat.

    Neighbors are pooled, in the order given; a short rest joins the last bin.
    """
    edges, gathered = [], float(MIN_EXPECTED)
    for position, value in enumerate(expected):
        if gathered >= MIN_EXPECTED:
            edges.append(position)
            gathered = 0.0
        gathered += value
    if gathered < MIN_EXPECTED and len(edges) > 1:
        edges.pop()
    return np.array(edges)


def g_test(counts: np.ndarray, p: np.ndarray) -> Fit:
    """G-test of counts [n] against probabilities p [n]; bins too rare are pooled with the next.

    A draw of what has probability 0 refutes p whatever else was drawn.

    Raises:
        VerificationFailed: fewer than two bins of MIN_EXPECTED draws each.
    """
    draws = int(counts.sum())
    edges = pooled(draws * p)
    if len(edges) < 2:
        raise VerificationFailed(f"expected two bins of {MIN_EXPECTED} draws; got {draws} draws")
    observed = np.add.reduceat(counts, edges).astype(float)
    expected = np.add.reduceat(p, edges)
    expected *= draws / expected.sum()  # a law from fp32 is off 1 by some 1e-8
    # Of counts as expected, rounding may leave a statistic below 0.
    g = max(0.0, float(power_divergence(observed, expected, lambda_="log-likelihood").statistic))
    p_value = 0.0 if counts[p == 0].any() else float(chi2.sf(g, len(edges) - 1))
    pearson = float(power_divergence(observed, expected).statistic)
    distance = 0.5 * float(np.abs(observed - expected).sum()) / draws
    bound = variation_bound(pearson, len(edges) - 1, draws) if p_value > ALPHA else None
    return Fit(g, len(edges), draws, p_value, distance, bound)


def variation_bound(pearson: float, df: int, draws: int) -> float:
    """Upper bound on the total variation between a sampler's law q and p, over the bins.

    Pearson's statistic is noncentral chi-squared, with noncentrality n sum (q - p)^2 / p, and the
    total variation is at most half the root of that sum (Cauchy-Schwarz). The largest noncentrality
    that would give so small a statistic with probability FAMILY bounds it. Asymptotic in n. A
    statistic below its median counts as the median: luck proves nothing.
    """
    seen = max(pearson, float(chi2.median(df)))
    high = 100.0 + 10.0 * (seen + df)
    largest = brentq(lambda x: ncx2.cdf(seen, df, x) - FAMILY, 1e-6, high)
    return 0.5 * math.sqrt(largest / draws)


def fit_check(
    name: str,
    counts: np.ndarray,
    p: np.ndarray,
    known_deviation: float = 0.0,
    what: str = "",
    tests: int = 1,
) -> Check:
    """The verdict of a G-test, one of `tests` of its check, and what it detects.

    A sampler with a known deviation need not pass the test, but its total variation distance must
    be within that deviation and what chance adds: with probability ALPHA at most, the distance of K
    bins exceeds sqrt((K ln 2 + ln 1/ALPHA) / 2n) (Bretagnolle-Huber-Carol).
    """
    fit = g_test(counts, p)
    alpha, p_value = ALPHA / tests, min(1.0, tests * fit.p_value)
    told = f"{what}G = {fit.g:.1f} over {fit.bins} bins"
    passed = p_value > ALPHA
    deviates = bool(known_deviation) and not passed
    if deviates:
        chance = math.sqrt((fit.bins * math.log(2) - math.log(alpha)) / (2 * fit.draws))
        passed = fit.distance <= known_deviation + chance
        told += (
            f"; total variation {fit.distance:.4f}, of which {known_deviation:g} is known and "
            f"{chance:.4f} may be chance"
        )
    found = f"{detectable_bias(fit.bins - 1, fit.draws, alpha):.2%} rms error of probabilities"
    return Check(name, passed, told, fit.draws, fit.g, p_value, fit.bound, found, deviates)


def goodness_of_fit(
    counts: np.ndarray, p: np.ndarray, known_deviation: float = 0.0, what: str = "", tests: int = 1
) -> Check:
    """fit_check of counts [V] of tokens with probabilities p [V], in order of probability."""
    order = np.argsort(-p, kind="stable")
    what = coverage(counts, p) + what
    return fit_check("fit", counts[order], p[order], known_deviation, what, tests)


def all_fit(name: str, draws: Sequence[Counted], known_deviation: float = 0.0) -> Check:
    """The worst of several goodness_of_fit, each at a part of the level (Bonferroni)."""
    tests = len(draws)
    checks = []
    for what, counts, p in draws:
        arrays = counts.cpu().numpy(), p.cpu().numpy()
        checks.append(goodness_of_fit(*arrays, known_deviation, f"{what}: ", tests))
    worst = min(checks, key=lambda check: (check.passed, check.p_value))
    return replace(
        worst,
        name=name,
        detail=worst.detail + (f", the least likely of {tests} laws" if tests > 1 else ""),
        draws=sum(check.draws for check in checks),
        deviates=worst.passed and any(check.deviates for check in checks),
    )


def coverage(counts: np.ndarray, p: np.ndarray) -> str:
    """`draws 64 of 9001 tokens: ` if fewer than half of those expected were drawn, else nothing."""
    drawn = int((counts > 0).sum())
    expected = -float(np.expm1(counts.sum() * np.log1p(-np.minimum(p, 1 - 1e-12))).sum())
    return f"draws {drawn} of {len(p)} tokens: " if drawn < expected / 2 else ""


@cache
def detectable_bias(df: int, draws: int, alpha: float = ALPHA) -> float:
    """Rms relative error of bin probabilities that a G-test at alpha finds with POWER.

    The statistic is noncentral chi-squared with noncentrality draws * bias^2.
    """
    critical = chi2.isf(alpha, df)
    needed = brentq(lambda x: ncx2.sf(critical, df, x) - POWER, 1e-3, 100 * (critical + df))
    return math.sqrt(needed / draws)


def binomial_p(hits: int, draws: int, low: float, high: float | None = None) -> float:
    """Two-sided p-value of hits under a probability in [low, high] (high: by default low)."""
    high = low if high is None else high
    one_sided = min(binom.cdf(hits, draws, low), binom.sf(hits - 1, draws, high))
    return min(1.0, 2 * float(one_sided))


@cache
def detectable_share(draws: int, p: float) -> str:
    """The loss, or else the excess, of events of probability p that a binomial test finds."""
    few = int(binom.ppf(ALPHA / 2, draws, p)) - 1  # the most hits that fail the test
    if few >= 0:
        loss = brentq(lambda x: binom.cdf(few, draws, p * (1 - x)) - POWER, 0, 1 - 1e-12)
        return f"loss of {loss:.2g} of it"
    many = int(binom.isf(ALPHA / 2, draws, p)) + 1
    factor = brentq(lambda x: binom.sf(many - 1, draws, p * x) - POWER, 1, 1 / p)
    return f"{factor:.2g} times too many"


def poisson_p(count: int, mean: float, high: float | None = None) -> float:
    """Two-sided p-value of a count under a Poisson mean in [mean, high]."""
    high = mean if high is None else high
    return min(1.0, 2 * float(min(poisson.cdf(count, mean), poisson.sf(count - 1, high))))


def detectable_factor(mean: float) -> float:
    """Relative excess or deficit of a Poisson count of this mean that is found with POWER."""
    return float((norm.isf(ALPHA / 2) + norm.isf(1 - POWER)) / math.sqrt(mean))


def largest_count_p(largest: int, cells: int, draws: int) -> float:
    """P-value of the largest of `cells` equally likely counts, by the union bound."""
    return min(1.0, cells * float(poisson.sf(largest - 1, draws / cells)))


@cache
def detectable_spike(cells: int, draws: int, tests: int) -> float:
    """Share of draws that must fall on one extra cell to be found by `tests` largest counts."""
    mean = draws / cells
    critical = int(poisson.isf(ALPHA / (tests * cells), mean)) + 1
    needed = brentq(lambda x: poisson.sf(critical - 1, x) - POWER, 1e-9, 100.0 + 10 * critical)
    return min(1.0, max(needed - mean, 1.0) / draws)


def agreement_p(agree: int, draws: int, p_equal: float, tries: int) -> float:
    """P-value of the most that any of `tries` pairs of streams of `draws` agree, by union bound."""
    return min(1.0, tries * float(binom.sf(agree - 1, draws, p_equal)))


def uniform_p(p_values: np.ndarray) -> float:
    """P-value of a Kolmogorov-Smirnov test that p-values are uniform."""
    return float(ks_1samp(p_values, uniform.cdf).pvalue)


def independence_p(table: np.ndarray) -> float:
    """P-value of a G-test that rows and columns of a table [k, k] of counts are independent.

    The margins are those of the table. Its pairs may overlap in a chain (x[i], x[i + lag]): then
    this is the likelihood-ratio test of a Markov chain's order, which has the same distribution.
    """
    if not (table.sum(1).all() and table.sum(0).all()):
        return 0.0  # a part of the vocabulary is never drawn; see joint.independence for the odds
    return float(chi2_contingency(table, correction=False, lambda_="log-likelihood").pvalue)


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
    for t in _TILTS:
        log_chance = steps * float(_log_mgf(t, logp, known_deviation).sum()) - t * surprisal
        log_bound = min(log_bound, log_chance + abs(t) * slack)
    return min(1.0, 2.0 * math.exp(log_bound))


def surprisal_p_values(tokens: Tensor, law: Tensor, known_deviation: float = 0.0) -> Tensor:
    """The same bound for each of m streams of tokens [m, n], all from law [V]: float64 [m]."""
    logp = law.double().log()
    surprisal = -logp[tokens].sum(1)
    log_bound = torch.zeros_like(surprisal)
    for t in _TILTS:
        log_mgf = float(_log_mgf(t, logp[None], known_deviation))
        log_bound = torch.minimum(log_bound, tokens.shape[1] * log_mgf - t * surprisal)
    return (2.0 * log_bound.exp()).clamp_max(1.0)


def _log_mgf(t: float, logp: Tensor, known_deviation: float) -> Tensor:
    """log E exp(t X) of the surprisal X of a draw from each of logp [B, V]: float64 [B]."""
    log_mgf = torch.logsumexp((1.0 - t) * logp, 1).double()
    if known_deviation:
        worst = (-t * logp).max(1).values.double()
        log_mgf = torch.logaddexp(log_mgf, worst + math.log(known_deviation))
    return log_mgf
