"""Tests of the distribution of one row against softmax(logits / T), out to the far tail."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

from fsbench.provider import Capabilities
from fsbench.verify.check import ALPHA, Check
from fsbench.verify.statistics import (
    all_fit,
    binomial_p,
    detectable_bias,
    detectable_share,
    fit_check,
    goodness_of_fit,
    uniform_p,
)
from fsbench.verify.subject import Subject, block_classes

_SINGLE_BINS = 128  # likeliest tokens of the large problem, which are not pooled
_PARTS = 8  # parts of the vocabulary in position_bins


def check_fit(subject: Subject) -> Check:
    """Run a G-test of the tokens of one row; the rarest tokens are pooled, never dropped.

    Two shorter tests come first, of rows whose logits are all large, negative or positive. They
    detect padding of the vocabulary that counts as a logit of zero, and scores of too few bits.
    """
    tokens, draws, deviation = subject.tokens, subject.small, subject.caps.known_deviation
    draws.seed(12)
    for sign in ("negative", "positive"):
        counts = draws.counts(sign, min(2**13, tokens.numel())).numpy()
        p = draws.probabilities(sign).cpu().numpy()
        check = goodness_of_fit(counts, p, deviation, f"all logits {sign}: ", tests=2)
        if not check.passed:
            return check
    counts = torch.bincount(tokens.flatten(), minlength=draws.problem.V).cpu().numpy()
    return goodness_of_fit(counts, draws.probabilities("row").cpu().numpy(), deviation)


def check_blocks(subject: Subject) -> Check:
    """Run G-tests of the ends of blocks and of the vocabulary (`block_classes`)."""
    draws, n = subject.small, subject.effort.block_draws
    histograms = []
    for name, classes in block_classes(draws.problem.V).items():
        draws.seed(19)
        counts = draws.counts(name, n if name == "blocks" else min(n, 2**16))
        histograms.append((name, *_binned(counts, draws.probabilities(name).cpu(), classes)))
    return all_fit("blocks", histograms, subject.caps.known_deviation)


def check_fit_of_seeds(subject: Subject) -> Check:
    """Run the G-test of `fit` for many seeds; test the smallest p-value and their uniformity.

    Many p-values near 0 show a bias that is too small for one seed to show; many near 1 show noise
    that is too even.
    """
    draws, seeds = subject.small, subject.effort.seeds
    p = draws.probabilities("row").cpu().numpy()
    all_counts = []
    for seed in range(seeds):
        draws.seed(1000 + seed)
        all_counts.append(draws.counts("row", subject.effort.seed_draws).numpy())
    counts = np.sum(all_counts, axis=0)
    n = int(counts.sum())
    if deviation := subject.caps.known_deviation:
        return replace(goodness_of_fit(counts, p, deviation), name="fit of seeds")
    p_values = np.array([goodness_of_fit(each, p).p_value for each in all_counts], dtype=float)
    smallest, ks = float(p_values.min()), uniform_p(p_values)
    p_value = min(1.0, 2 * min(seeds * smallest, ks))
    bias = detectable_bias(len(p) - 1, n // seeds, ALPHA / (2 * seeds))
    return Check(
        "fit of seeds",
        p_value > ALPHA,
        f"{seeds} seeds: smallest p {smallest:.2g}, Kolmogorov-Smirnov of all {ks:.2g}",
        n,
        smallest,
        p_value,
        detects=f"{bias:.2%} rms error of probabilities, in any one seed",
    )


def cost(caps: Capabilities) -> str:
    """Return the cost class of a draw: group noise, token noise, stored logits, or chunks.

    A fused sampler without noise of the contract loops over chunks of the vocabulary in many small
    launches.
    """
    return caps.noise or ("chunks" if caps.fused else "stored")


def check_variation(subject: Subject) -> Check:
    """Run a G-test of a large vocabulary with Zipf's distribution; bound the total variation.

    The likeliest tokens have bins to themselves. The others are binned by decade of probability,
    part of the vocabulary, and token id modulo 32, so that an error in a tile, a lane or a decade
    is concentrated in few bins. If a sampler with a bounded noise fails, its claim is tested
    (`_fit_above`).
    """
    caps, draws = subject.caps, subject.large
    p = draws.probabilities("zipf").cpu()
    draws.seed(13)
    counts = draws.counts("zipf", subject.effort.variation_draws[cost(caps)])
    label = f"V={draws.problem.V}: "
    bins = position_bins(p)
    check = fit_check("variation", *_arrays(counts, p, bins), caps.known_deviation, label)
    if not check.passed and caps.exact_to_gap is not None:
        return _fit_above(caps.exact_to_gap, caps.excess_beyond_gap, counts, p, bins, label)
    if check.deviates or not check.passed:
        return check
    return replace(check, detail=f"{check.detail}; total variation below {check.bound:.2g}")


def _fit_above(
    gap: float, excess: float, counts: Tensor, p: Tensor, bins: Tensor, label: str
) -> Check:
    """Return `variation` of a sampler whose noise is bounded.

    Tokens likelier than e^-gap must follow their distribution among themselves. No bin of the other
    tokens may be drawn too often by more than the fraction `excess`.
    """
    near = p >= math.exp(-gap)
    check = fit_check(
        "variation", *_arrays(counts * near, p * near / p[near].sum(), bins), label=label
    )
    far, shares = _arrays(counts * ~near, p * ~near, bins)
    n, n_near, p_near = int(counts.sum()), int(counts[near].sum()), float(p[near].sum())
    most = shares * (1.0 + excess)
    too_many = len(far) * float(binom.sf(far - 1, n_near + far, most / (p_near + most)).min())
    p_value = min(1.0, 2 * min(check.p_value or 0.0, too_many))
    ratio = float(far.sum() / (n * shares.sum()))
    drawn, expected = _arrays(counts, p, bins)
    distance = 0.5 * float(np.abs(drawn / n - expected).sum())
    return replace(
        check,
        passed=p_value > ALPHA,
        detail=(
            f"{check.detail} of tokens above e^-{gap:g}; the others {ratio:.3f} of exact; "
            f"total variation seen {distance:.4f}"
        ),
        draws=n,
        p_value=p_value,
        bound=None,  # the bound of the near tokens alone says nothing about all tokens
        deviates=True,
    )


def _arrays(counts: Tensor, p: Tensor, bins: Tensor) -> tuple[np.ndarray, np.ndarray]:
    binned, shares = _binned(counts, p, bins)
    return binned.numpy(), shares.numpy()


def _binned(counts: Tensor, p: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
    """Return the counts and probabilities of the bins."""
    cells = int(bins.max()) + 1
    shares = torch.zeros(cells, dtype=torch.float64).index_add_(0, bins, p)
    binned = torch.zeros(cells, dtype=torch.int64).index_add_(0, bins, counts)
    return binned, shares


def position_bins(p: Tensor) -> Tensor:
    """Return the bin of each token, int64 [V]; bins of similar probability are neighbors."""
    V = len(p)
    token = torch.arange(V)
    decade = (-torch.log10(p)).floor().long()
    decade -= decade.min()
    key = ((decade + 1) * _PARTS + token * _PARTS // V) * 32 + token % 32
    likeliest = p.argsort(descending=True, stable=True)[:_SINGLE_BINS]
    key[likeliest] = torch.arange(len(likeliest)) - len(likeliest)  # before all others
    return key.unique(return_inverse=True)[1]


def check_tail(subject: Subject, gap: float) -> Check:
    """Run an exact binomial test of how often the leader loses to tokens `gap` T below it.

    This detects random numbers of too low a resolution.
    """
    caps, draws = subject.caps, subject.large
    row, V, B = f"gap {gap:g}", draws.problem.V, draws.problem.B
    leader = V // 3
    p = 1.0 - float(draws.probabilities(row)[leader])
    draws.seed(17)
    counts = draws.counts(row, max(B, math.ceil(subject.effort.tail_tokens / V)))
    n = int(counts.sum())
    hits = n - int(counts[leader])
    exact = binomial_p(hits, n, p)
    beyond = caps.exact_to_gap is not None and gap > caps.exact_to_gap
    low = 0.0 if beyond else max(0.0, p - caps.known_deviation)
    high = p * (1.0 + caps.excess_beyond_gap) if beyond else p + caps.known_deviation
    p_value = binomial_p(hits, n, low, min(1.0, high))
    ratio = hits / (n * p)
    detail = f"{hits} draws, {n * p:.1f} expected: {ratio:.2g} of exact"
    if exact <= ALPHA:
        detail += ", the tail is cut" if ratio < 1 else ", too many"
    return Check(
        f"tail {gap:g}",
        p_value > ALPHA,
        detail,
        n,
        ratio,
        exact,
        detects=detectable_share(n, p),
        deviates=exact <= ALPHA,
    )
