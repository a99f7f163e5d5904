"""Tests of counts against probabilities, and the errors that they detect."""

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

Histogram = tuple[str, Tensor, Tensor]
"""(label, counts int64 [n], expected probabilities float64 [n])."""

_TILTS = [
    sign * t
    for t in (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    for sign in (1.0, -1.0)
]
"""Exponents at which Chernoff's bound of surprisals is evaluated."""

MIN_EXPECTED = 25
"""Least expected number of draws in a bin of a G-test; rarer bins are pooled, never dropped."""


@dataclass(frozen=True)
class Fit:
    """Result of a G-test.

    g: the statistic.
    distance: total variation between the observed and the expected shares of the bins.
    bound: upper bound on the total variation between the sampler's distribution and the expected
        one, at confidence 1 - FAMILY (`variation_bound`); None if the test rejects.
    """

    g: float
    bins: int
    draws: int
    p_value: float
    distance: float
    bound: float | None


def pooled(expected: np.ndarray) -> np.ndarray:
    """Pool neighbors of `expected` [n] into bins of at least MIN_EXPECTED.

    Returns the first index of each bin, for np.add.reduceat. A smaller remainder joins the last
    bin.
    """
    edges, pooled_sum = [], float(MIN_EXPECTED)
    for position, value in enumerate(expected):
        if pooled_sum >= MIN_EXPECTED:
            edges.append(position)
            pooled_sum = 0.0
        pooled_sum += value
    if pooled_sum < MIN_EXPECTED and len(edges) > 1:
        edges.pop()
    return np.array(edges)


def g_test(counts: np.ndarray, p: np.ndarray) -> Fit:
    """Run a G-test of counts [n] against probabilities p [n]; rare bins are pooled.

    A draw of probability 0 has the p-value 0.

    Raises:
        VerificationFailed: fewer than two bins of MIN_EXPECTED draws each.
    """
    draws = int(counts.sum())
    edges = pooled(draws * p)
    if len(edges) < 2:
        raise VerificationFailed(f"expected two bins of {MIN_EXPECTED} draws; got {draws} draws")
    observed = np.add.reduceat(counts, edges).astype(float)
    expected = np.add.reduceat(p, edges)
    expected *= draws / expected.sum()  # probabilities from fp32 sum to 1 within about 1e-8
    # Rounding may make the statistic of counts that equal their expectation negative.
    g = max(0.0, float(power_divergence(observed, expected, lambda_="log-likelihood").statistic))
    p_value = 0.0 if counts[p == 0].any() else float(chi2.sf(g, len(edges) - 1))
    pearson = float(power_divergence(observed, expected).statistic)
    distance = 0.5 * float(np.abs(observed - expected).sum()) / draws
    bound = variation_bound(pearson, len(edges) - 1, draws) if p_value > ALPHA else None
    return Fit(g, len(edges), draws, p_value, distance, bound)


def variation_bound(pearson: float, df: int, draws: int) -> float:
    """Return an upper bound on the total variation between a sampler's distribution q and p.

    Both are distributions over the bins. Pearson's statistic is noncentral chi-squared, with
    noncentrality n sum (q - p)^2 / p, and the total variation is at most half the root of that sum
    (Cauchy-Schwarz). The bound is from the largest noncentrality that gives a statistic this small
    with probability FAMILY. It is asymptotic in n. A statistic below its median counts as the
    median, so that a fit that is good by chance does not lower the bound.
    """
    statistic = max(pearson, float(chi2.median(df)))
    high = 100.0 + 10.0 * (statistic + df)
    largest = brentq(lambda x: ncx2.cdf(statistic, df, x) - FAMILY, 1e-6, high)
    return 0.5 * math.sqrt(largest / draws)


def fit_check(
    name: str,
    counts: np.ndarray,
    p: np.ndarray,
    known_deviation: float = 0.0,
    label: str = "",
    tests: int = 1,
) -> Check:
    """Run a G-test and return its verdict and the error that it detects.

    A sampler with a known deviation may fail the test, but its total variation distance must be
    within that deviation and a margin for chance: with probability ALPHA at most, the distance of
    K bins exceeds sqrt((K ln 2 + ln 1/ALPHA) / 2n) (Bretagnolle-Huber-Carol).

    Args:
        counts, p: [n], draws and their expected probabilities.
        label: beginning of the detail.
        tests: number of tests in the check that this one is part of.
    """
    fit = g_test(counts, p)
    alpha, p_value = ALPHA / tests, min(1.0, tests * fit.p_value)
    detail = f"{label}G = {fit.g:.1f} over {fit.bins} bins"
    passed = p_value > ALPHA
    deviates = bool(known_deviation) and not passed
    if deviates:
        margin = math.sqrt((fit.bins * math.log(2) - math.log(alpha)) / (2 * fit.draws))
        passed = fit.distance <= known_deviation + margin
        detail += (
            f"; total variation {fit.distance:.4f}, of which {known_deviation:g} is known and "
            f"{margin:.4f} may be chance"
        )
    detects = f"{detectable_bias(fit.bins - 1, fit.draws, alpha):.2%} rms error of probabilities"
    return Check(name, passed, detail, fit.draws, fit.g, p_value, fit.bound, detects, deviates)


def goodness_of_fit(
    counts: np.ndarray, p: np.ndarray, known_deviation: float = 0.0, label: str = "", tests: int = 1
) -> Check:
    """Run `fit_check` on counts [V] and probabilities p [V] of tokens, in order of probability."""
    order = np.argsort(-p, kind="stable")
    label = coverage(counts, p) + label
    return fit_check("fit", counts[order], p[order], known_deviation, label, tests)


def all_fit(name: str, histograms: Sequence[Histogram], known_deviation: float = 0.0) -> Check:
    """Return the worst of several goodness_of_fit, each at a part of the level (Bonferroni)."""
    tests = len(histograms)
    checks = []
    for label, counts, p in histograms:
        arrays = counts.cpu().numpy(), p.cpu().numpy()
        checks.append(goodness_of_fit(*arrays, known_deviation, f"{label}: ", tests))
    worst = min(checks, key=lambda check: (check.passed, check.p_value))
    return replace(
        worst,
        name=name,
        detail=worst.detail + (f", the least likely of {tests} tests" if tests > 1 else ""),
        draws=sum(check.draws for check in checks),
        deviates=worst.passed and any(check.deviates for check in checks),
    )


def coverage(counts: np.ndarray, p: np.ndarray) -> str:
    """Return `draws 64 of 9001 tokens: ` if fewer than half of the expected tokens were drawn."""
    drawn = int((counts > 0).sum())
    expected = -float(np.expm1(counts.sum() * np.log1p(-np.minimum(p, 1 - 1e-12))).sum())
    return f"draws {drawn} of {len(p)} tokens: " if drawn < expected / 2 else ""


@cache
def detectable_bias(df: int, draws: int, alpha: float = ALPHA) -> float:
    """Return the rms relative error of bin probabilities that a G-test finds with POWER.

    The statistic is noncentral chi-squared with noncentrality draws * bias^2.
    """
    critical = chi2.isf(alpha, df)
    needed = brentq(lambda x: ncx2.sf(critical, df, x) - POWER, 1e-3, 100 * (critical + df))
    return math.sqrt(needed / draws)


def binomial_p(hits: int, draws: int, low: float, high: float | None = None) -> float:
    """Return the two-sided p-value of hits under a probability in [low, high].

    high: by default low.
    """
    high = low if high is None else high
    one_sided = min(binom.cdf(hits, draws, low), binom.sf(hits - 1, draws, high))
    return min(1.0, 2 * float(one_sided))


@cache
def detectable_share(draws: int, p: float) -> str:
    """Return the loss of events of probability p that a binomial test finds with POWER.

    If the test cannot find the loss of all events, return the factor of an excess.
    """
    low = int(binom.ppf(ALPHA / 2, draws, p)) - 1  # the most hits that fail the test
    if low >= 0:
        loss = brentq(lambda x: binom.cdf(low, draws, p * (1 - x)) - POWER, 0, 1 - 1e-12)
        return f"loss of {loss:.2g} of it"
    high = int(binom.isf(ALPHA / 2, draws, p)) + 1
    factor = brentq(lambda x: binom.sf(high - 1, draws, p * x) - POWER, 1, 1 / p)
    return f"{factor:.2g} times too many"


def poisson_p(count: int, mean: float, high: float | None = None) -> float:
    """Return the two-sided p-value of a count under a Poisson mean in [mean, high].

    high: by default mean.
    """
    high = mean if high is None else high
    return min(1.0, 2 * float(min(poisson.cdf(count, mean), poisson.sf(count - 1, high))))


def detectable_factor(mean: float) -> float:
    """Return the relative excess or deficit of a Poisson count that is found with POWER."""
    return float((norm.isf(ALPHA / 2) + norm.isf(1 - POWER)) / math.sqrt(mean))


def largest_count_p(largest: int, cells: int, draws: int) -> float:
    """Return the p-value of the largest of `cells` equally likely counts, by the union bound."""
    return min(1.0, cells * float(poisson.sf(largest - 1, draws / cells)))


@cache
def detectable_spike(cells: int, draws: int, tests: int) -> float:
    """Return the share of draws that must fall on one cell in excess for `largest_count_p`."""
    mean = draws / cells
    critical = int(poisson.isf(ALPHA / (tests * cells), mean)) + 1
    needed = brentq(lambda x: poisson.sf(critical - 1, x) - POWER, 1e-9, 100.0 + 10 * critical)
    return min(1.0, max(needed - mean, 1.0) / draws)


def agreement_p(agree: int, draws: int, p_equal: float, pairs: int) -> float:
    """Return the p-value of the largest number of draws in which one of `pairs` pairs agrees.

    A pair is two streams of `draws` draws that agree with probability p_equal each (union bound).
    """
    return min(1.0, pairs * float(binom.sf(agree - 1, draws, p_equal)))


def uniform_p(p_values: np.ndarray) -> float:
    """Return the p-value of a Kolmogorov-Smirnov test that p-values are uniform."""
    return float(ks_1samp(p_values, uniform.cdf).pvalue)


def independence_p(table: np.ndarray) -> float:
    """Return the p-value of a G-test that rows and columns of counts [k, k] are independent.

    The pairs that are counted may overlap in a chain (x[i], x[i + lag]): then this is the
    likelihood-ratio test of a Markov chain's order, which has the same distribution.
    """
    if not (table.sum(1).all() and table.sum(0).all()):
        return 0.0  # a part of the vocabulary is never drawn (see joint.independence)
    return float(chi2_contingency(table, correction=False, lambda_="log-likelihood").pvalue)


def surprisal_p_value(
    tokens: Tensor, logp: Tensor, error: float = 0.0, known_deviation: float = 0.0
) -> float:
    """Return an upper bound on the p-value of the sum of surprisals, two-sided.

    The surprisal of a token is -log p. The moment generating function is E exp(t X) =
    sum over v of p_v^(1 - t), so Chernoff's bound holds for any distribution and any number of
    draws. A few draws are enough to reject tokens that are unrelated to the distribution.

    Args:
        tokens: [steps, B] ids in [0, V).
        logp: [B, V] log-probabilities.
        error: bound on the error of each logit divided by T; a surprisal may be off by twice that.
        known_deviation: allowed total variation distance from logp (see Capabilities). In the
            worst case that probability is on the token with the largest exp(t X).
    """
    steps, B = tokens.shape
    surprisal = -float(logp.gather(1, tokens.long().T).double().sum())
    slack = 2.0 * error * steps * B
    log_bound = 0.0
    for t in _TILTS:
        log_chance = steps * float(_log_mgf(t, logp, known_deviation).sum()) - t * surprisal
        log_bound = min(log_bound, log_chance + abs(t) * slack)
    return min(1.0, 2.0 * math.exp(log_bound))


def surprisal_p_values(tokens: Tensor, p: Tensor, known_deviation: float = 0.0) -> Tensor:
    """Return the bound of `surprisal_p_value` for each of m streams: float64 [m].

    Args:
        tokens: [m, n], m streams of n draws from p.
        p: [V], probabilities.
    """
    logp = p.double().log()
    surprisal = -logp[tokens].sum(1)
    log_bound = torch.zeros_like(surprisal)
    for t in _TILTS:
        log_mgf = float(_log_mgf(t, logp[None], known_deviation))
        log_bound = torch.minimum(log_bound, tokens.shape[1] * log_mgf - t * surprisal)
    return (2.0 * log_bound.exp()).clamp_max(1.0)


def _log_mgf(t: float, logp: Tensor, known_deviation: float) -> Tensor:
    """Return log E exp(t X) of the surprisal X of a draw from each row of logp [B, V]: [B]."""
    log_mgf = torch.logsumexp((1.0 - t) * logp, 1).double()
    if known_deviation:
        worst = (-t * logp).max(1).values.double()
        log_mgf = torch.logaddexp(log_mgf, worst + math.log(known_deviation))
    return log_mgf
