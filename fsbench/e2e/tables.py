"""Write e2e.csv and the tables of `fsbench e2e`, in the shape of the paper's Tables 7 and 8."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fsbench.e2e.models import PLAIN
from fsbench.e2e.records import read
from fsbench.e2e.summary import is_reference, summary
from fsbench.paper.tables import table
from fsbench.records.disk import write_into
from fsbench.records.sheet import as_csv, filled, markdown_table

if TYPE_CHECKING:
    import pandas as pd

_TIME = "{tpot_ms:.3f} [{tpot_min_ms:.3f}, {tpot_max_ms:.3f}]"
_SAVED = "{reduction_pct:.1f} ± {reduction_sd_pct:.1f} || {reduction_pct:.1f}"
_STEP_SAVED = "{itl_ms:.3f}: {itl_reduction_pct:.1f} ± {itl_reduction_sd_pct:.1f} || {itl_ms:.3f}"
_POSSIBLE = " (profile: {possible_pct:.1f})"
"""The savings that the profiles allow."""

_PARTS = {
    "B": "{b}",
    "sampler": "{label}",
    "step": "{step_us:.0f}",
    "head + sampling": "{draw_us:.0f}",
    "head": "{matmul_us:.0f}",
    "rest": "{rest_us:.0f}",
    "busy": "{busy_us:.0f}",
    "busy, saved %": (
        "{gpu_reduction_pct:.1f} ± {gpu_reduction_sd_pct:.1f} || {gpu_reduction_pct:.1f}"
    ),
    "idle": "{gap_us:.0f}",
    "p95 / p99, ms": "{step_p95_ms:.3f} / {step_p99_ms:.3f}",
}
"""Heading -> text, from the columns of the summary."""

_DRAFTS = {
    "B": "{b}",
    "drafts": "{label}",
    "tokens/s": "{tokens_per_s:.0f}",
    "accepted per step": "{accepted:.2f}",
    "a draft, us": "{draft_us:.1f}",
    "of it head + draw, %": "{draft_draw_pct:.0f}",
    "tokens as without drafts, %": "{same_pct:.4g}",
}


def write_tables(folder: Path) -> pd.DataFrame:
    """Write e2e.csv and e2e.md of a results folder; return the summary."""
    frame = summary(read(folder))
    write_into(folder, {"e2e.csv": as_csv(frame, index=False), "e2e.md": markdown(frame)})
    return frame


def markdown(frame: pd.DataFrame) -> str:
    """Return times (Table 7), savings (Table 8) and times of parts for each engine and model."""
    parts = []
    keys = ["engine", "model", "tp", "requests"]
    for (engine, model, tp, requests), rows in frame.groupby(keys, sort=False):
        first = rows.iloc[0]
        kind = "" if requests == PLAIN else f", {requests} requests"
        kind += f", {first.drafts} drafts per step" if first.drafts else ""
        parts.append(f"## {model} in {engine}, {tp} x {first.gpu or 'CPU'}{kind}")
        failed = rows[rows.status != "ok"].drop_duplicates(["sampler", "reason"])
        parts += [f"{row.label}: {row.status}, {row.reason}." for row in failed.itertuples()]
        measured = rows[rows.runs > 0]
        if measured.empty:
            continue
        first = measured.iloc[0]
        parts.append(
            f"Random weights, {first['dtype']}; prompts of {first.prompt_tokens:.0f} tokens, "
            f"{first.output_tokens:.0f} tokens for each of B requests that start together; "
            f"{measured.runs.max()} interleaved runs."
        )
        parts.append("### Median time per output token, ms [lowest, highest run]")
        parts.append(_by_sampler(measured, (_TIME,), {}))
        base = measured[measured.baseline]
        references = measured[measured.apply(is_reference, axis=1)].label.unique()
        if len(references):
            parts.append(
                f"On a CPU {', '.join(references)} runs its reference, so its gain is not "
                "reported; measure it on a GPU."
            )
        compared = measured[~measured.baseline & measured.reduction_pct.notna()]
        if not base.empty and not compared.empty:
            parts.append(
                f"### Time saved, % of {base.iloc[0].label} (median and standard deviation of runs)"
            )
            more = _bound(base)
            if requests == PLAIN:  # as the paper's were
                more |= _paper(str(engine), str(model), int(str(tp)))
            parts.append(_by_sampler(compared, (_SAVED, _POSSIBLE), more))
            if compared.itl_ms.notna().any():
                parts.append(
                    f"### Median time between two tokens, ms, and % of {base.iloc[0].label}'s saved"
                )
                parts.append(_by_sampler(measured, (_STEP_SAVED,), {}))
        if measured.accepted.notna().any():
            parts.append("### Drafts")
            parts.append(_by_case(measured, _DRAFTS))
        if measured.draw_us.notna().any():
            parts.append("### Where the time of a step goes, us")
            profiled = measured[measured.draw_us.notna()]
            us = {"step_us": 1e3 * profiled.tpot_ms, "busy_us": 1e3 * profiled.gpu_tpot_ms}
            parts.append(_by_case(profiled.assign(**us), _PARTS))
    return "\n\n".join(parts) + "\n"


def _by_sampler(
    rows: pd.DataFrame,
    templates: tuple[str, ...],
    more: dict[str, dict[int, str]],
) -> str:
    """Return a table with a row per B and a column per sampler.

    Args:
        more: further columns, heading -> B -> text.
    """
    labels = list(dict.fromkeys(rows.label))
    lines = []
    for B, group in rows.groupby("b"):
        texts = {
            row.label: "".join(filled(each, row) for each in templates)
            for _, row in group.iterrows()
        }
        cells = [texts.get(label, "") for label in labels]
        lines.append([str(B), *cells, *(column.get(int(str(B)), "") for column in more.values())])
    return markdown_table(["B", *labels, *more], lines)


def _bound(base: pd.DataFrame) -> dict[str, dict[int, str]]:
    """Return Amdahl's bound: the savings if sampling took no time, with the same LM head."""
    rows = base[base.amdahl_pct.notna()]
    if rows.empty:
        return {}
    return {"sampling in no time": {int(r.b): f"{r.amdahl_pct:.1f}" for r in rows.itertuples()}}


def _paper(engine: str, model: str, tp: int) -> dict[str, dict[int, str]]:
    """Return Table 8 of the paper (a B200) for the same model and number of GPUs."""
    if engine != "vllm":
        return {}
    published = table(8)
    same = published[(published.model.str.lower() == model) & (published.tp == tp)]
    if same.empty:
        return {}
    cells = {int(r.b): f"{r.reduction_pct:.1f} ± {r.sd_pct:.1f}" for r in same.itertuples()}
    return {"the paper's fork, B200": cells}


def _by_case(rows: pd.DataFrame, columns: dict[str, str]) -> str:
    """Return a table with a row per case, ordered by B, without columns that are empty."""
    ordered = [row for _, row in rows.sort_values("b", kind="stable").iterrows()]
    cells = {name: [filled(each, row) for row in ordered] for name, each in columns.items()}
    kept = {name: texts for name, texts in cells.items() if any(texts)}
    return markdown_table(list(kept), [list(row) for row in zip(*kept.values(), strict=True)])
