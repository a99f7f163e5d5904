"""Commands of `fsbench hotvocab`: fit, size, bench, exact and plot."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fsbench.cli.hotvocab.tables import print_bench, print_size, read_fit
from fsbench.cli.options import (
    PATH,
    Device,
    FigureFolder,
    Formats,
    ResultsFolder,
    argument,
    integers,
    number,
    option,
    whole,
)
from fsbench.cli.parsing import int_list
from fsbench.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy as np

    from fsbench.simple.bench import Setup
    from fsbench.simple.hot import Coverage

V = Annotated[int, option("--v", whole(64, 2**22), "Vocabulary size V.")]
ROWS = Annotated[int, option("--rows", whole(4, 2**12), "Rows of logits; more than caches hold.")]
REPEATS = Annotated[int, option("--repeats", whole(5, 10**6), "Times that each H is measured.")]
FOLDER = Annotated[Path, argument("FOLDER", PATH, "Folder that `fit` or `bench` wrote.")]

_DOCUMENTS = 1024  # of the model's trace; the rows of logits are of later ones


def fit(
    v: V = 151936,
    rows: ROWS = 128,
    repeats: REPEATS = 200,
    trace: Annotated[
        Path | None,
        option(
            "--trace", PATH, "Token ids, a document per row (.npy or text). Default: a Zipf model."
        ),
    ] = None,
    out: ResultsFolder = None,
) -> None:
    """Fit the cost of a scan, T(H) = c H + c0, and count the hot tokens' coverage on a trace."""
    from fsbench.simple.hot import read_trace

    tokens = None if trace is None else read_trace(trace, v)
    _require_memory(rows, v)
    folder, _ = _folder(out, "cpu")
    _fit(folder, v, rows, repeats, tokens, trace.name if trace else "")
    print_size(folder)


def size(
    folder: FOLDER,
    c_us: Annotated[
        float | None,
        option("--c-us", number(0, 1e12, above=True), "Another c, us per token; with --c0-us."),
    ] = None,
    c0_us: Annotated[float | None, option("--c0-us", number(0, 1e12), "Another c0, us.")] = None,
) -> None:
    """Choose the number of hot tokens by SIMPLE's model (equations 10 to 12)."""
    if (c_us is None) != (c0_us is None):
        raise InvalidArgument("--c-us: expected together with --c0-us")
    print_size(folder, c_us, c0_us)


def bench(
    v: V = 151936,
    rows: ROWS = 128,
    repeats: REPEATS = 100,
    rounds: Annotated[int, option("--rounds", whole(2, 10**6), "Interleaved rounds.")] = 9,
    samplers: Annotated[
        str | None,
        option(
            "--samplers",
            integers(1, 4096),
            "Numbers of samplers, comma list. Default: 1, 2, 4, ...",
        ),
    ] = None,
    device: Device = "auto",
    batch: Annotated[
        str, option("--batch", integers(), "B of the GPU's part.")
    ] = "1,2,4,8,16,32,64,128,256",
    d: Annotated[int, option("--d", whole(), "Hidden size D of the GPU's part.")] = 4096,
    body: Annotated[
        int, option("--body", whole(0), "Layers of the GPU's part, in reads of the LM head.")
    ] = 12,
    out: ResultsFolder = None,
) -> None:
    """Measure the four designs, scaling, penalties and the ring; with a GPU, copies and overlap."""
    from fsbench.cli.devices import device_to_use
    from fsbench.machine import hardware
    from fsbench.records.store import write_environment
    from fsbench.simple import bench as measure

    device = device_to_use(device)
    _require_memory(rows, v)
    folder, facts = _folder(out, device)
    begin = time.monotonic(), hardware.cpu_seconds()
    setup = replace(_fit(folder, v, rows, repeats), rounds=rounds)
    counts = int_list(samplers, "--samplers") if samplers else measure.sampler_counts()
    _write(folder, "ring", measure.ring(rounds))
    _write(folder, "steps", measure.steps(setup))
    _write(folder, "scaling", measure.scaling(setup, counts))
    _write(folder, "penalties", measure.penalties(setup))
    if device == "cuda":
        _measure_gpu(folder, setup, d, body, int_list(batch, "--batch"), max(1, max(counts) - 1))
    others = facts["others_cores"] = _others_cores(*begin)
    write_environment(folder, facts)
    print_size(folder)
    print_bench(folder)
    if (others or 0) > 0.1:
        print(
            f"warning: other processes kept {others:.1f} cores busy meanwhile; "
            "times and scaling are worse for it",
            file=sys.stderr,
        )
    _draw(folder, folder, ["png"], facts)


