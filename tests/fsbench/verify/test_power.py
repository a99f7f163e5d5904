"""The numbers of design/exactness.md on what the ci tier finds on a CPU follow from the code."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from scipy.stats import binom

from fsbench.verify.check import ALPHA, POWER
from fsbench.verify.effort import EFFORTS
from fsbench.verify.statistics import (
    MIN_EXPECTED,
    agreement_p,
    detectable_bias,
    detectable_share,
    pooled,
    surprisal_p_values,
)

PAGE = Path(__file__).parents[3] / "docs" / "design" / "exactness.md"
CI = EFFORTS["ci", "cpu"]
ROWS, STEPS = 300, math.ceil(CI.fit_draws / 300)
ROW = 2.0 * torch.randn(500, generator=torch.Generator().manual_seed(5))
ROW[[0, -1]] = 4.0  # as Subject.small has it
LAW = ROW.double().softmax(0)
EQUAL = float((LAW * LAW).sum())


def shared_noise(n: int, tries: int) -> float:
    """The share of n draws that two of `tries` pairs of streams must have in common."""
    critical = next(k for k in range(n + 2) if agreement_p(k, n, EQUAL, tries) <= ALPHA)
    shares = np.linspace(0, 1, 1001)
    power = binom.sf(critical - 1, n, shares + (1 - shares) * EQUAL)
    return float(shares[np.argmax(power >= POWER)])


def power_in_a_row(factor: float) -> float:
    """How often a row whose T is this much of the others' is found, among the tests of `rows`."""
    p = (ROW.double() / factor).softmax(0)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(p, 200 * STEPS, True, generator=generator).view(200, STEPS)
    return float((surprisal_p_values(drawn, LAW) * ROWS * 20 <= ALPHA).double().mean())


def test_the_page_has_the_power_of_the_ci_tier():
    n = ROWS * STEPS
    fit = detectable_bias(len(pooled(n * LAW.sort(descending=True).values.numpy())) - 1, n)
    spread = float(((LAW * ROW**2).sum() - (LAW * ROW).sum() ** 2).sqrt())
    large = 256 * math.ceil(CI.tail_tokens / CI.vocabulary / 256)
    tails = [detectable_share(large, 1 - 1 / (1 + 9000 * math.exp(-gap))) for gap in CI.gaps]
    flat = 256 * CI.joint_steps
    cells = flat // (2 * MIN_EXPECTED)
    pairs = n // 2
    rarer = 1 - binom.ppf(ALPHA / 2 / 30, pairs, EQUAL) / (pairs * EQUAL)
    table = {
        "T that is off, for all rows": f"{fit / spread:.1%}",
        "probabilities that are off, rms over the tokens of `fit`": f"{fit:.1%}",
        "tokens at the ends of blocks of 128": f"{detectable_bias(2, CI.block_draws):.1%}",
        "parts and places of a vocabulary of 9001 (`tiles`)": (
            f"{detectable_bias(cells // 16 * 16 - 1, flat):.0%}"
        ),
        "loss of tokens 10 T, 12 T below the leader": ", ".join(
            f"{float(tail.split()[2]):.0%}" for tail in tails
        ),
        "rows or steps that agree too rarely": f"{rarer:.0%} fewer",
        "two rows, two steps; two requests that share noise": (
            f"{shared_noise(STEPS, ROWS**2 * 10):.0%}; "
            f"{shared_noise(CI.call_steps, 20_000):.0%} of draws"
        ),
    }
    rows = CI.filtered[0] * CI.filter_steps * 4  # in four forms of masks and biases
    table["a forbidden token"] = f"one row of {round(-rows / math.log(1 - POWER), -3):,.0f}"
    page = PAGE.read_text()
    for fault, size in table.items():
        assert f"| {fault} | {size.replace('%', ' %')} |" in page, (fault, size)
    assert power_in_a_row(1.5) >= POWER > power_in_a_row(1.3)
    assert power_in_a_row(0.7) >= POWER > power_in_a_row(0.8)
