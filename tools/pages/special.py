"""Blocks other than tables of numbers: verdicts, the audit, lists of names."""

from __future__ import annotations

import numpy as np

from fsbench import paper
from fsbench.discover import discover
from fsbench.e2e.models import decoders
from fsbench.records.summary import read_csv
from fsbench.records.verdicts import read_verdicts
from fsbench.report.audit import audited, markdown
from fsbench.report.tables import configurations
from fsbench.report.tables import markdown as speedups_in_words
from pages.blocks import RESULTS, ROOT, Shown, block, listed, newest, source, table
from pages.tables import records_of, view

AUDIT = newest("cpu/audit")


@block
def _source(*runs: str) -> str:
    return source(*map(newest, runs))


@block
def speedups(run: str, D: str) -> str:
    """Return the table of the Hopper kernel's speedups, as `fsbench run` writes it."""
    (configuration,) = (
        each for each in configurations(read_csv(RESULTS / newest(run))) if f"_d{D}_" in each.stem
    )
    section = speedups_in_words(configuration).split("## FlashSampling (Hopper)")[1]
    section = section.split("\n## ")[0]
    shown = Shown.from_rows(configuration.measured)
    return f"{section.strip()}\n\n{source(newest(run), shown=shown)}"


@block
def example(name: str) -> str:
    """Return the code of a script in examples/, without its docstring."""
    path = ROOT / "examples" / f"{name}.py"
    code = path.read_text(encoding="utf-8").split('"""\n\n', 1)[1]
    return f"```python\n{code.strip()}\n```"


@block
def methods() -> str:
    """Return the sampler of fsbench for each method of the paper."""
    facts = paper.source()
    fused = facts["fused"]
    rows = [[fused["method"], f"`{fused['provider']}`", fused["note"]]]
    rows += [
        [name, f"`{baseline['provider']}`", baseline["note"]]
        for name, baseline in facts["baselines"].items()
    ]
    return table(["method in the paper", "sampler of ours", "alike?"], rows, left=3)


@block
def verdicts(name: str = "checks") -> str:
    """Return how many checks of a view each sampler passed, and those of the ci tier it lacks."""
    checks, of_ci = view(name), view("ci-checks")
    rows = []
    for sampler, ended in checks.groupby("provider"):
        other, failed = (
            listed(f"`{each}`" for each in ended.name[ended.verdict == verdict]) or "none"
            for verdict in ("not exact", "FAILED")
        )
        ok = f"{(ended.verdict == 'ok').sum()} of {len(ended)}"
        expected = of_ci.name[of_ci.provider == sampler]
        lacking = listed(f"`{each}`" for each in expected[~expected.isin(ended.name)]) or "none"
        rows.append([f"`{sampler}`", ok, other, failed, lacking, f"{ended.seconds.sum():.0f} s"])
    heads = ["sampler", "ok", "not exact, as declared", "failed", "not run", "took"]
    return f"{table(heads, rows, left=5)}\n\n{source(*records_of(name))}"


@block
def audit(name: str = "cpu/audit/audit.jsonl") -> str:
    """Return the findings of the audit of one kind of machine, and the samplers without any."""
    record = newest(name)
    audits, _ = audited(read_verdicts([RESULTS / record]))
    clean = [each for each in audits if not each.findings]
    names = listed(f"`{each.sampler}`" for each in clean)
    text = f"Clean: {names}. The record has the number of checks and draws of each."
    if len(clean) < len(audits):
        text = f"{markdown([each for each in audits if each.findings], {})}\n\n{text}"
    return f"{text}\n\n{source(record)}"


@block
def audit_counts(name: str) -> str:
    """Return the worst that an audit found of each sampler, the checks that show it, and counts."""
    record = newest(name)
    audits, _ = audited(read_verdicts([RESULTS / record]))
    rows = []
    for each in audits:
        checks = listed(f"`{x.check}`" for x in each.findings if x.severity == each.severity)
        draws = f"{each.draws / 1e6:,.1f}"
        rows.append([f"`{each.sampler}`", each.package, each.severity, checks, each.checks, draws])
    heads = ["sampler", "package", "worst found", "by", "checks", "draws, millions"]
    return f"{table(heads, rows, left=4)}\n\n{source(record)}"


