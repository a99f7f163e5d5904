"""The tables of docs/simple.md from a folder of `fsbench hotvocab bench`, in Markdown.

python tools/simple_tables.py results/cpu/simple-20261121   (or a folder of a machine with a GPU)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from fsbench.cli.hotvocab.pipeline import of_plane, of_run
from fsbench.simple.hot import Coverage
from fsbench.simple.pipeline import Pipeline, Sampling, simulate
from fsbench.simple.sizing import Cost, best

LEAN = Path(__file__).resolve().parent.parent / "results" / "h200" / "lean-20261121"

ADDING = {
    "flash_sampling_hopper": "fused (Hopper)",
    "gumbel_argmax": "one-pass argmax",
    "flashinfer_gumbel_lean": "FI2, lean",
    "exponential_race": "exponential race",
}
"""Samplers on the GPU whose time beyond the matmul stands beside the CPUs'."""

GOALS = {
    "full pass, rows/s of one core": 5000,
    "SHVS at its H*, times the full pass": 2.5,
    "scaling from 1 to 2 samplers": 0.9,
    "penalties at 4,096 seen tokens, times none": 1.1,
}
"""What was to be reached: at least this, but at most for penalties."""


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = [header, [":---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def steps(folder: Path) -> str:
    """Rows per second of one sampler in the four designs."""
    frame = pd.read_csv(folder / "steps.csv")
    plain, production = (frame[frame.controls == name] for name in ("plain", "production"))
    rows = [
        [
            f"{number}. {a.design}",
            f"{a.rows_per_s:,.0f}",
            f"{a.times_first:,.1f}",
            f"{b.rows_per_s:,.0f}",
            f"{b.times_first:,.1f}",
        ]
        for number, (a, b) in enumerate(
            zip(plain.itertuples(), production.itertuples(), strict=True), start=1
        )
    ]
    return table(
        ["design", "plain, rows/s", "x the port", "all controls, rows/s", "x the port"], rows
    )


def scaling(folder: Path) -> str:
    """Rows per second by samplers."""
    frame = pd.read_csv(folder / "scaling.csv")
    rows = []
    for m, each in frame.groupby("samplers"):
        cells = {row.design: row for row in each.itertuples()}
        rows.append(
            [str(m)]
            + [
                text
                for name in ("offloaded", "SHVS")
                for text in (f"{cells[name].rows_per_s:,.0f}", f"{cells[name].efficiency:.2f}")
            ]
        )
    return table(
        ["samplers", "offloaded, rows/s", "efficiency", "SHVS, rows/s", "efficiency"], rows
    )


def penalties(folder: Path) -> str:
    """Time of a row by how much its request has seen."""
    frame = pd.read_csv(folder / "penalties.csv")
    rows = [
        [f"{row.seen:,}", f"{row.row_us:.1f}", f"{row.ratio:.2f}"] for row in frame.itertuples()
    ]
    return table(["different tokens seen", "us per row", "x none"], rows)


def ring(folder: Path) -> str:
    """Cost of a step through the ring."""
    frame = pd.read_csv(folder / "ring.csv")
    rows = [
        [str(row.b), f"{row.ring_us:.0f}", f"{row.overhead_us:.0f}"] for row in frame.itertuples()
    ]
    return table(["B", "us per step", "of it the ring"], rows)


def sizes(folder: Path) -> str:
    """The best number of hot tokens, by the model and as measured."""
    facts, scans = json.loads((folder / "fit.json").read_text()), pd.read_csv(folder / "scans.csv")
    cover = Coverage(facts["v"], *(np.array(facts[name]) for name in ("sizes", "mean", "low")))
    cost = Cost(**facts["cost"])
    rows = []
    for both, name in ((False, "F, equation 10"), (True, "F2, the hot set always scanned")):
        found = best(cover, cost, both)
        root = "-" if found.root is None else f"{found.root:,.0f}"
        rows.append(
            [
                name,
                root,
                f"{found.H:,}",
                f"{float(cover.at(found.H)):.3f}",
                f"{1e6 / found.cost_us:,.0f}",
            ]
        )
    at = scans.loc[scans.row_us.idxmin()]
    rows.append(["measured", "", f"{at.h:,.0f}", f"{at.hits:.3f}", f"{1e6 / at.row_us:,.0f}"])
    return table(["", "H* by equation 12", "H* by enumeration", "covered", "rows/s"], rows)


def goals(folder: Path) -> str:
    """What was asked for, and what was measured."""
    steps_, scaling_ = (pd.read_csv(folder / f"{name}.csv") for name in ("steps", "scaling"))
    plain = steps_[steps_.controls == "plain"].set_index("design")
    two = scaling_[(scaling_.samplers == 2) & (scaling_.design == "offloaded")]
    seen = pd.read_csv(folder / "penalties.csv").set_index("seen")
    measured = [
        plain.rows_per_s["offloaded"],
        plain.times_offloaded["SHVS"],
        float(two.efficiency.iloc[0]),
        seen.ratio[4096],
    ]
    rows = []
    for (name, goal), value in zip(GOALS.items(), measured, strict=True):
        met = value <= goal if "penalties" in name else value >= goal
        sign = "at most" if "penalties" in name else "at least"
        rows.append(
            [
                name,
                f"{sign} {goal:,}",
                f"{value:,.2f}" if value < 100 else f"{value:,.0f}",
                "met" if met else "missed",
            ]
        )
    return table(["", "asked", "measured", ""], rows)


def pipelines(folder: Path) -> str:
    """Four stages of 2 ms, B = 64: the samplers of H200 results, and these on CPUs."""
    samplings = [*of_run(LEAN, 64, 4096, 151936), *of_plane(folder, 64, 151936, bus_gb_s=50)]
    rows = []
    for sampling in sorted(samplings, key=lambda each: each.on_stage_us + sum(each.beside_us)):
        cells = [sampling.name, " + ".join(f"{us:.0f}" for us in _added(sampling))]
        for m in (4, 5, 6):
            found = simulate(Pipeline((2000.0,) * 4, m, 64), sampling)
            cells += [f"{found.tokens_per_s:,.0f} ({100 * found.bubble:.1f} %)"]
        rows.append(cells)
    header = ["sampler", "adds, us", *(f"{m} in flight" for m in (4, 5, 6))]
    return table(header, rows)


def exposed(folder: Path) -> str:
    """Time per step that a GPU waits for the CPUs, beside what samplers on the GPU add to it."""
    waits = pd.read_csv(folder / "overlap.csv").set_index(["design", "b"])
    lean = pd.read_csv(LEAN / "results.csv").query("d == 4096")
    adds = lean.set_index(["provider", "b"]).median_us.unstack(0)
    adds = adds.sub(adds.matmul_only, axis=0)
    rows = [
        [
            str(B),
            *(
                f"{waits[column][design, B]:,.0f}"
                for design in ("offloaded", "SHVS")
                for column in ("exposed_serial_us", "exposed_overlapped_us")
            ),
            *(f"{adds[name][B]:.0f}" for name in ADDING),
        ]
        for B in adds.index
    ]
    designs = [
        f"{name}, {how}" for name in ("offloaded", "SHVS") for how in ("serial", "overlapped")
    ]
    return table(["B", *designs, *ADDING.values()], rows)


def _added(sampling: Sampling) -> tuple[float, ...]:
    return sampling.beside_us or (sampling.on_stage_us,)


TABLES = {
    "goals": goals,
    "steps": steps,
    "scaling": scaling,
    "penalties": penalties,
    "ring": ring,
    "sizes": sizes,
    "pipelines": pipelines,
}

HOST_TABLES = {"scaling": scaling, "exposed": exposed}
"""Those of a run on a machine with a GPU."""

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    makes = HOST_TABLES if (folder / "overlap.csv").exists() else TABLES
    for make in makes.values():
        print(make(folder), end="\n\n")
