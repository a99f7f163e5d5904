"""One row: are the tokens distributed as softmax(logits / T) says, out to the far tail?"""

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

_HEAD = 128  # tokens with a bin of their own in the large problem
_PARTS = 8  # of the vocabulary, in its bins


def check_fit(subject: Subject) -> Check:
    """G-test of the tokens of one row, token by token; the rarest are pooled, never dropped.

    Two shorter tests come first, of laws with all logits large, negative or positive: padding of
    the vocabulary that is taken for a logit of zero shows there, and scores of too few bits.
    """
    tokens, draws, known = subject.tokens, subject.small, subject.able.known_deviation
    draws.seed(12)
    for sign in ("negative", "positive"):
        counts = draws.counts(sign, min(2**13, tokens.numel()))
        law = draws.probabilities(sign).cpu()
        what = f"all logits {sign}: "
        check = goodness_of_fit(counts.numpy(), law.numpy(), known, what, tests=2)
        if not check.passed:
            return check
    counts = torch.bincount(tokens.flatten(), minlength=draws.problem.V).cpu()
    return goodness_of_fit(counts.numpy(), draws.probabilities("row").cpu().numpy(), known)


def check_blocks(subject: Subject) -> Check:
    """G-tests of what ends a block or a vocabulary: see block_classes."""
    draws, wanted = subject.small, subject.effort.block_draws
    found = []
    for name, classes in block_classes(draws.problem.V).items():
        draws.seed(19)
        counts = draws.counts(name, wanted if name == "blocks" else min(wanted, 2**16))
        found.append((name, *_binned(counts, draws.probabilities(name).cpu(), classes)))
    return all_fit("blocks", found, subject.able.known_deviation)


def check_fit_of_seeds(subject: Subject) -> Check:
    """The G-test of `fit` for many seeds: the smallest p-value, and whether all are uniform.

    P-values that pile up at 0 show a bias too small for one seed, at 1 noise that is too even.
    """
    draws, seeds = subject.small, subject.effort.seeds
    p = draws.probabilities("row").cpu().numpy()
    all_counts = []
    for seed in range(seeds):
        draws.seed(1000 + seed)
        all_counts.append(draws.counts("row", subject.effort.seed_draws).numpy())
    counts = np.sum(all_counts, axis=0)
    n = int(counts.sum())
    if known := subject.able.known_deviation:
        return replace(goodness_of_fit(counts, p, known), name="fit of seeds")
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


def cost(able: Capabilities) -> str:
    """Return the cost class of a draw: group noise, token noise, stored logits, or chunks.

    Without noise of the contract, only a loop over chunks of the vocabulary keeps no logits: many
    small launches.
    """
    return able.noise or ("chunks" if able.fused else "stored")


def check_variation(subject: Subject) -> Check:
    """G-test of a large vocabulary under Zipf's law, and a bound on the total variation.

    Bins: the likeliest tokens alone, the others by decade of probability, part of the vocabulary,
    and token id modulo 32; so a tile, a lane or a decade that is drawn wrongly stands out. If that
    fails, a sampler whose noise is known to end is judged by what it claims (`_fit_above`).
    """
    able, draws = subject.able, subject.large
    p = draws.probabilities("zipf").cpu()
    draws.seed(13)
    counts = draws.counts("zipf", subject.effort.variation_draws[cost(able)])
    what = f"V={draws.problem.V}: "
    bins = position_bins(p)
    check = fit_check("variation", *_arrays(counts, p, bins), able.known_deviation, what)
    if not check.passed and able.exact_to_gap is not None:
        return _fit_above(able.exact_to_gap, able.excess_beyond_gap, counts, p, bins, what)
    if check.deviates or not check.passed:
        return check
    return replace(check, detail=f"{check.detail}; total variation below {check.bound:.2g}")


def _fit_above(
    gap: float, excess: float, counts: Tensor, p: Tensor, bins: Tensor, what: str
) -> Check:
    """`variation` where noise ends: tokens likelier than e^-gap follow the law among themselves.

    Beside them no bin of the others is drawn too often, by more than the part `excess`.
    """
    near = p >= math.exp(-gap)
    check = fit_check(
        "variation", *_arrays(counts * near, p * near / p[near].sum(), bins), what=what
    )
    far, shares = _arrays(counts * ~near, p * ~near, bins)
    n, n_near, p_near = int(counts.sum()), int(counts[near].sum()), float(p[near].sum())
    most = shares * (1.0 + excess)
    too_many = len(far) * float(binom.sf(far - 1, n_near + far, most / (p_near + most)).min())
    p_value = min(1.0, 2 * min(check.p_value or 0.0, too_many))
    ratio = float(far.sum() / (n * shares.sum()))
    drawn, expected = _arrays(counts, p, bins)
    distance = 0.5 * float(np.abs(drawn / n - expected).sum())
    told = f"tokens above e^-{gap:g}; the others {ratio:.3f} of exact"
    return replace(
        check,
        passed=p_value > ALPHA,
        detail=f"{check.detail} of {told}; total variation seen {distance:.4f}",
        draws=n,
        p_value=p_value,
        bound=None,  # it would be that of the near tokens alone
        deviates=True,
    )


def _arrays(counts: Tensor, p: Tensor, bins: Tensor) -> tuple[np.ndarray, np.ndarray]:
    binned, shares = _binned(counts, p, bins)
    return binned.numpy(), shares.numpy()


def _binned(counts: Tensor, p: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and probabilities of the bins."""
    cells = int(bins.max()) + 1
    shares = torch.zeros(cells, dtype=torch.float64).index_add_(0, bins, p)
    binned = torch.zeros(cells, dtype=torch.int64).index_add_(0, bins, counts)
    return binned, shares


def position_bins(p: Tensor) -> Tensor:
    """The bin of every token, int64 [V]; bins that are alike in probability are neighbors."""
    V = len(p)
    token = torch.arange(V)
    decade = (-torch.log10(p)).floor().long()
    decade -= decade.min()
    key = ((decade + 1) * _PARTS + token * _PARTS // V) * 32 + token % 32
    head = p.argsort(descending=True, stable=True)[:_HEAD]
    key[head] = torch.arange(len(head)) - len(head)  # before all others
    return key.unique(return_inverse=True)[1]


def check_tail(subject: Subject, gap: float) -> Check:
    """Exact binomial test of how often the leader loses to tokens that lie `gap` T below it.

    The resolution of the random numbers, not the number of rows, is what shows.
    """
    able, draws = subject.able, subject.large
    row, V, B = f"gap {gap:g}", draws.problem.V, draws.problem.B
    leader = V // 3
    p = 1.0 - float(draws.probabilities(row)[leader])
    draws.seed(17)
    counts = draws.counts(row, max(B, math.ceil(subject.effort.tail_tokens / V)))
    n = int(counts.sum())
    hits = n - int(counts[leader])
    exact = binomial_p(hits, n, p)
    beyond = able.exact_to_gap is not None and gap > able.exact_to_gap
    low = 0.0 if beyond else max(0.0, p - able.known_deviation)
    high = p * (1.0 + able.excess_beyond_gap) if beyond else p + able.known_deviation
    p_value = binomial_p(hits, n, low, min(1.0, high))
    ratio = hits / (n * p)
    told = f"{hits} draws, {n * p:.1f} expected: {ratio:.2g} of exact"
    if exact <= ALPHA:
        told += ", the tail is cut" if ratio < 1 else ", too many"
    return Check(
        f"tail {gap:g}",
        p_value > ALPHA,
        told,
        n,
        ratio,
        exact,
        detects=detectable_share(n, p),
        deviates=exact <= ALPHA,
    )
