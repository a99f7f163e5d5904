"""How far apart rollouts and trainers compute log-probabilities: docs/log-probabilities.md."""

from __future__ import annotations

import pandas as pd

from pages.blocks import RESULTS, block, bullets, listed, said, span, table, with_source

RECORD = "h200/mismatch/mismatch.csv"
NAMES = {"bf16": "bf16 logits and softmax", "log_softmax": "bf16 logits, fp32 softmax"}
OURS = ("score", "flash_sample")
FINE = ("fp32 logits", *OURS)
SHARES = {"beyond_0.01": "beyond 1 ± 0.01", "beyond_0.001": "1 ± 0.001", "unequal": "not 1"}


@block
def mismatch() -> str:
    """Every pair, at its worst batch size; what that says."""
    found = pd.read_csv(RESULTS / RECORD)
    laws = list(found.logits.unique())
    pairs = found.groupby(["rollout", "trainer", "logits"], sort=False).max(numeric_only=True)
    order = dict.fromkeys((r, t) for t, r in zip(found.trainer, found.rollout, strict=True))

    def cells(pair: tuple[str, str], column: str, form: str) -> str:
        values = (pairs.loc[(*pair, law), column] for law in laws)
        return " / ".join(f"{value:{form}}" if value else "0" for value in values)

    rows = [
        [NAMES.get(pair[0], pair[0]), NAMES.get(pair[1], pair[1])]
        + [cells(pair, column, ".1e") for column in ("mean", "max", "kl")]
        + [cells(pair, column, ".0%") for column in SHARES]
        for pair in order
    ]
    heads = ["rollout", "trainer", "mean", "max", "KL", *SHARES.values()]
    # Rounded on one side only.
    apart = found[(found.rollout == "log_softmax") & found.trainer.isin(FINE)]
    alike = found[(found.rollout == "log_softmax") & (found.trainer == "log_softmax")]
    wrong = found[(found.rollout == "log_softmax") & (found.trainer == "float64")]
    fine = found[found.rollout.isin(FINE)]
    ours = found[found.rollout.isin(OURS) & (found.trainer == "score")]
    batches = [str(b) for b in sorted(found[found.trainer != "float64"].batch.unique())]
    lines = (
        said("bf16 logits on one side move ratios", apart["beyond_0.01"].min() > 0)
        + f": against fp32 logits or `score` {span(apart['beyond_0.01'], '.0%')} of them leave "
        f"1 ± 0.01, and {span(apart['beyond_0.001'], '.0%')} leave 1 ± 0.001.",
        said(
            "bf16 logits on both sides agree, and both are wrong",
            alike["max"].max() < wrong["mean"].min() / 10,
        )
        + f": they differ by {_at_most(alike['max'].max())}, and are off by "
        f"{span(wrong['mean'], '.1e')} on average.",
        said(
            "fp32 logits, `score` and `flash_sample` leave no ratio beyond 1 ± 0.001",
            fine["beyond_0.001"].max() == 0,
        )
        + f": they are within {fine['max'].max():.0e} of float64 and of each other.",
        said("`flash_sample` and `score` have the same bits", ours.unequal.max() == 0)
        + ", whatever their batch sizes.",
    )
    shape = f"D = {found.d[0]:,}, V = {found.v[0]:,}, {found.tokens[0]} drawn tokens"
    caption = (
        f"`{'` / `'.join(laws)}` logits, {shape}. Mean and maximum are of the absolute difference "
        f"of log-probabilities. The rollout has {listed(batches)} rows at a time, of which the "
        "worst is shown; the trainer has all at once. KL is the mean of r - 1 - log r."
    )
    text = f"{table(heads, rows, left=2)}\n\n{caption}\n\n{bullets(*lines)}"
    return with_source(text, RECORD)


def _at_most(largest: float) -> str:
    return f"at most {largest:.0e}" if largest else "nothing"
