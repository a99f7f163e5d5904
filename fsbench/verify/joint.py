"""Many draws together: rows, steps, seeds and samples are independent, and none repeats another.

Each draw may follow the right law and all of this still be broken: noise that is used twice, or
used again shifted by a tile, shows in pairs of draws only. All logits are equal here, so that the
token drawn is that of the largest noise.
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

ROW_LAGS = (1, 2, 16, 32, 64, 128)
STEP_LAGS = range(1, 129)
_AGREEING_LAGS = (1, 2, 4, 16, 64)
_BLOCK = 128  # tokens of the smallest tile
_FEW_PLACES = 16  # of which are told apart where the draws are few
_SHIFTED_STEPS = 256  # most steps of which any two rows are compared, shifted or not
_SAMPLES = 17  # of one row

Pair = tuple[str, Tensor, Tensor]
"""(what differs between two sets of draws, tokens [n], tokens [n])."""

Alike = tuple[str, float]
"""(which two streams of draws agree most, p-value)."""


def check_tiles(subject: Subject) -> Check:
    """Every part of the vocabulary, and every place in a block of 128 or 16, wins equally often.

    One G-test of their table, so it also finds a winner's tile that depends on its lane.
    """
    V, tokens = subject.effort.vocabulary, subject.flat
    token = torch.arange(V, device=tokens.device)
    n = tokens.numel()
    places = _BLOCK if n >= 8 * 2 * MIN_EXPECTED * _BLOCK else _FEW_PLACES
    parts = max(1, min(64, n // (2 * MIN_EXPECTED * places), V // _BLOCK))
    cell = token * parts // V * places + token % places
    counts = torch.bincount(cell[tokens.flatten()], minlength=parts * places)
    p = torch.bincount(cell, minlength=parts * places).double() / V
    counted = torch.bincount(tokens.flatten(), minlength=V).cpu().numpy()
    what = coverage(counted, np.full(V, 1 / V))
    what += f"{parts} parts of the vocabulary x {places} places: "
    known = subject.able.known_deviation
    return fit_check("tiles", counts.cpu().numpy(), p.cpu().numpy(), known, what)


def check_collisions(subject: Subject) -> Check:
    """Pairs of draws that agree, among all pairs: about n^2 / 2V, with Poisson's variance."""
    V, n = subject.effort.vocabulary, subject.flat.numel()
    counts = torch.bincount(subject.flat.flatten(), minlength=V)
    pairs = int((counts * (counts - 1)).sum()) // 2
    mean = n * (n - 1) / 2 / V
    moved = subject.able.known_deviation
    # A law that far from the flat one agrees with itself most often if all of it is on one token.
    highest = mean * (1 + 2 * moved + moved**2 * V)
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
    """Rows of a launch are independent: at some lags, and any two of all. Each follows the law."""
    flat, tokens = subject.flat, subject.tokens
    V, B = subject.large.problem.V, tokens.shape[1]
    pairs = [
        (f"row + {lag}", flat[:, :-lag], flat[:, lag:]) for lag in ROW_LAGS if lag < flat.shape[1]
    ]
    equal, law = torch.full((V,), 1 / V), subject.small.probabilities("row")
    streams = [
        alike("rows", equal, subject.able, flat[:_SHIFTED_STEPS].T, range(flat.shape[1]), True),
        alike("rows", law, subject.able, tokens.T, range(B)),
        *(agreement("row", lag, tokens.T, law, subject.able) for lag in ROW_LAGS if lag < B),
        least_likely("row", tokens.T, range(B), law, subject.able),
    ]
    return _independent("rows", V, pairs, streams)


def check_steps(subject: Subject) -> Check:
    """Steps of one seed are independent: at some lags, any two of all, and far ones.

    Far ones are a power of two ahead, so that a counter of few bits shows. Each follows the law.
    """
    flat, tokens, small = subject.flat, subject.tokens, subject.small
    pairs = [(f"step + {lag}", flat[:-lag], flat[lag:]) for lag in STEP_LAGS if lag < len(flat)]
    names, far = list(range(len(tokens))), []
    for step in (1 << bit for bit in range(32)):
        if step >= len(tokens):
            small.skip_to(FIT_SEED, step)
            far.append(small.draw("row", 1))
            names.append(step)
    law, drawn = small.probabilities("row"), torch.cat([tokens, *far])
    streams = [
        alike("steps", law, subject.able, drawn, names),
        *(agreement("step", lag, tokens, law, subject.able) for lag in _AGREEING_LAGS),
        least_likely("step", drawn, names, law, subject.able),
    ]
    return _independent("steps", subject.large.problem.V, pairs, streams)


def check_seeds(subject: Subject) -> Check:
    """Seeds are independent: neighbors, at the same and the next step, and distant ones.

    Any two of those that differ in one bit from the same seed, too.
    """
    large, small, flat = subject.large, subject.small, subject.flat
    stride, steps = subject.able.seed_stride, subject.effort.other_steps
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
    streams = [alike("seeds", equal, subject.able, torch.stack(tokens), seeds, True)]
    return _independent("seeds", large.problem.V, pairs, streams)


def check_samples(subject: Subject) -> Check:
    """Samples of one row and step are independent, also of those of the next seed.

    A sampler that adds the sample's number to its seed would draw the next seed's samples.
    """
    sample, draws = subject.provider.sample, subject.large
    assert sample is not None
    device, B, V, n = draws.problem.device, draws.problem.B, draws.problem.V, _SAMPLES

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
        tokens = torch.stack(out)
        require_inside(tokens, V)
        return tokens

    mine, others = samples(SEED), samples(SEED + 1)
    pairs = [(f"sample + {lag}", mine[:, :, :-lag], mine[:, :, lag:]) for lag in (1, 2, 3)]
    pairs.append(("seed + 1", mine, others))
    pairs.append(("seed + 1, sample - 1", mine[:, :, 1:], others[:, :, :-1]))
    equal = torch.full((V,), 1 / V)
    streams = [alike("samples", equal, subject.able, mine.flatten(0, 1).T, range(n), True)]
    return _independent("samples", V, pairs, streams)


