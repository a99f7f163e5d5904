"""`fsbench hotvocab pipeline`: where sampling should stand in a pipeline of GPUs."""

from __future__ import annotations

import json
import operator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fsbench.cli.options import PATH, WORD, Json, integers, number, option, whole
from fsbench.cli.parsing import int_list
from fsbench.cli.tables import console, plain_table
from fsbench.errors import InvalidArgument, ResultsError, shown

if TYPE_CHECKING:
    from fsbench.simple.pipeline import Sampling


def pipeline(
    stages: Annotated[int, option("--stages", whole(1, 128), "Pipeline stages.")] = 4,
    stage_us: Annotated[
        float,
        option(
            "--stage-us", number(0, 1e12, above=True), "Time of a stage for one microbatch, us."
        ),
    ] = 2000.0,
    batch: Annotated[int, option("--batch", whole(), "Rows of a microbatch, B.")] = 64,
    in_flight: Annotated[
        str | None,
        option(
            "--in-flight",
            integers(1, 256),
            "Microbatches in flight, comma list. Default: stages, one and two more.",
        ),
    ] = None,
    run: Annotated[
        list[Path] | None,
        option("--run", PATH, "Results of `fsbench run` on a GPU: its samplers on the last stage."),
    ] = None,
    d: Annotated[int, option("--d", whole(), "Hidden size D of the results to take.")] = 4096,
    v: Annotated[int, option("--v", whole(), "Vocabulary V of the results to take.")] = 151936,
    plane: Annotated[
        list[Path] | None,
        option("--plane", PATH, "A folder of `fsbench hotvocab bench`: CPU samplers."),
    ] = None,
    bus_gb_s: Annotated[
        float,
        option(
            "--bus-gb-s", number(0, 1e12, above=True), "Bus rate where --plane has no copies, GB/s."
        ),
    ] = 50.0,
    sampler: Annotated[
        list[str] | None,
        option(
            "--sampler",
            WORD,
            "Another one: NAME:US on the last stage, NAME:US:US... also beside it.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict a pipeline with sampling on its last stage, fused into the LM head, or on CPUs.

    Prints the time between microbatches, tokens per second, the time from token to token, and how
    much of the stages' time is idle.
    """
    from fsbench.simple.pipeline import Pipeline, steady_state

    counts = int_list(in_flight, "--in-flight") if in_flight else [stages, stages + 1, stages + 2]
    samplings = [
        *[each for folder in run or [] for each in of_run(folder, batch, d, v)],
        *[each for folder in plane or [] for each in of_plane(folder, batch, v, bus_gb_s)],
        *(_of_text(text, stage_us) for text in sampler or []),
    ]
    if not samplings:
        raise InvalidArgument("--sampler: expected at least one, or --run or --plane; got none")
    rows = []
    for m in counts:
        made = Pipeline((stage_us,) * stages, m, batch)
        found = [(each, steady_state(made, each)) for each in samplings]
        fastest = min(outcome.cycle_us for _, outcome in found)
        for each, outcome in found:
            rows.append(
                {
                    "in_flight": m,
                    "sampler": each.name,
                    "on_stage_us": each.on_stage_us,
                    "beside_us": list(each.beside_us),
                    **asdict(outcome),
                    "bubble": outcome.bubble,
                    "times_fastest": outcome.cycle_us / fastest,
                }
            )
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print(rows, stages, stage_us, batch)


def of_run(folder: Path, batch: int, d: int, v: int) -> list[Sampling]:
    """What exact samplers add to the matmul alone, which is the slower of the lower bounds."""
    from fsbench.cli.reading import read_results
    from fsbench.provider import Kind
    from fsbench.simple.pipeline import Sampling

    frame = read_results([folder])
    here = frame[(frame.b == batch) & (frame.d == d) & (frame.v == v) & (frame.status == "ok")]
    floors = here[here.kind == str(Kind.LOWER_BOUND)].median_us
    exact = here[here.kind == str(Kind.EXACT)]
    if floors.empty or exact.empty:
        raise ResultsError(
            f"{folder}: expected exact samplers and the matmul alone at B={batch} D={d} V={v}"
        )
    return [
        Sampling(row.label, row.median_us - floors.max())
        for row in exact.sort_values("median_us").itertuples()
    ]


def of_plane(folder: Path, batch: int, v: int, bus_gb_s: float) -> list[Sampling]:
    """Copies and decisions of both designs of the core, by as many samplers as were measured."""
    import pandas as pd

    from fsbench.simple.pipeline import Sampling

    try:
        scaling = pd.read_csv(folder / "scaling.csv")
        fit = json.loads((folder / "fit.json").read_text())
        copies = folder / "copies.csv"
        times = pd.read_csv(copies) if copies.exists() else None
    except (OSError, ValueError) as error:
        raise ResultsError(
            f"--plane: expected a folder of `fsbench hotvocab bench`; got {folder}: {error}"
        ) from error
    if fit["v"] != v:
        raise ResultsError(f"{folder}: expected V={v}; it has {fit['v']}")
    found = []
    for design, rows in scaling.groupby("design"):
        best = rows.loc[rows.rows_per_s.idxmax()]
        what = "whole rows" if fit["hot"][design] == v else "hot tokens"
        bus_us = batch * fit["hot"][design] * 2 / bus_gb_s / 1e3
        if times is not None:
            copied = times[(times.b == batch) & (times.what.isin([what, "tokens back"]))]
            if copied.empty:
                raise ResultsError(f"{copies}: expected copies at B={batch}")
            bus_us = float(copied.time_us.sum())
        name = f"{design}, {best.samplers:.0f} CPU samplers"
        found.append(Sampling(name, 0.0, (bus_us, batch * 1e6 / best.rows_per_s)))
    return found


def _of_text(text: str, stage_us: float) -> Sampling:
    from fsbench.simple.pipeline import Sampling

    name, *numbers = text.split(":")
    us, least = number(-1e12, 1e12), [-stage_us, *(0 for _ in numbers)]
    try:
        on_stage, *beside = (us.read(each, "--sampler") for each in numbers)
        fine = bool(name.strip()) and all(map(operator.ge, (on_stage, *beside), least))
    except ValueError:
        fine = False
    if not fine:
        raise InvalidArgument(
            f"--sampler: expected NAME:US or NAME:US:US, such as cpu:0:150, with at least "
            f"-{stage_us:g} on the stage and 0 beside it; got {shown(text)}"
        )
    return Sampling(name, on_stage, tuple(beside))


def _print(rows: list[dict[str, Any]], stages: int, stage_us: float, batch: int) -> None:
    table = plain_table(f"{stages} stages of {stage_us:g} us, microbatches of {batch} rows")
    for heading in (
        "in flight",
        "sampler",
        "adds us",
        "cycle us",
        "tokens/s",
        "TPOT us",
        "bubbles",
    ):
        table.add_column(heading, justify="left" if heading == "sampler" else "right")
    previous = None
    for row in rows:
        if previous not in (None, row["in_flight"]):
            table.add_section()
        first = "" if previous == row["in_flight"] else str(row["in_flight"])
        previous = row["in_flight"]
        added = " + ".join(f"{us:.0f}" for us in (row["on_stage_us"], *row["beside_us"]))
        style = "bold" if row["times_fastest"] < 1.0005 else None
        table.add_row(
            first,
            row["sampler"],
            added,
            f"{row['cycle_us']:.0f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['step_us']:.0f}",
            f"{100 * row['bubble']:.1f} %",
            style=style,
        )
    console().print(table)
    print("adds: on the last stage, then beside it (bus, CPUs). Bold: the fastest, and its equals.")
