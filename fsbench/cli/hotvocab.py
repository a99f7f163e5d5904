"""`fsbench hotvocab`: SIMPLE's models of the number of hot tokens and of a pipeline.

`fsbench run` times SIMPLE's samplers.
"""

from __future__ import annotations

import json
import operator
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsbench.cli.options import (
    PATH,
    WORD,
    Json,
    ResultsFolder,
    argument,
    integers,
    number,
    option,
    whole,
)
from fsbench.cli.parsing import int_list
from fsbench.cli.tables import console, plain_table, table
from fsbench.errors import InvalidArgument, ResultsError, shown

if TYPE_CHECKING:
    import pandas as pd

    from fsbench.simple.hot import Coverage
    from fsbench.simple.pipeline import Sampling
    from fsbench.simple.sizing import Cost

app = typer.Typer(
    no_args_is_help=True,
    help="Sampling on CPUs (SIMPLE): size its hot set, predict a pipeline.",
)

_DOCUMENTS = 1024  # documents of the synthetic trace; rows of logits are from later documents


@app.command()
def fit(
    v: Annotated[int, option("--v", whole(64, 2**22), "Vocabulary size V.")] = 151936,
    rows: Annotated[
        int, option("--rows", whole(4, 2**12), "Rows of logits; should exceed the caches.")
    ] = 128,
    repeats: Annotated[int, option("--repeats", whole(5, 10**6), "Measurements of each H.")] = 200,
    trace: Annotated[
        Path | None,
        option(
            "--trace", PATH, "Token ids, a document per row (.npy or text). Default: a Zipf model."
        ),
    ] = None,
    out: ResultsFolder = None,
) -> None:
    """Fit the cost of a scan, T(H) = c H + c0, and count the hot tokens' coverage on a trace.

    Writes scans.csv, fit.json and env.json, which `fsbench hotvocab size` reads.
    """
    import numpy as np
    import pandas as pd
    import torch

    from fsbench.machine.environment import environment
    from fsbench.records.store import new_folder, write_environment
    from fsbench.simple import hot, sizing
    from fsbench.simple.native import isa
    from fsbench.simple.zipf import ZipfText

    tokens = None if trace is None else hot.read_trace(trace, v)
    if rows * v > 2**31:  # 8 GiB in fp32
        raise InvalidArgument(f"--rows: expected at most {2**31 // v} with --v {v}; got {rows}")
    facts = {**environment("cpu", sys.argv), "isa": isa()}
    folder = out or new_folder(facts, "hotvocab")
    write_environment(folder, facts)

    text = ZipfText(v)
    counted, held_out = hot.halves(text.trace(range(_DOCUMENTS)) if tokens is None else tokens)
    order = hot.order_of(counted, v)
    cover = hot.coverage(order, held_out)
    logits = text.logits(rows, first=_DOCUMENTS)[:, torch.from_numpy(order)].contiguous()
    sizes = np.unique(np.geomspace(min(256, v // 4), v, 16).round().astype(int)).tolist()
    table, times = sizing.scans(logits, sizes, repeats)
    if trace is not None:  # the rows are the model's: their speed says nothing about this trace
        for row in table:
            row.update(dict.fromkeys(("row_us", "lo_us", "hi_us", "hits"), None))
    # The whole vocabulary is another path, without a tail; the model is of the hot path.
    fitted = {
        "v": v,
        "trace": f"ZipfText(V={v})" if trace is None else trace.name,
        "cost": vars(sizing.fit(np.array(sizes[:-1]), times[:-1])),
        "sizes": cover.sizes.tolist(),
        "mean": cover.mean.tolist(),
    }
    pd.DataFrame(table).to_csv(folder / "scans.csv", index=False, float_format="%.6g")
    (folder / "fit.json").write_text(json.dumps(fitted, indent=1) + "\n")
    print(f"wrote {folder}/scans.csv, {folder}/fit.json")
    _print_size(folder)


@app.command()
def size(
    folder: Annotated[Path, argument("FOLDER", PATH, "Folder that `fit` wrote.")],
    c_us: Annotated[
        float | None,
        option("--c-us", number(0, 1e12, above=True), "Another c, us per token; with --c0-us."),
    ] = None,
    c0_us: Annotated[float | None, option("--c0-us", number(0, 1e12), "Another c0, us.")] = None,
) -> None:
    """Choose the number of hot tokens by SIMPLE's model (equations 10 to 12)."""
    if (c_us is None) != (c0_us is None):
        raise InvalidArgument("--c-us: expected together with --c0-us")
    _print_size(folder, c_us, c0_us)


@app.command()
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
    sampler: Annotated[
        list[str] | None,
        option(
            "--sampler",
            WORD,
            "Another sampler: NAME:US on the last stage; NAME:US:US... also off it (bus, CPUs).",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict a pipeline with sampling on its last stage, fused into the LM head, or on CPUs.

    Prints the time between microbatches, tokens per second, the time per output token, and the
    idle share of the stages.
    """
    from fsbench.simple.pipeline import steady_state

    counts = int_list(in_flight, "--in-flight") if in_flight else [stages, stages + 1, stages + 2]
    samplings = [
        *[each for folder in run or [] for each in of_run(folder, batch, d, v)],
        *(_of_text(text, stage_us) for text in sampler or []),
    ]
    if not samplings:
        raise InvalidArgument("--sampler: expected at least one, or --run; got none")
    rows = []
    for m in counts:
        outcomes = [(each, steady_state(stages, stage_us, m, batch, each)) for each in samplings]
        fastest = min(outcome.cycle_us for _, outcome in outcomes)
        for each, outcome in outcomes:
            rows.append(
                {
                    "in_flight": m,
                    "sampler": each.name,
                    "on_stage_us": each.on_stage_us,
                    "beside_us": list(each.beside_us),
                    **asdict(outcome),
                    "times_fastest": outcome.cycle_us / fastest,
                }
            )
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print_pipelines(rows, f"{stages} stages of {stage_us:g} us, microbatches of {batch} rows")


def of_run(folder: Path, batch: int, d: int, v: int) -> list[Sampling]:
    """Return what exact samplers add to the matmul alone, the slower of the lower bounds."""
    from fsbench.cli.result_frames import read_results
    from fsbench.provider import Kind
    from fsbench.simple.pipeline import Sampling

    frame = read_results([folder])
    cells = frame[(frame.b == batch) & (frame.d == d) & (frame.v == v) & (frame.status == "ok")]
    if cells.graph.any():  # an eager time contains gaps that the matmul's has not
        cells = cells[cells.graph]
    floors = cells[cells.kind == str(Kind.LOWER_BOUND)].median_us
    exact = cells[cells.kind == str(Kind.EXACT)]
    if floors.empty or exact.empty:
        raise ResultsError(
            f"{folder}: expected exact samplers and the matmul alone at B={batch} D={d} V={v}"
        )
    return [
        Sampling(row.label, row.median_us - floors.max())
        for row in exact.sort_values("median_us").itertuples()
    ]


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
            f"-{stage_us:g} on the stage and 0 off it; got {shown(text)}"
        )
    return Sampling(name, on_stage, tuple(beside))


def _print_pipelines(rows: list[dict[str, Any]], title: str) -> None:
    table = plain_table(title)
    for heading in ("in flight", "sampler", "adds us", "cycle us", "tokens/s", "TPOT us"):
        table.add_column(heading, justify="left" if heading == "sampler" else "right")
    table.add_column("bubbles", justify="right")
    previous = None
    for row in rows:
        if previous not in (None, row["in_flight"]):
            table.add_section()
        first = "" if previous == row["in_flight"] else str(row["in_flight"])
        previous = row["in_flight"]
        added = " + ".join(f"{us:.0f}" for us in (row["on_stage_us"], *row["beside_us"]))
        table.add_row(
            first,
            row["sampler"],
            added,
            f"{row['cycle_us']:.0f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['step_us']:.0f}",
            f"{100 * row['bubble']:.1f} %",
            style="bold" if row["times_fastest"] < 1.0005 else None,
        )
    console().print(table)
    print("adds: time on the last stage, then off it (bus, CPUs). Bold: the fastest, and ties.")


def _read_fit(folder: Path) -> tuple[Coverage, Cost, pd.DataFrame]:
    """Read the files of `fit`; raise ResultsError if they are not valid."""
    import numpy as np
    import pandas as pd

    from fsbench.simple.hot import Coverage
    from fsbench.simple.sizing import Cost

    try:
        facts = json.loads((folder / "fit.json").read_text())
        scans = pd.read_csv(folder / "scans.csv")
        cover = Coverage(facts["v"], np.array(facts["sizes"]), np.array(facts["mean"]))
        return cover, Cost(**facts["cost"]), scans
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(
            f"{folder}: expected a folder of `fsbench hotvocab fit`; {error}"
        ) from error


def _print_size(folder: Path, c_us: float | None = None, c0_us: float | None = None) -> None:
    from fsbench.simple import sizing

    cover, cost, scans = _read_fit(folder)
    if c_us is not None and c0_us is not None:
        cost = sizing.Cost(c_us, c0_us, (c_us, c_us), (c0_us, c0_us))
    rows: list[dict[str, Any]] = []
    for both, name in ((False, "F, eq. 10"), (True, "F2, hot always scanned")):
        best = sizing.best(cover, cost, both)
        hits, us = float(cover.share(best.H)), best.cost_us
        rows.append({"name": name, "root": best.root, "h": best.H, "hits": hits, "us": us})
    if c_us is None and scans.row_us.notna().all():
        fastest = scans.loc[scans.row_us.idxmin()]
        measured = {"h": int(fastest.h), "hits": fastest.hits, "us": fastest.row_us}
        rows.append({"name": "measured", "root": None, **measured})
    columns = [
        *(("", "{name:<}"), ("H*, eq. 12", "{root:,.0f}"), ("H*, least", "{h:,}")),
        *(("covered", "{hits:.3f}"), ("us", "{us:.2f}"), ("rows/s", "{rate:,.0f}")),
    ]
    shown = [{**row, "rate": 1e6 / row["us"]} for row in rows]
    console().print(table(columns, shown, "Hot tokens: how many, and what a row then costs"))
    low, high = cost.c_interval_us
    low0, high0 = cost.c0_interval_us
    print(
        f"c = {1e3 * cost.c_us:.4f} ns per token [{1e3 * low:.4f}, {1e3 * high:.4f}], "
        f"c0 = {cost.c0_us:.2f} us [{low0:.2f}, {high0:.2f}]"
    )
