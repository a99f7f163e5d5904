"""Commands of `fsbench hotvocab`: fit, size, bench, exact and plot."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsbench.cli.hotvocab.tables import print_bench, print_size, read_fit
from fsbench.cli.parsing import int_list
from fsbench.errors import InvalidArgument

if TYPE_CHECKING:
    from fsbench.simple.bench import Setup

V = Annotated[int, typer.Option("--v", help="Vocabulary size V.", min=64)]
ROWS = Annotated[int, typer.Option(help="Rows of logits; more than caches hold.", min=4)]
REPEATS = Annotated[int, typer.Option(help="Times that each H is measured.", min=5)]
TRACE = Annotated[
    Path | None,
    typer.Option(help="Token ids, a document per row (.npy or text). Default: a Zipf model."),
]
OUT = Annotated[
    Path | None, typer.Option(help="Folder. Default: results/<gpu>/<utc>-<commit>-simple.")
]

_DOCUMENTS = 1024  # of the model's trace; the rows of logits are of later ones


def fit(
    v: V = 151936,
    rows: ROWS = 128,
    repeats: REPEATS = 200,
    trace: TRACE = None,
    out: OUT = None,
) -> None:
    """Fit the cost of a scan, T(H) = c H + c0, and count the hot tokens' coverage on a trace."""
    folder, _ = _folder(out, "cpu")
    _fit(folder, v, rows, repeats, trace)
    print_size(folder)


def size(
    folder: Annotated[Path, typer.Argument(help="Folder that `fit` or `bench` wrote.")],
    c_us: Annotated[
        float | None, typer.Option("--c-us", help="Another c, us per token; with --c0-us.")
    ] = None,
    c0_us: Annotated[float | None, typer.Option("--c0-us", help="Another c0, us.")] = None,
) -> None:
    """Choose the number of hot tokens by SIMPLE's model (equations 10 to 12)."""
    if (c_us is None) != (c0_us is None):
        raise InvalidArgument("--c-us: expected together with --c0-us")
    print_size(folder, c_us, c0_us)


def bench(
    v: V = 151936,
    rows: ROWS = 128,
    repeats: REPEATS = 100,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=2)] = 9,
    samplers: Annotated[
        str | None, typer.Option(help="Numbers of samplers, comma list. Default: 1, 2, 4, ...")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    batch: Annotated[str, typer.Option(help="B of the GPU's part.")] = "1,2,4,8,16,32,64,128,256",
    d: Annotated[int, typer.Option("--d", help="Hidden size D of the GPU's part.")] = 4096,
    body: Annotated[
        int, typer.Option(help="Layers of the GPU's part, in reads of the LM head.", min=0)
    ] = 12,
    out: OUT = None,
) -> None:
    """Measure the four designs, scaling, penalties and the ring; with a GPU, copies and overlap."""
    from fsbench.cli.devices import device_to_use
    from fsbench.simple import bench as measure

    device = device_to_use(device)
    folder, facts = _folder(out, device)
    from fsbench.machine import hardware

    begin = time.monotonic(), hardware.cpu_seconds()
    setup = _fit(folder, v, rows, repeats, None, rounds)
    counts = int_list(samplers, "--samplers") if samplers else measure.sampler_counts()
    _write(folder, "ring", measure.ring(rounds))
    _write(folder, "steps", measure.steps(setup))
    _write(folder, "scaling", measure.scaling(setup, counts))
    _write(folder, "penalties", measure.penalties(setup))
    if device == "cuda":
        _measure_gpu(folder, setup, d, body, int_list(batch, "--batch"), max(1, max(counts) - 1))
    facts["others_cores"] = _others_cores(*begin)
    _write_facts(folder, facts)
    print_size(folder)
    print_bench(folder)
    _warn_of_others(facts["others_cores"])
    _draw(folder, folder, ["png"], facts)


def exact(
    v: V = 151936,
    hot: Annotated[int, typer.Option(help="Hot tokens, H.", min=1)] = 14336,
    steps: Annotated[int, typer.Option(help="Decode steps.", min=1)] = 100,
    rows: Annotated[int, typer.Option(help="Rows of a step.", min=1)] = 8,
    out: OUT = None,
) -> None:
    """Bound the distance of SHVS's distribution from the baseline's, step by step (Figure 12)."""
    from fsbench.simple.bench import variation

    folder, _ = _folder(out, "cpu")
    table = variation(_setup(v, hot, min(4 * rows, 64)), steps, rows)
    _write(folder, "variation", table)
    for controls in dict.fromkeys(row["controls"] for row in table):
        last = [row for row in table if row["controls"] == controls][-1]
        print(
            f"{controls}: {steps} steps, {last['draws']} draws each, mean total variation at most "
            f"{last['mean_distance']:.2g}, below {last['mean_distance_below']:.2g} at 95 %"
        )