def alike(
    what: str,
    law: Tensor,
    able: Capabilities,
    tokens: Tensor,
    names: Sequence[object],
    shifted: bool = False,
) -> Alike:
    """Test how often two streams of draws from one row of logits agree, place by place.

    Two that share their noise agree in all places, whatever their distance.

    Args:
        law: probabilities [V] of the row. tokens: [m, n], m streams of n draws. names: of the
            streams.
        shifted: the law is flat, and the commonest difference modulo V counts: also a stream that
            repeats another's noise some tokens further on is found.
    """
    V, (m, n) = len(law), tokens.shape
    most, partner = [], []
    for first in range(m - 1):
        difference = tokens[first + 1 :] - tokens[first]
        agree = _longest_runs(difference % V) if shifted else (difference == 0).sum(1)
        best = agree.max(0)
        most.append(best.values)
        partner.append(best.indices)
    times = torch.stack(most)
    first = int(times.argmax())
    second = first + 1 + int(partner[first])
    agreed = int(times[first])
    _, p_equal = _agreeing(law, able)
    p_value = agreement_p(agreed, n, p_equal, m * (m - 1) // 2 * (V if shifted else 1))
    told = f"{what} {names[first]} and {names[second]}: {agreed} of {n} draws agree"
    return told, p_value


def _agreeing(law: Tensor, able: Capabilities) -> tuple[float, float]:
    """The least and the largest chance that two draws are equal, from a law near that [V]."""
    p_equal, known = float((law * law).sum()), able.known_deviation
    moved = 2 * known * (float(law.max()) + known)
    return max(0.0, p_equal - moved), min(1.0, p_equal + moved)


def agreement(what: str, lag: int, tokens: Tensor, law: Tensor, able: Capabilities) -> Alike:
    """Whether streams that are `lag` apart agree as often as chance has it: not less often, either.

    Args:
        tokens: [m, n], m streams of n draws from law [V]. Each stream is in one pair at most, so
            that the pairs are independent.
    """
    first = [at for at in range(len(tokens) - lag) if at // lag % 2 == 0]
    if not first:
        return "", 1.0
    x = tokens[first]
    hits = int((x == tokens[[at + lag for at in first]]).sum())
    low, high = _agreeing(law, able)
    told = f"{what} + {lag}: {hits} of {x.numel()} draws agree, {x.numel() * low:.0f} expected"
    return told, binomial_p(hits, x.numel(), low, high)


def least_likely(
    what: str, tokens: Tensor, names: Sequence[object], law: Tensor, able: Capabilities
) -> Alike:
    """The stream [n] of tokens [m, n] whose draws are the least likely from law [V]."""
    p_values = surprisal_p_values(tokens, law, able.known_deviation)
    worst = int(p_values.argmin())
    told = f"{what} {names[worst]}: its draws are not as likely as they should be"
    return told, min(1.0, len(p_values) * float(p_values[worst]))


def _longest_runs(values: Tensor) -> Tensor:
    """[m]: how often the commonest value of each row of values [m, n] occurs."""
    ranked = values.sort(1).values
    place = torch.arange(values.shape[1], device=values.device).expand_as(ranked)
    begins = torch.ones_like(ranked, dtype=torch.bool)
    begins[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    return (place - torch.where(begins, place, 0).cummax(1).values).amax(1) + 1


def _independent(name: str, V: int, pairs: Sequence[Pair], streams: Sequence[Alike] = ()) -> Check:
    """Two tests of each pair: their places in the vocabulary, and the spectrum of differences.

    The spectrum is that of (y - x) mod V: uniform, also for pairs that overlap in a chain. Beside
    them the results of `alike`.
    """
    worst, told, n, most = 1.0, "", 0, 0
    for what, x, y in pairs:
        x, y = x.flatten(), y.flatten()
        n = max(n, len(x))
        counts = torch.bincount((y - x) % V, minlength=V)
        difference, times = int(counts.argmax()), int(counts.max())
        most = max(most, times)
        spectrum = largest_count_p(times, V, len(x))
        places = independence(x, y, V)
        if min(spectrum, places) < worst or not told:
            worst = min(spectrum, places)
            told = f"{what}: {times} of {len(x)} pairs differ by {difference} modulo {V}"
            if places < spectrum:
                told = f"{what}: places in the vocabulary"
    for what, p_value in streams:
        if p_value < worst:
            worst, told = p_value, what
    tests = 2 * len(pairs) + len(streams)
    p_value = min(1.0, tests * worst)
    told = f"{len(pairs)} pairs of draws; least likely {told}"
    share = detectable_spike(V, n, tests)
    detects = f"{share:.2g} of draws with the other's noise, shifted or not"
    return Check(name, p_value > ALPHA, told, n, most, p_value, detects=detects)


def independence(x: Tensor, y: Tensor, V: int) -> float:
    """P-value of the G-test that tokens x and y [n] are independent, pair by pair.

    Both are binned by their place in the vocabulary, into at most 16 bins, as few as leave
    2 MIN_EXPECTED draws to a cell: of a bin that no honest sampler leaves empty (e^-100).
    """
    k = min(16, V, math.isqrt(len(x) // (2 * MIN_EXPECTED)))
    if k < 2:
        return 1.0
    table = torch.bincount(x * k // V * k + y * k // V, minlength=k * k).reshape(k, k)
    return independence_p(table.cpu().numpy())
