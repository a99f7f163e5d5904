"""Checks of the noise contract: generator, counters, map from bits to Gumbel, largest noise.

The checks test the reference, whose tokens a sampler must return (`oracle`). Only the fp32 map is
tested in the sampler's device code, if the sampler offers it (Provider.noise_map).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from scipy.stats import gumbel_r, kstest
from torch import Tensor

from fsbench import reference
from fsbench.errors import VerificationFailed
from fsbench.reference.noise import GROUP_BLOCK, GROUP_STREAM
from fsbench.reference.philox import MASK32, random_words
from fsbench.verify.check import ALPHA, Check
from fsbench.verify.drawing import scalar
from fsbench.verify.subject import Subject

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK32,) * 4, (MASK32,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)

_MAP_ULP = 4  # allowed error of the exponential; docs/design/noise.md derives it
_CODES_AT_ONCE = 2**24
_MAXIMA_AT_ONCE = 2**22  # Gumbels


def check_philox(subject: Subject) -> Check:
    """Check Philox against published vectors, and that all counters of the contract differ.

    For one key Philox is a bijection from counters to blocks. Counters of words, groups, rows,
    steps and samples therefore differ if their blocks do.
    """
    device = subject.setting.device
    for counter, key, expected in KNOWN_ANSWERS:
        c0, c1, c2, c3 = (torch.tensor([word], device=device) for word in counter)
        k0, k1 = (torch.tensor([word], device=device) for word in key)
        words = tuple(int(word) for word in reference.philox4x32((c0, c1, c2, c3), (k0, k1)))
        if words != expected:
            raise VerificationFailed(f"counter {counter}: expected {expected}; got {words}")
    rows, index = torch.arange(5, device=device), torch.arange(40, device=device)
    blocks = [
        torch.stack(random_words(index, rows, scalar(step, device), stream, scalar(5, device)), -1)
        for step in (0, 1, 2**31, 2**32 - 1)
        for sample in (0, 1, 2, 2**16 - 1)
        for stream in (sample, GROUP_STREAM + sample)
    ]
    all_blocks = torch.cat([block.flatten(0, -2) for block in blocks])
    distinct = len(all_blocks.unique(dim=0))
    detail = f"3 known answers; {distinct} distinct blocks of {len(all_blocks)} counters"
    return Check("philox", distinct == len(all_blocks), detail, len(all_blocks))


def check_noise_map(subject: Subject) -> Check:
    """Check that the device code's map from 32 bits to Exp(1) and Gumbel is monotone and accurate.

    With fewer than 2^32 codes, both ends, the middle, and a part of each octave are tested.
    """
    noise_map, codes, device = (
        subject.provider.noise_map, subject.effort.codes, subject.setting.device
    )  # fmt: skip
    assert noise_map is not None
    num_codes, worst_ulp, worst_gumbel = 0, 0.0, 0.0
    previous: tuple[Tensor, Tensor] | None = None
    is_exhaustive = codes >= 2**32
    for bits in _every_code(device) if is_exhaustive else [_sample_codes(codes).to(device)]:
        exponential, gumbel = noise_map(bits)
        if not bool(torch.isfinite(exponential).all() and torch.isfinite(gumbel).all()):
            index = int(bits[~(torch.isfinite(exponential) & torch.isfinite(gumbel))][0])
            raise VerificationFailed(f"code {index}: not finite")
        if previous is not None:
            exponential, gumbel = (
                torch.cat([before, now])
                for before, now in zip(previous, (exponential, gumbel), strict=True)
            )
        falls = exponential[1:] < exponential[:-1]
        rises = gumbel[1:] > gumbel[:-1]
        if bool(falls.any() or rises.any()):
            index = int((falls | rises).nonzero()[0])
            raise VerificationFailed(f"not monotone after {num_codes + index} codes")
        previous = exponential[-1:], gumbel[-1:]
        n = len(bits)
        exact = reference.exponential(bits)
        ulp = torch.exp2(torch.frexp(exact).exponent.double() - 24)
        error = (exponential[-n:].double() - exact).abs() / ulp
        worst_ulp = max(worst_ulp, float(error.max()))
        error = (gumbel[-n:].double() - reference.gumbel(bits)).abs()
        worst_gumbel = max(worst_gumbel, float(error.max()))
        num_codes += n
    detail = (
        f"{'every code' if is_exhaustive else f'{num_codes} codes'}: finite, monotone; the "
        f"exponential within {worst_ulp:.2f} ulp, the Gumbel within {worst_gumbel:.2g}"
    )
    passed = worst_ulp <= _MAP_ULP and worst_gumbel <= reference.GUMBEL_ERROR
    return Check("noise map", passed, detail, num_codes)


def _every_code(device: str) -> Iterator[Tensor]:
    for first in range(0, 2**32, _CODES_AT_ONCE):
        yield torch.arange(first, first + _CODES_AT_ONCE, device=device)


def _sample_codes(n: int) -> Tensor:
    """Return about n codes in order: both ends, the middle, and codes spread by octave."""
    part = n // 4
    near = torch.arange(part)
    spread = torch.from_numpy(np.exp2(np.linspace(0, 32, part)).astype(np.int64))
    parts = [near, 2**31 - part // 2 + near, 2**32 - part + near, spread, 2**32 - 1 - spread]
    return torch.cat(parts).clamp(0, 2**32 - 1).unique()


def check_maximum(subject: Subject) -> Check:
    """Run a Kolmogorov-Smirnov test of the reference's largest score of equal logits, minus log Z.

    It is Gumbel(0, 1). Noise with an upper bound c is off by 1 - exp(-V e^-c).
    """
    noise, V = subject.caps.noise or "token", subject.effort.vocabulary
    rows = subject.effort.maxima[noise]
    largest = torch.cat(list(_maxima(subject.setting.device, noise, V, rows))).cpu().numpy()
    if not np.isfinite(largest).all():
        raise VerificationFailed("maximum: not finite")
    test = kstest(largest, gumbel_r.cdf)
    p_value = float(test.pvalue)
    # Dvoretzky-Kiefer-Wolfowitz-Massart: the critical distance, and a margin for chance.
    n = len(largest)
    detected = math.sqrt(math.log(2 / ALPHA) / (2 * n)) + math.sqrt(math.log(1 / 0.1) / (2 * n))
    detail = f"of the reference's {noise} noise, V={V}: Kolmogorov-Smirnov {test.statistic:.4f}"
    detects = f"a distance of {detected:.4f} from Gumbel(0, 1)"
    statistic = float(test.statistic)
    return Check("maximum", p_value > ALPHA, detail, n, statistic, p_value, detects=detects)


def _maxima(device: str, noise: str, V: int, rows: int) -> Iterator[Tensor]:
    """Yield the largest score of V equal logits, minus log V, for rows 0, 1, .. of one step."""
    seed, offset = scalar(29, device), scalar(3, device)
    # The largest noise in a group of n tokens has the distribution of log n + g.
    sizes = torch.bincount(reference.group_and_member(torch.arange(V))[0])
    log_sizes = sizes.double().log().to(device)  # -inf for the groups beyond V in the last block
    row_size = V if noise == "token" else -(-V // GROUP_BLOCK) * 4
    at_once = max(1, _MAXIMA_AT_ONCE // row_size)
    for first in range(0, rows, at_once):
        batch = torch.arange(first, min(first + at_once, rows), device=device)
        if noise == "token":
            g = reference.token_noise(V, seed, offset, batch)
        else:
            g = reference.group_noise(V, seed, offset, batch)[0][:, : len(log_sizes)] + log_sizes
        yield g.amax(1) - math.log(V)