def plot(
    folder: Annotated[Path, typer.Argument(help="Folder that `fit` or `bench` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("plots"),
    formats: Annotated[str, typer.Option("--format", help="Comma list of png, pdf, svg.")] = "png",
) -> None:
    """Draw what `fit` and `bench` measured. Needs no GPU."""
    from fsbench.figures.parts import check_formats
    from fsbench.records.store import read_environment

    suffixes = check_formats(name.strip() for name in formats.split(","))
    _draw(folder, out, suffixes, read_environment(folder))


def _folder(out: Path | None, device: str) -> tuple[Path, dict[str, Any]]:
    """The folder of this run, with its env.json."""
    from fsbench.cli.measuring import new_folder
    from fsbench.machine.environment import environment
    from fsbench.records.store import SCHEMA
    from fsbench.simple.native import isa

    facts = {"schema": SCHEMA, **environment(device, sys.argv), "isa": isa()}
    folder = out or new_folder(facts, "simple")
    _write_facts(folder, facts)
    return folder, facts


def _write_facts(folder: Path, facts: dict[str, Any]) -> None:
    from fsbench.records.disk import refusals, write_atomically

    with refusals("write results in", folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "env.json", json.dumps(facts, indent=2) + "\n")


def _others_cores(since: float, then: tuple[float, float] | None) -> float | None:
    """Cores that other processes kept busy meanwhile, on average."""
    from fsbench.machine import hardware

    now = hardware.cpu_seconds()
    if then is None or now is None:
        return None
    busy, own = (after - before for after, before in zip(now, then, strict=True))
    return round(max(0.0, busy - own) / (time.monotonic() - since), 3)


def _warn_of_others(cores: float | None) -> None:
    if cores is not None and cores > 0.1:
        print(
            f"warning: other processes kept {cores:.1f} cores busy meanwhile; "
            "times and scaling are worse for it",
            file=sys.stderr,
        )


def _write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    import pandas as pd

    pd.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
    print(f"wrote {folder}/{name}.csv", flush=True)


def _setup(v: int, hot: int, rows: int) -> Setup:
    """The model's rows, hot tokens first."""
    import torch

    from fsbench.simple import bench
    from fsbench.simple.hot import halves, order_of
    from fsbench.simple.zipf import ZipfText

    if hot > v:
        raise InvalidArgument(f"--hot: expected at most --v {v}; got {hot}")
    text = ZipfText(v)
    order = torch.from_numpy(order_of(halves(text.trace(range(_DOCUMENTS)))[0], v))
    return bench.Setup(v, hot, order, text.logits(rows, first=_DOCUMENTS)[:, order].contiguous())


def _fit(
    folder: Path, v: int, rows: int, repeats: int, trace: Path | None, rounds: int = 9
) -> Setup:
    """Measure scans, count coverage, write scans.csv and fit.json; the setup at H*."""
    import numpy as np
    import torch

    from fsbench.simple import bench, hot, sizing
    from fsbench.simple.zipf import ZipfText

    text = ZipfText(v)
    tokens = hot.read_trace(trace, v) if trace else text.trace(range(_DOCUMENTS))
    counted, held_out = hot.halves(tokens)
    order = hot.order_of(counted, v)
    cover = hot.coverage(order, held_out)
    places = torch.from_numpy(order)
    logits = text.logits(rows, first=_DOCUMENTS)[:, places].contiguous()
    setup = bench.Setup(v, v, places, logits, [], rounds)
    sizes = np.unique(np.geomspace(min(256, v), v, 16).round().astype(int)).tolist()
    table, times = bench.scans(setup, sizes, repeats)
    if trace:  # the rows are the model's: their speed says nothing about this trace
        for row in table:
            row.update(dict.fromkeys(("row_us", "lo_us", "hi_us", "hits", "times_full"), None))
    # The whole vocabulary is another path, without a tail; the model is of the hot path.
    cost = sizing.fit(np.array(sizes[:-1]), times[:-1])
    best = sizing.best(cover, cost, both=True).H
    facts = {
        "v": v,
        "trace": trace.name if trace else f"ZipfText(V={v})",
        "cost": vars(cost),
        "hot": {"offloaded": v, "SHVS": best},
        "sizes": cover.sizes.tolist(),
        "mean": cover.mean.tolist(),
        "low": cover.low.tolist(),
    }
    _write(folder, "scans", table)
    (folder / "fit.json").write_text(json.dumps(facts, indent=1) + "\n")
    return bench.Setup(v, best, places, logits, bench.histories(text), rounds)


def _measure_gpu(
    folder: Path, setup: Setup, d: int, body: int, batches: list[int], samplers: int
) -> None:
    import torch

    from fsbench.simple import bus

    generator = torch.Generator("cuda").manual_seed(0)
    # A matmul of usual numbers, whose products with these hidden states are the logits of `setup`.
    rows = setup.logits[:d].to("cuda", torch.bfloat16)
    hidden = torch.eye(d, device="cuda", dtype=torch.bfloat16)[: len(rows)].contiguous()
    weight = torch.randn(setup.V, d, generator=generator, device="cuda", dtype=torch.bfloat16)
    weight.div_(d**0.5)
    weight[:, : len(rows)] = rows.T
    _write(folder, "copies", bus.copies(setup.V, setup.hot, batches))
    _write(folder, "overlap", bus.overlap(hidden, weight, setup.hot, body, batches, samplers))


def _draw(folder: Path, out: Path, suffixes: Iterable[str], facts: dict[str, Any]) -> None:
    import pandas as pd

    from fsbench.figures import hotvocab as figures
    from fsbench.figures.parts import save

    cover, cost, scans = read_fit(folder)
    where = f"{facts['cpu']}, {facts.get('isa', '')}, V = {cover.V:,}"
    drawn = (
        {"simple_sizing": figures.sized(scans, cover, cost, where)}
        if scans.row_us.notna().all()
        else {}
    )
    for name, table, figure in (
        ("simple_ablation", "steps", figures.ablation),
        ("simple_scaling", "scaling", figures.scaled),
        ("simple_overlap", "overlap", figures.exposed),
    ):
        path = folder / f"{table}.csv"
        if path.exists():
            drawn[name] = figure(pd.read_csv(path), where)
    for name, made in drawn.items():
        for suffix in suffixes:
            if made is not None:
                save(made, out / f"{name}.{suffix}")
                print(f"wrote {out}/{name}.{suffix}")
