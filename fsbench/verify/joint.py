"""Tests that draws of different rows, steps, seeds and samples are independent.

Noise that is used twice, or is used again shifted by a tile, shows only in pairs of draws: each
draw by itself has the right distribution. Most logits here are equal, so that the token drawn is
that of the largest noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fsbench.provider import Capabilities
from fsbench.verify.check import ALPHA, Check
from fsbench.verify.drawing import require_form, require_inside, scalar
from fsbench.verify.statistics import (
    MIN_EXPECTED,
    agreement_p,
    binomial_p,
    coverage,
    detectable_factor,
    detectable_spike,
    fit_check,
    independence_p,
    largest_count_p,
    poisson_p,
    surprisal_p_values,
)
from fsbench.verify.subject import FIT_SEED, SEED, Subject

_ROW_LAGS = (1, 2, 16, 32, 64, 128)
_STEP_LAGS = range(1, 129)
_AGREEING_LAGS = (1, 2, 4, 16, 64)
_BLOCK = 128  # tokens of the smallest tile
_COARSE_PLACES = 16  # places in a block that `tiles` distinguishes if there are few draws
_SHIFTED_STEPS = 256  # steps in which any two rows are compared, shifted or not
_NUM_SAMPLES = 17  # samples of a row

Pair = tuple[str, Tensor, Tensor]
"""(what differs between two sets of draws, tokens [n], tokens [n])."""

Agreement = tuple[str, float]
"""(description of two streams of draws and how often they agree, p-value)."""


def check_tiles(subject: Subject) -> Check:
    """Test that all parts of the vocabulary and all places in a block win equally often.

    A block has 128 or 16 tokens. One G-test of parts x places also detects a tile that depends on
    the lane.
    """
    V, tokens = subject.effort.vocabulary, subject.flat
    token = torch.arange(V, device=tokens.device)
    n = tokens.numel()
    places = _BLOCK if n >= 8 * 2 * MIN_EXPECTED * _BLOCK else _COARSE_PLACES
    parts = max(1, min(64, n // (2 * MIN_EXPECTED * places), V // _BLOCK))
    cell = token * parts // V * places + token % places
    counts = torch.bincount(cell[tokens.flatten()], minlength=parts * places)
    p = torch.bincount(cell, minlength=parts * places).double() / V
    counted = torch.bincount(tokens.flatten(), minlength=V).cpu().numpy()
    label = coverage(counted, np.full(V, 1 / V))
    label += f"{parts} parts of the vocabulary x {places} places: "
    deviation = subject.caps.known_deviation
    return fit_check("tiles", counts.cpu().numpy(), p.cpu().numpy(), deviation, label)


def check_collisions(subject: Subject) -> Check:
    """Test the number of equal pairs among all pairs of draws: about n^2 / 2V, Poisson."""
    V, n = subject.effort.vocabulary, subject.flat.numel()
    counts = torch.bincount(subject.flat.flatten(), minlength=V)
    pairs = int((counts * (counts - 1)).sum()) // 2
    mean = n * (n - 1) / 2 / V
    deviation = subject.caps.known_deviation
    # The most equal pairs result if the whole deviation is on one token.
    highest = mean * (1 + 2 * deviation + deviation**2 * V)
    p_value = poisson_p(pairs, mean, highest)
    return Check(
        "collisions",
        p_value > ALPHA,
        f"{pairs} pairs of equal draws, {mean:.0f} expected",
        n,
        pairs / mean,
        poisson_p(pairs, mean),
        detects=f"{detectable_factor(mean):.2%} more or fewer",
        deviates=poisson_p(pairs, mean) <= ALPHA,
    )


def check_rows(subject: Subject) -> Check:
    """Test that rows of a launch are independent, at some lags and in all pairs.

    Each row must also follow its distribution.
    """
    flat, tokens = subject.flat, subject.tokens
    V, B = subject.large.problem.V, tokens.shape[1]
    pairs = [
        (f"row + {lag}", flat[:, :-lag], flat[:, lag:]) for lag in _ROW_LAGS if lag < flat.shape[1]
    ]
    equal, p = torch.full((V,), 1 / V), subject.small.probabilities("row")
    streams = [
        closest_streams(
            "rows", equal, subject.caps, flat[:_SHIFTED_STEPS].T, range(flat.shape[1]), True
        ),
        closest_streams("rows", p, subject.caps, tokens.T, range(B)),
        *(lagged_agreement("row", lag, tokens.T, p, subject.caps) for lag in _ROW_LAGS if lag < B),
        least_likely("row", tokens.T, range(B), p, subject.caps),
    ]
    return _independence_check("rows", V, pairs, streams)


def check_steps(subject: Subject) -> Check:
    """Test that steps of one seed are independent, at some lags and in all pairs.

    Steps that are a power of two ahead are included, which detects a counter of few bits. Each step
    must also follow its distribution.
    """
    flat, tokens, small = subject.flat, subject.tokens, subject.small
    pairs = [(f"step + {lag}", flat[:-lag], flat[lag:]) for lag in _STEP_LAGS if lag < len(flat)]
    names, far = list(range(len(tokens))), []
    for step in (1 << bit for bit in range(32)):
        if step >= len(tokens):
            small.skip_to(FIT_SEED, step)
            far.append(small.draw("row", 1))
            names.append(step)
    p, drawn = small.probabilities("row"), torch.cat([tokens, *far])
    streams = [
        closest_streams("steps", p, subject.caps, drawn, names),
        *(lagged_agreement("step", lag, tokens, p, subject.caps) for lag in _AGREEING_LAGS),
        least_likely("step", drawn, names, p, subject.caps),
    ]
    return _independence_check("steps", subject.large.problem.V, pairs, streams)


def check_seeds(subject: Subject) -> Check:
    """Test that seeds are independent: neighbors, at the same and the next step, and distant ones.

    All pairs of the one-bit variants of a seed are compared, too.
    """
    large, small, flat = subject.large, subject.small, subject.flat
    stride, steps = subject.caps.seed_stride, subject.effort.other_steps
    pairs = []
    for distance in (stride, 100 * stride, 2**32):
        large.seed(SEED + distance)
        other = large.draw("flat", steps)
        pairs.append((f"seed + {distance}", flat[:steps], other))
        if distance == stride:
            pairs.append((f"seed + {distance}, step - 1", flat[1:steps], other[: steps - 1]))
    seeds = [SEED, *(SEED ^ bit for bit in (1 << i for i in range(64)) if bit >= stride)]
    tokens = []
    for seed in seeds:
        small.seed(seed)
        tokens.append(small.draw("flat", 1)[0])
    equal = small.probabilities("flat")
    streams = [closest_streams("seeds", equal, subject.caps, torch.stack(tokens), seeds, True)]
    return _independence_check("seeds", large.problem.V, pairs, streams)


def check_samples(subject: Subject) -> Check:
    """Test that samples of one row and step are independent of each other and of the next seed's.

    A sampler that adds the sample's number to its seed draws the next seed's samples.
    """
    sample, draws = subject.provider.sample, subject.large
    assert sample is not None
    device, B, V, n = draws.problem.device, draws.problem.B, draws.problem.V, _NUM_SAMPLES

    def samples(seed: int) -> Tensor:
        hidden, out = draws.hidden("flat"), []
        for step in range(max(1, 4 * subject.effort.other_steps // n)):
            torch.manual_seed(seed % 2**31 + step)
            result = sample(
                hidden,
                draws.weight,
                seed=scalar(seed, device),
                offset=scalar(step, device),
                temperature=draws.problem.temperature,
                num_samples=n,
            )
            out.append(require_form(result.tokens, (B, n)).long())
        stacked = torch.stack(out)
        require_inside(stacked, V)
        return stacked

    tokens, next_seed = samples(SEED), samples(SEED + 1)
    pairs = [(f"sample + {lag}", tokens[:, :, :-lag], tokens[:, :, lag:]) for lag in (1, 2, 3)]
    pairs.append(("seed + 1", tokens, next_seed))
    pairs.append(("seed + 1, sample - 1", tokens[:, :, 1:], next_seed[:, :, :-1]))
    equal = torch.full((V,), 1 / V)
    streams = [
        closest_streams("samples", equal, subject.caps, tokens.flatten(0, 1).T, range(n), True)
    ]
    return _independence_check("samples", V, pairs, streams)


def closest_streams(
    label: str,
    p: Tensor,
    caps: Capabilities,
    tokens: Tensor,
    names: Sequence[object],
    shifted: bool = False,
) -> Agreement:
    """Test the two streams, of all pairs, whose draws from one row of logits agree most often.

    Streams with the same noise agree in every draw, however far apart they are.

    Args:
        label: name of the kind of streams.
        p: [V], probabilities of the row.
        tokens: [m, n], m streams of n draws.
        names: names of the streams.
        shifted: p is uniform, and the most frequent difference modulo V counts. This also detects a
            stream that repeats another's noise shifted by some tokens.
    """
    V, (m, n) = len(p), tokens.shape
    counts, partners = [], []
    for first in range(m - 1):
        difference = tokens[first + 1 :] - tokens[first]
        agreed = _largest_multiplicity(difference % V) if shifted else (difference == 0).sum(1)
        best = agreed.max(0)
        counts.append(best.values)
        partners.append(best.indices)
    largest = torch.stack(counts)
    first = int(largest.argmax())
    second = first + 1 + int(partners[first])
    agree = int(largest[first])
    _, p_equal = _agreement_range(p, caps)
    p_value = agreement_p(agree, n, p_equal, m * (m - 1) // 2 * (V if shifted else 1))
    detail = f"{label} {names[first]} and {names[second]}: {agree} of {n} draws agree"
    return detail, p_value


def _agreement_range(p: Tensor, caps: Capabilities) -> tuple[float, float]:
    """Return bounds on the probability that two draws are equal, for a deviation from p [V]."""
    p_equal, deviation = float((p * p).sum()), caps.known_deviation
    change = 2 * deviation * (float(p.max()) + deviation)
    return max(0.0, p_equal - change), min(1.0, p_equal + change)


def lagged_agreement(
    label: str, lag: int, tokens: Tensor, p: Tensor, caps: Capabilities
) -> Agreement:
    """Test how often streams that are `lag` apart agree: neither too often nor too rarely.

    Each stream is in one pair at most, so the pairs are independent.

    Args:
        tokens: [m, n], m streams of n draws.
        p: [V], probabilities of the draws.
    """
    first = [stream for stream in range(len(tokens) - lag) if stream // lag % 2 == 0]
    if not first:
        return "", 1.0
    x = tokens[first]
    hits = int((x == tokens[[stream + lag for stream in first]]).sum())
    low, high = _agreement_range(p, caps)
    detail = f"{label} + {lag}: {hits} of {x.numel()} draws agree, {x.numel() * low:.0f} expected"
    return detail, binomial_p(hits, x.numel(), low, high)


def least_likely(
    label: str, tokens: Tensor, names: Sequence[object], p: Tensor, caps: Capabilities
) -> Agreement:
    """Test the stream of tokens [m, n] whose draws are the least likely, from p [V]."""
    p_values = surprisal_p_values(tokens, p, caps.known_deviation)
    worst = int(p_values.argmin())
    detail = f"{label} {names[worst]}: the probabilities of its draws are wrong"
    return detail, min(1.0, len(p_values) * float(p_values[worst]))


def _largest_multiplicity(values: Tensor) -> Tensor:
    """Return how often the most frequent value of each row of values [m, n] occurs: [m]."""
    ranked = values.sort(1).values
    index = torch.arange(values.shape[1], device=values.device).expand_as(ranked)
    begins = torch.ones_like(ranked, dtype=torch.bool)
    begins[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    return (index - torch.where(begins, index, 0).cummax(1).values).amax(1) + 1


def _independence_check(
    name: str, V: int, pairs: Sequence[Pair], streams: Sequence[Agreement] = ()
) -> Check:
    """Test pairs of draws for independence; return the worst result of pairs and streams.

    Each pair (x, y) has two tests: of their places in the vocabulary, and of the spectrum of
    (y - x) mod V, which is uniform, also for pairs that overlap in a chain.

    Args:
        streams: results of `closest_streams` and `lagged_agreement`.
    """
    worst, worst_detail, n, largest = 1.0, "", 0, 0
    for label, x, y in pairs:
        x, y = x.flatten(), y.flatten()
        n = max(n, len(x))
        counts = torch.bincount((y - x) % V, minlength=V)
        difference, times = int(counts.argmax()), int(counts.max())
        largest = max(largest, times)
        spectrum = largest_count_p(times, V, len(x))
        places = independence(x, y, V)
        if min(spectrum, places) < worst or not worst_detail:
            worst = min(spectrum, places)
            worst_detail = f"{label}: {times} of {len(x)} pairs differ by {difference} modulo {V}"
            if places < spectrum:
                worst_detail = f"{label}: places in the vocabulary"
    for label, p_value in streams:
        if p_value < worst:
            worst, worst_detail = p_value, label
    tests = 2 * len(pairs) + len(streams)
    p_value = min(1.0, tests * worst)
    worst_detail = f"{len(pairs)} pairs of draws; least likely {worst_detail}"
    share = detectable_spike(V, n, tests)
    detects = f"{share:.2g} of draws with the other's noise, shifted or not"
    return Check(name, p_value > ALPHA, worst_detail, n, largest, p_value, detects=detects)


def independence(x: Tensor, y: Tensor, V: int) -> float:
    """Return the p-value of a G-test that tokens x and y [n] are independent.

    Both are binned by their place in the vocabulary, into at most 16 bins and so few that a cell
    has 2 MIN_EXPECTED draws. Such a bin is empty with a probability below e^-100.
    """
    k = min(16, V, math.isqrt(len(x) // (2 * MIN_EXPECTED)))
    if k < 2:
        return 1.0
    table = torch.bincount(x * k // V * k + y * k // V, minlength=k * k).reshape(k, k)
    return independence_p(table.cpu().numpy())
