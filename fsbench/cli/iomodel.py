"""`fsbench iomodel`: predicted speedups and floor times from the I/O cost model, without a GPU."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from fsbench.cli.options import (
    PATH,
    WORD,
    Batches,
    Dtype,
    HiddenSizes,
    Json,
    Models,
    VocabularySizes,
    option,
)
from fsbench.cli.parsing import int_list, shapes
from fsbench.cli.tables import console, table
from fsbench.errors import InvalidArgument
from fsbench.problem import Problem
from fsbench.records import iomodel as model

_PAPER_MODELS = ("qwen3-8b", "llama3-70b")
_PAPER_BATCHES = "1,2,4,8,16,32,64,128,256"


def iomodel(
    batch: Batches = None,
    d: HiddenSizes = None,
    v: VocabularySizes = None,
    model_names: Models = None,
    gpu: Annotated[str, option("--gpu", WORD, "GPU whose floor times to print.")] = "h200",
    dtype: Dtype = "bf16",
    measured: Annotated[
        list[Path] | None,
        option(
            "--measured",
            PATH,
            "A results folder: compare its times with the model, and explain the difference.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print predicted speedups and floor times of the paper's I/O cost model. Needs no GPU.

    Every --d with every --v, and every --model, is one shape; by default, the paper's two shapes
    at its batch sizes. With --measured (may be repeated) the shapes are those of the results
    (docs/results/paper.md).
    """
    if measured:
        from fsbench.cli.attribution import print_measured

        if model_names or d or v:
            raise InvalidArgument("--measured: expected without --model, --d and --v")
        print_measured(measured, as_json)
        return
    chosen = model.gpu(gpu)
    heads = shapes(model_names or [], d, v) or shapes(_PAPER_MODELS, None, None)
    batches = int_list(batch or _PAPER_BATCHES, "--batch")
    rows = [
        {"model": label, **_predict(Problem(B, D, V, dtype), chosen)}
        for label, D, V in heads
        for B in batches
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print_tables(rows, chosen)


def _predict(problem: Problem, gpu: model.Gpu) -> dict[str, Any]:
    work = model.traffic(problem)
    return {
        "b": problem.B,
        "d": problem.D,
        "v": problem.V,
        "dtype": problem.dtype,
        "baseline_bytes": work.baseline_bytes,
        "fused_bytes": work.fused_bytes,
        "flops": work.flops,
        "predicted_speedup": model.predicted_speedup(problem),
        "approximate_speedup": model.approximate_speedup(problem),
        "baseline_flop_per_byte": work.flops / work.baseline_bytes,
        "fused_flop_per_byte": work.flops / work.fused_bytes,
        "gpu": gpu.slug,
        "floor_us": gpu.datasheet.floor_us(work),
        "measured_floor_us": gpu.measured.floor_us(work) if gpu.measured else None,
    }


def _print_tables(rows: list[dict[str, Any]], gpu: model.Gpu) -> None:
    print_ = console(soft_wrap=False).print
    for (label, d, v, dtype), group in groupby(
        rows, key=lambda row: (row["model"], row["d"], row["v"], row["dtype"])
    ):
        title = f"{label}: D={d} V={v} {dtype}"
        columns = [
            *(("B", "{b}"), ("baseline\nMB", "{baseline_mb:.1f}"), ("fused\nMB", "{fused_mb:.1f}")),
            ("speedup\nfull", "{predicted_speedup:.4f}"),
            ("speedup\n1+2B/D", "{approximate_speedup:.4f}"),
            ("baseline\nFLOP/B", "{baseline_flop_per_byte:.2f}"),
            ("fused\nFLOP/B", "{fused_flop_per_byte:.2f}"),
            ("floor us\ndatasheet", "{floor_us:.1f}"),
            *([("floor us\nmeasured", "{measured_floor_us:.1f}")] if gpu.measured else []),
        ]
        shown = [
            {**row, **{f"{way}_mb": row[f"{way}_bytes"] / 1e6 for way in ("baseline", "fused")}}
            for row in group
        ]
        print_(table(columns, shown, title, pad_edge=True, padding=(0, 1, 0, 0)))
    for roof in filter(None, (gpu.datasheet, gpu.measured)):
        print_(f"{gpu.slug} {roof.source}: {roof.tb_per_s} TB/s, {roof.tflops} TFLOP/s bf16")
    print_(
        "floor: the fused step at those rates; the measured ones are what plain kernels reached "
        "(a read-only stream, a large square matmul), not limits. 1 MB = 1e6 bytes."
    )
