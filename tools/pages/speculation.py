"""How often drafts are accepted: docs/speculation.md."""

from __future__ import annotations

import pandas as pd

from pages.blocks import (
    H200,
    RESULTS,
    block,
    bullets,
    places,
    said,
    span,
    table,
    with_source,
)

RATES = {
    "rejection": "rejection sampling",
    "token": "token noise",
    "group8": "groups of 8",
    "group": "group noise",
    "greedy": "greedy draft",
    "own": "noise of its own",
}
MODEL = "SmolLM2-135M"
DRAFTS, ARGMAX = "drafts/drafts.csv", "matmul, argmax"


def acceptance() -> pd.DataFrame:
    return pd.read_csv(RESULTS / "speculation" / "acceptance.csv")


def plain(found: pd.DataFrame) -> pd.DataFrame:
    return found[(found.top_k == 0) & (found.top_p == 1)]


def cells(row: pd.Series[float], names: list[str]) -> list[str]:
    return [f"{row[name]:.2f}" for name in names]


@block
def acceptance_synthetic() -> str:
    """Pairs of normal logits."""
    found = plain(acceptance())
    found = found[found.target != MODEL]
    names = ["tv", "bound", *RATES]
    rows = [
        [row.target.split()[1], row.drafter.split()[1], *cells(row, names)]
        for _, row in found.iterrows()
    ]
    heads = ["sigma", "noise", "TV", "(1 - TV) / (1 + TV)", *RATES.values()]
    return table(heads, rows, left=0) + "\n\n" + record()


@block
def acceptance_model() -> str:
    """Drafters of SmolLM2-135M."""
    found = acceptance()
    found = found[found.target == MODEL]
    names = [name for name in RATES if name != "group8"]
    rows = []
    for (drafter, T), of in found.groupby(["drafter", "temperature"], sort=False):
        both = [of[of.top_k == k] for k in (0, 20)]
        rows.append(
            [drafter, f"{T:g}"]
            + [
                " / ".join(f"{each[name].iloc[0]:.2f}" if len(each) else "-" for each in both)
                for name in ("tv", *names)
            ]
        )
    heads = ["drafter", "T", "TV", *(RATES[name] for name in names)]
    said_of = (
        f"Without filters / with them; {int(found.positions.max())} positions a row. Exact "
        "expectations, but for group noise with filters, which is counted, with a standard error "
        f"of up to {found.group_error.max():.2f}."
    )
    return f"{table(heads, rows)}\n\n{said_of} {record()}"


@block
def acceptance_findings() -> str:
    """What the tables say."""
    found = acceptance()
    sampled = found[found.temperature > 0]
    pairs, real = plain(found[found.target != MODEL]), sampled[sampled.target == MODEL]
    lost = sampled.rejection - sampled.token
    of_model = real.rejection - real.token
    group = pairs.token - pairs.group
    real_group = (real.token - real.group)[plain(real).index]
    below = int((pairs.group < pairs.bound).sum())
    filtered = real[real.top_k > 0]
    chance = (filtered.token - filtered.group) / filtered.group_error
    more = int((real.greedy > real.token).sum())
    gain = real[real.temperature >= 1]
    lines = (
        said(
            "Token noise is within its bounds in every row: ",
            (sampled.token >= sampled.bound).all(),
        )
        + f"it accepts {span(lost)} less than rejection sampling ({span(of_model)} on the model).",
        said("Group noise accepts less: ", group.min() > 0)
        + f"{span(group)} less than token noise on synthetic pairs, and in {below} of {len(pairs)} "
        f"rows less than token noise could at worst; on the model {span(real_group)} less, without "
        "filters. " + said("With filters the difference is within chance.", chance.abs().max() < 3),
        f"At T of 1 or more a greedy draft is accepted {span(gain.greedy)} of the time, a draft "
        f"with shared token noise {span(gain.token)}. In {more} of {len(real)} rows of the model "
        "the greedy draft was accepted more often.",
    )
    return bullets(*lines)


def ratios(what: str) -> pd.Series[float]:
    """Of a draft over cuBLAS and torch's argmax, for each shape."""
    found = pd.read_csv(H200 / DRAFTS)
    return found[found.what == what].ratio


@block
def draft_times() -> str:
    """Times of draft and verify steps."""
    found = pd.read_csv(H200 / DRAFTS)
    of = found.set_index(["d", "v", "b", "what"])
    verify = found[found.what == "verify"].set_index(["d", "v", "b"]).index
    shapes = of.index.droplevel("what").unique()
    steps = [shape for shape in shapes if shape not in verify]

    def cell(shape: tuple[int, ...], what: str) -> str:
        row = of.loc[(*shape, what)]
        return f"{row.time_us:.0f}" + ("" if what == ARGMAX else f" ({row.ratio:.2f})")

    def rows(shapes: list[tuple[int, ...]]) -> str:
        names = found[found[["d", "v", "b"]].apply(tuple, axis=1).isin(shapes)].what.unique()
        heads = ["what", *(f"V = {V:,}, B = {B}" for _, V, B in shapes)]
        return table(heads, ([what, *(cell(shape, what) for shape in shapes)] for what in names))

    def of_step(noise: str) -> str:
        both = [of.xs(f"{what}{noise}", level="what").time_us for what in ("verify", "step")]
        return span(both[0] / both[1])

    told = (
        f"Drafts from a screened head take {span(ratios('screened, greedy'))} of cuBLAS and argmax "
        f"if greedy, {span(ratios('screened, sampled'))} if sampled; from the bf16 head "
        f"{span(ratios('bf16, greedy'))} and {span(ratios('bf16, sampled'))}.",
        "Sampled drafts from a reduced head take "
        f"{span(found[found.what == 'reduced, sampled'].time_us, '.0f')} us.",
        f"A verify step takes {of_step('')} of a plain step with as many rows, with group noise "
        f"{of_step(', group noise')}.",
    )
    text = f"{rows(steps)}\n\n{rows(list(verify))}\n\n{bullets(*told)}"
    return with_source(text, *places(DRAFTS))


def record() -> str:
    return "[Record](ROOT/results/speculation)."