@block
def known_bugs() -> str:
    """Return planted bugs of released samplers, and the check that finds each."""
    audits, _ = audited(read_verdicts([RESULTS / AUDIT / "planted.jsonl"]))
    rows = []
    for each in audits:
        (finding,) = each.findings
        bug, _, where = each.sampler.removesuffix(")").rpartition(" (")
        draws = f"{each.draws:,}" if each.draws else "until the first wrong one"
        cells = (bug, where, f"`{finding.check}`", finding.severity, draws)
        rows.append([*cells, f"{finding.seconds:.0f}"])
    heads = ["bug", "was in", "found by", "severity", "draws", "seconds"]
    return f"{table(heads, rows, left=4)}\n\n{source(f'{AUDIT}/planted.jsonl')}"


@block
def filter_orders() -> str:
    """Return the order of filters and the rule of ties of every sampler with filters."""
    ties = {"first": "the lower token", "kept": "all", "any": "any"}
    rows = []
    for entry in discover().values():
        if entry.provider is None or not entry.provider.capabilities.filters:
            continue
        able = entry.provider.capabilities
        order = [stage for stage in able.filter_order if stage in ("temperature", *able.filters)]
        stages = ", ".join(stage.replace("_", "-") for stage in order)
        rows.append([f"`{entry.name}`", stages, ties[able.ties]])
    return table(["sampler", "order", "of equal logits it keeps"], rows, left=3)


@block
def e2e_models() -> str:
    """Return the models that `fsbench e2e` knows."""
    return f"Models: {listed(f'`{name}`' for name in decoders())}."


_CODES = 2**17
"""Codes with the largest Gumbels, all those above 10.4: no other decides a draw from the tail."""


def _uniforms() -> dict[str, np.ndarray]:
    """Return, by name of a map of 32 random bits, the Gumbels of its `_CODES` largest, ascending.

    Each map uses the number type that its name says; the logarithms are in float64 for all.
    """
    low = np.arange(_CODES, 0, -1) - 1  # the contract's largest Gumbels are of the smallest codes
    high = np.arange(2**32 - _CODES, 2**32)
    with np.errstate(divide="ignore"):
        paper = (high + 1).astype(np.float32) / np.float32(2**32 + 1)
        largest = {
            "this contract": -np.log(-np.log1p(-(low + 0.5) / 2**32)),
            "Appendix J in float64": -np.log(-np.log((high + 1) / (2**32 + 1))),
            "Appendix J in fp32": -np.log(-np.log(paper.astype(np.float64))),
            "24 bits, from 0 to 1 - 2^-24": -np.log(-np.log((high >> 8) / 2**24)),
        }
    return largest


@block
def tails_of_uniforms() -> str:
    """Return what maps of 32 random bits to a Gumbel do to the tail, for V = 151,936.

    The last columns are P(a tail token beats the dominant one) of the 2^32 codes over the exact
    one. Before them: the share of rows whose largest Gumbel should exceed the map's largest finite
    one, and the share of rows that have a Gumbel of +inf.
    """
    V = 151_936
    t = np.linspace(1e-9, 1 - 1e-9, 1_000_001)
    dominant = -np.log(-np.log(t))  # its Gumbel, at the quantiles t
    gaps = range(14, 26, 2)
    rows = []
    for name, g in _uniforms().items():
        last = g[np.isfinite(g)].max()
        beyond = -np.expm1(-V * np.exp(-last))
        codes = int(np.isinf(g).sum())
        infinite = f"{-np.expm1(V * np.log1p(-codes / 2**32)):.2%}" if codes else "0"
        row = [name, f"{last:.2f}", f"{beyond:.2g}", str(codes), infinite]
        for gap in gaps:
            p = (_CODES - np.searchsorted(g, dominant + gap, side="right")) / 2**32
            drawn = -np.expm1((V - 1) * np.log1p(-p)).mean()
            tail = (V - 1) * np.exp(-gap)
            share = abs(drawn) / (tail / (1 + tail))  # 0.0 may come as -0.0
            row.append(f"{share:.2f}" if share < 10 else f"{share:.0f}")
        rows.append(row)
    heads = ["uniform", "largest finite g", "rows beyond it", "codes with g = +inf"]
    return table([*heads, "rows with one", *(f"gap {gap}" for gap in gaps)], rows)