def exact(
    v: V = 151936,
    hot: Annotated[int, option("--hot", whole(), "Hot tokens, H.")] = 14336,
    steps: Annotated[int, option("--steps", whole(), "Decode steps.")] = 100,
    rows: Annotated[int, option("--rows", whole(1, 2**12), "Rows of a step.")] = 8,
    out: ResultsFolder = None,
) -> None:
    """Bound the distance of SHVS's distribution from the baseline's, step by step (Figure 12)."""
    from fsbench.simple.bench import variation

    if hot > v:
        raise InvalidArgument(f"--hot: expected at most --v {v}; got {hot}")
    folder, _ = _folder(out, "cpu")
    setup, _ = _setup(v, min(4 * rows, 64))
    table = variation(replace(setup, hot=hot), steps, rows)
    _write(folder, "variation", table)
    for controls in dict.fromkeys(row["controls"] for row in table):
        last = [row for row in table if row["controls"] == controls][-1]
        print(
            f"{controls}: {steps} steps, {last['draws']} draws each, mean total variation at most "
            f"{last['mean_distance']:.2g}, below {last['mean_distance_below']:.2g} at 95 %"
        )


def plot(
    folder: FOLDER,
    out: FigureFolder = Path("plots"),
    formats: Formats = "png",
) -> None:
    """Draw what `fit` and `bench` measured. Needs no GPU."""
    from fsbench.records.store import read_environment
    from fsbench.report.figures.parts import check_formats

    suffixes = check_formats(name.strip() for name in formats.split(","))
    _draw(folder, out, suffixes, read_environment(folder))


def _folder(out: Path | None, device: str) -> tuple[Path, dict[str, Any]]:
    """The folder of this run, with its env.json."""
    from fsbench.cli.measuring import new_folder
    from fsbench.machine.environment import environment
    from fsbench.records.store import write_environment
    from fsbench.simple.native import isa

    facts = {**environment(device, sys.argv), "isa": isa()}
    folder = out or new_folder(facts, "simple")
    write_environment(folder, facts)
    return folder, facts


def _others_cores(since: float, then: tuple[float, float] | None) -> float | None:
    """Cores that other processes kept busy meanwhile, on average."""
    from fsbench.machine import hardware

    now = hardware.cpu_seconds()
    if then is None or now is None:
        return None
    busy, own = (after - before for after, before in zip(now, then, strict=True))
    return round(max(0.0, busy - own) / (time.monotonic() - since), 3)


def _write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    import pandas as pd

    pd.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
    print(f"wrote {folder}/{name}.csv", flush=True)


def _setup(v: int, rows: int, trace: np.ndarray | None = None) -> tuple[Setup, Coverage]:
    """The Zipf model's rows with all tokens hot, in the order of a trace; what that covers.

    trace: token ids [documents, tokens]; None: those of the model.
    """
    import torch

    from fsbench.simple import bench, hot
    from fsbench.simple.zipf import ZipfText

    text = ZipfText(v)
    counted, held_out = hot.halves(text.trace(range(_DOCUMENTS)) if trace is None else trace)
    order = hot.order_of(counted, v)
    places = torch.from_numpy(order)
    logits = text.logits(rows, first=_DOCUMENTS)[:, places].contiguous()
    return bench.Setup(v, v, places, logits), hot.coverage(order, held_out)


def _require_memory(rows: int, v: int) -> None:
    """Refuse logits [rows, v] in fp32 of more than 8 GiB."""
    if rows * v > 2**31:
        raise InvalidArgument(f"--rows: expected at most {2**31 // v} with --v {v}; got {rows}")


def _fit(
    folder: Path, v: int, rows: int, repeats: int, trace: np.ndarray | None = None, name: str = ""
) -> Setup:
    """Measure scans, count coverage, write scans.csv and fit.json; the setup at H*.

    trace: token ids [documents, tokens], of a file of this name; None: those of the Zipf model.
    """
    import numpy as np

    from fsbench.simple import bench, sizing
    from fsbench.simple.zipf import ZipfText

    setup, cover = _setup(v, rows, trace)
    sizes = np.unique(np.geomspace(min(256, v // 4), v, 16).round().astype(int)).tolist()
    table, times = bench.scans(setup, sizes, repeats)
    if trace is not None:  # the rows are the model's: their speed says nothing about this trace
        for row in table:
            row.update(dict.fromkeys(("row_us", "lo_us", "hi_us", "hits", "times_full"), None))
    # The whole vocabulary is another path, without a tail; the model is of the hot path.
    cost = sizing.fit(np.array(sizes[:-1]), times[:-1])
    best = sizing.best(cover, cost, both=True).H
    facts = {
        "v": v,
        "trace": name if name else f"ZipfText(V={v})",
        "cost": vars(cost),
        "hot": {"offloaded": v, "SHVS": best},
        "sizes": cover.sizes.tolist(),
        "mean": cover.mean.tolist(),
        "low": cover.low.tolist(),
    }
    _write(folder, "scans", table)
    (folder / "fit.json").write_text(json.dumps(facts, indent=1) + "\n")
    return replace(setup, hot=best, history=bench.histories(ZipfText(v)))


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

    from fsbench.report.figures import hotvocab as figures
    from fsbench.report.figures.parts import save

    cover, cost, scans = read_fit(folder)
    where = f"{facts['cpu']}, {facts.get('isa', '')}, V = {cover.V:,}"
    drawn = {}
    if scans.row_us.notna().all():
        drawn["simple_sizing"] = figures.sized(scans, cover, cost, where)
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
            save(made, out / f"{name}.{suffix}")
            print(f"wrote {out}/{name}.{suffix}")
