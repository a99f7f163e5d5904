"""Breakdown of a step's time: matmul, sampling, other (the paper's Table 1 and Figure 4).

A sampler that stores its logits is split by the names of its kernels, which are those of the
library that launched them:

    other      copies and memsets (cuBLAS clears counters, for example), and names not known here
    matmul     kernels of cuBLAS and CUTLASS, matrix products of Triton's and torch's compilers
    sampling   every pass over the logits after that: temperature, casts, softmax, noise, draw

A fused kernel does both at once and has one name. It is split by difference: its time less that of
the same kernel without sampling (a form of it, timed in turn with it: `fsbench run --breakdown`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fsbench.records.cell import COLUMNS, FORMS, CellRecord, Round
from fsbench.records.disk import write_into
from fsbench.records.sheet import as_csv

FILE = "breakdown.csv"
"""In a results folder: every kernel of every cell."""


class Part(StrEnum):
    """Purpose of a kernel."""

    MATMUL = "matmul"
    SAMPLING = "sampling"
    OTHER = "other"
    UNKNOWN = "unknown"  # no rule knows the name: its time counts as other
    FUSED = "fused"  # matmul and sampling in one kernel


RULES = (
    (Part.OTHER, r"^(memcpy|memset)$"),
    # cuBLAS (nvjet, xmma, ampere_bf16_s16816gemm, gemv, splitKreduce), CUTLASS, Inductor (tem: mm).
    (Part.MATMUL, r"nvjet|xmma|gemm|gemv|splitk|cutlass|cublas|matmul|^triton_(tem|mm|bmm)"),
    # Kernels of sampling libraries.
    (Part.SAMPLING, r"sampl|gumbel|argmax|softmax|top_?[kp]|exponential|flashinfer"),
    # Passes of torch: its kernels and those that Inductor generates.
    (Part.SAMPLING, r"at6native|at::native|^triton_(poi_fused|red_fused|per_fused)|\bcub\b|n3cub"),
)
"""(part, pattern of the name in lower case); the first match decides."""


def part_of(kernel: str) -> Part:
    """Return the purpose of a kernel by its name in CUPTI, shortened or not."""
    name = kernel.lower()
    return next((part for part, rule in RULES if re.search(rule, name)), Part.UNKNOWN)


@dataclass(frozen=True)
class Split:
    """Time of a step in kernels, us.

    method: "names", or the form that a fused kernel is compared with. With "greedy", the argmax of
        the logits counts as matmul and only the noise as sampling. A difference may be negative, by
        as much as the times of two kernels vary.
    """

    matmul_us: float
    sampling_us: float
    other_us: float
    method: str


def split(record: CellRecord) -> Split | None:
    """Return the split of a cell; None if its kernels do not show it or the timer sees no kernels.

    By names, if one of several is a matmul; times are means. Else, of a fused sampler, by
    difference to a form, that without sampling rather than that without noise; times are medians.
    """
    kernels = mean_kernels(record.rounds.values())
    parts = _parts(kernels, record.cell.fused)
    if Part.MATMUL in parts.values():
        total = dict.fromkeys(Part, 0.0)
        for name, time in kernels.items():
            total[parts[name]] += time
        other = total[Part.OTHER] + total[Part.UNKNOWN]
        return Split(total[Part.MATMUL], total[Part.SAMPLING], other, "names")
    form = next((form for form in FORMS if form in record.forms), None)
    if not kernels or not record.cell.fused or form is None:
        return None
    whole, remaining = (_median_sum(rounds) for rounds in (record.rounds, record.forms[form]))
    return Split(remaining, whole - remaining, 0.0, form)


def _parts(kernels: Iterable[str], fused: bool) -> dict[str, Part]:
    """Return the purpose of each kernel of a step.

    Names count only where one of them is a matmul, and not for the only kernel of a fused sampler.
    """
    parts = {name: part_of(name) for name in kernels}
    alone = fused and sum(part is not Part.OTHER for part in parts.values()) == 1
    if Part.MATMUL in parts.values() and not alone:
        return parts
    unsaid = Part.FUSED if fused else Part.UNKNOWN
    return {name: part if part is Part.OTHER else unsaid for name, part in parts.items()}


def _median_sum(rounds: dict[int, Round]) -> float:
    return float(np.median(np.concatenate([each.sum_us for each in rounds.values()])))


def mean_kernels(rounds: Iterable[Round]) -> dict[str, float]:
    """Return the mean time per step of every kernel, us, slowest first."""
    rounds = list(rounds)
    steps = sum(len(each.span_us) for each in rounds)
    total: dict[str, float] = {}
    for each in rounds:
        for name, time in each.kernels.items():
            total[name] = total.get(name, 0.0) + time * len(each.span_us) / steps
    return dict(sorted(total.items(), key=lambda item: -item[1]))


_OF_CELL = tuple(
    name for name in COLUMNS if name not in ("label", "kind", "fused", "gpu", "device")
)
_COLUMNS = (*_OF_CELL, "form", "kernel", "part", "mean_us", "share")


def kernel_rows(records: Iterable[CellRecord]) -> pd.DataFrame:
    """Return every kernel of every cell and its forms, with the columns of breakdown.csv."""
    rows: list[dict[str, Any]] = []
    for record in records:
        for form, rounds in {"": record.rounds, **record.forms}.items():
            kernels = mean_kernels(rounds.values())
            parts = _parts(kernels, record.cell.fused)
            total = sum(kernels.values())
            for name, time in kernels.items():
                seen = dict(kernel=name, part=parts[name], mean_us=time, share=time / total)
                rows.append({**record.cell.columns(), "form": form, **seen})
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def export_csv(folder: Path, records: Iterable[CellRecord]) -> Path | None:
    """Write breakdown.csv and return its path; None without a file if no kernels were seen."""
    rows = kernel_rows(records)
    if rows.empty:
        return None
    write_into(folder, {FILE: as_csv(rows, index=False)})
    return folder / FILE
