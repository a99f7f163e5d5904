"""What the battery found (docs/exactness.md), and tables of docs/noise.md that follow by computing.

A check that was run twice counts as it was found last.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import torch

from fsbench import reference
from fsbench.analysis.audit import audited, markdown
from fsbench.discover import discover
from fsbench.records.verdicts import read_verdicts
from pages.blocks import H200, RESULTS, block, listed, measured_on, table, with_source

Record = dict[str, Any]
VERIFY = H200 / "verify"


@cache
def checks_of(provider: str) -> dict[str, Record]:
    """The checks of a sampler in the full tier, by name."""
    text = (VERIFY / f"{provider}.jsonl").read_text(encoding="utf-8")
    lines = map(json.loads, text.splitlines())
    return {line["name"]: line for line in lines if "verdict" in line}


def _providers() -> list[str]:
    found = (path.stem for path in VERIFY.glob("*.jsonl"))
    return sorted(name for name in found if not name.startswith("quantised-"))


def _source() -> str:
    """Of all records in one folder: a link for each would be a paragraph."""
    records = (f"h200/verify/{name}.jsonl" for name in _providers())
    return f"*{measured_on(*records)}. Record: [verify](ROOT/results/h200/verify).*"


@block
def verdicts() -> str:
    rows = []
    for name in _providers():
        checks = checks_of(name).values()
        other = [f"`{check['name']}`" for check in checks if check["verdict"] == "not exact"]
        failed = [f"`{check['name']}`" for check in checks if check["verdict"] == "FAILED"]
        took = sum(check["seconds"] for check in checks)
        ok = len(checks) - len(other) - len(failed)
        cells = [listed(some) if some else "none" for some in (other, failed)]
        rows.append([f"`{name}`", f"{ok} of {len(checks)}", *cells, f"{took:.0f} s"])
    heads = ["sampler", "ok", "not exact, as declared", "failed", "took"]
    return f"{table(heads, rows, left=4)}\n\n{_source()}"


@block
def tails() -> str:
    """Share of the tail's probability that was drawn, by gap."""
    rows = []
    for name in _providers():
        checks = checks_of(name)
        found = [checks.get(f"tail {gap}") for gap in (16, 18, 20)]
        if all(found):
            rows.append([f"`{name}`", *(f"{check['statistic']:.3g}" for check in found if check)])
    return f"{table(['drawn / exact', 'gap 16', 'gap 18', 'gap 20'], rows)}\n\n{_source()}"


@block
def variations() -> str:
    rows = []
    for name in _providers():
        check = checks_of(name).get("variation")
        if check and check["bound"]:
            rows.append([f"`{name}`", f"{check['draws']:,}", f"{check['bound']:.2g}"])
    return f"{table(['sampler', 'draws', 'total variation below'], rows)}\n\n{_source()}"


@block
def deviations() -> str:
    """What `variation` says of samplers that are not exact, in its own words."""
    rows = []
    for name in _providers():
        check = checks_of(name).get("variation")
        if check and not check["bound"]:
            rows.append([f"`{name}`", check["detail"]])
    return f"{table(['sampler', 'found by `variation`'], rows, left=2)}\n\n{_source()}"


@block
def tail_of_the_contract() -> str:
    """P(a tail token beats the dominant one), from the 2^32 codes, relative to the exact one."""
    V = 151_936
    t = np.linspace(1e-9, 1 - 1e-9, 1_000_001)
    dominant = -np.log(-np.log(t))  # its Gumbel, at the quantiles t
    shares = {}
    for gap in range(14, 26, 2):
        u = -np.expm1(-np.exp(-(dominant + gap)))  # a tail Gumbel is above it for smaller u
        p = np.ceil(u * 2.0**32 - 0.5).clip(0) / 2.0**32
        drawn = -np.expm1((V - 1) * np.log1p(-p)).mean()
        tail = (V - 1) * np.exp(-gap)
        shares[gap] = f"{drawn * (1 + tail) / tail:.2f}"
    return table(["gap", *shares], [["drawn / exact", *shares.values()]])


@block
def words_and_lanes() -> str:
    word, lane = reference.word_and_lane(torch.arange(16))
    tokens = torch.empty(4, 4, dtype=torch.int64)
    tokens[word, lane] = torch.arange(16)
    heads = ["word (mod 4)", *(f"lane {number}" for number in range(4))]
    return table(heads, [[number, *row] for number, row in enumerate(tokens.tolist())])


AUDIT = "cpu/audit-20261123"


@block
def audit(record: str = f"{AUDIT}/audit.jsonl") -> str:
    """The audit of the samplers that run on one kind of machine."""
    found, skipped = audited(read_verdicts([RESULTS / record]))
    text = markdown(found, {})
    if skipped:
        known = discover()
        others = ", ".join(
            f"`{name}`"
            for name, why in skipped.items()
            if name in known and "lower bound" not in why
        )
        text += f"\n\nNot in this record: {others}."
    return with_source(text, record)


@block
def known_bugs() -> str:
    """Bugs of released samplers, planted, and what finds them."""
    found, _ = audited(read_verdicts([RESULTS / AUDIT / "planted.jsonl"]))
    rows = []
    for each in found:
        (finding,) = each.findings
        bug, _, where = each.sampler.removesuffix(")").rpartition(" (")
        draws = f"{each.draws:,}" if each.draws else "until the first wrong one"
        cells = (bug, where, f"`{finding.check}`", finding.severity, draws)
        rows.append([*cells, f"{finding.seconds:.0f}"])
    heads = ["bug", "was in", "found by", "severity", "draws", "seconds"]
    return with_source(table(heads, rows, left=4), f"{AUDIT}/planted.jsonl")
