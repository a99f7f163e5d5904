"""Split the time that the I/O model does not predict: gaps between kernels, passes, the matmul.

The median step of a sampler over stored logits is exactly

    t = t_matmul + (busy - t_matmul) + (t - busy)

that is the matmul alone (a lower bound of the same run), the other kernels, and the gaps in which
no kernel runs. The I/O model (records.iomodel, paper section 3.3) has the matmul, one write and
one read of the logits, and no gaps. The input is the table of results.csv (report.tables).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from fsbench.records import iomodel
from fsbench.report.tables import Configuration


def attribute(configuration: Configuration, fused: str, other: str, matmul: str) -> pd.DataFrame:
    """Compare the speedup t_other / t_fused with the I/O model's, for each B.

    Args:
        fused, other, matmul: names of providers; `matmul` times the matmul alone.

    Returns:
        Columns predicted and measured, with B as index. Three columns add up to measured -
        predicted: gaps (between the kernels of `other`), passes (its kernels except the matmul,
        minus what the model predicts for them) and matmul (time of `matmul` / time of `fused` - 1).
        bound is t_other / t_matmul, the speedup if sampling were free. Empty if no run has all
        three providers; gaps and passes are NaN if the timer sees no kernels.
    """
    times = _same_run(configuration, [fused, other, matmul])
    other_us, matmul_us, fused_us = (times[f"median_us.{name}"] for name in (other, matmul, fused))
    busy = times[f"busy_us.{other}"]
    predicted = [iomodel.predicted_speedup(configuration.problem(B)) for B in times.index]
    table = pd.DataFrame({"predicted": predicted}, index=times.index)
    table["measured"] = other_us / fused_us
    table["gaps"] = (other_us - busy) / fused_us
    table["passes"] = (busy - matmul_us) / fused_us - (table.predicted - 1)
    table["matmul"] = matmul_us / fused_us - 1
    table["bound"] = other_us / matmul_us
    return table


@dataclass(frozen=True)
class Extension:
    """The I/O model of one sampler with two more terms: t = t_matmul + fixed + passes x pass.

    A pass moves B V elements of the problem's dtype at the rate at which the weight streams.

    Attributes:
        kernels: kernels per step at the smallest B; None if the timer sees no kernels.
        fixed_us: time per step that does not depend on B: launches, and kernels too small to
            fill the GPU.
        gaps_us: the part of fixed_us in which no kernel runs, median; None if unknown.
        passes: passes over the logits in addition to the write of the matmul.
        fitted, held_out: batch sizes used for the fit, and those used to test it.
        worst: largest relative error at the held-out batch sizes.
    """

    provider: str
    kernels: int | None
    fixed_us: float
    gaps_us: float | None
    passes: float
    fitted: tuple[int, ...]
    held_out: tuple[int, ...]
    worst: float


def extend(
    configuration: Configuration, provider: str, matmul: str, stream: str
) -> Extension | None:
    """Fit the extended model to every second B by least squares of relative errors.

    Args:
        provider, matmul, stream: names of providers; the last two time the matmul alone and one
            read of the weight.

    Returns:
        The fit, with both terms >= 0; None if no run has all three at three batch sizes or more.
    """
    times = _same_run(configuration, [provider, matmul, stream])
    if len(times) < 3:
        return None
    first = configuration.rows.iloc[0]
    t = times[f"median_us.{provider}"].to_numpy()
    matmul_us = times[f"median_us.{matmul}"].to_numpy()
    batches = times.index.to_numpy()
    # Weight and logits have the same dtype: a pass over B V logits takes B / D of a weight read.
    one_pass = times[f"median_us.{stream}"].to_numpy() * batches / first.d
    terms = np.stack([np.ones(len(t)), one_pass], axis=1)
    fit, held = slice(0, None, 2), slice(1, None, 2)
    (fixed, passes), _ = nnls(terms[fit] / t[fit, None], (t - matmul_us)[fit] / t[fit])
    error = np.abs(matmul_us + terms @ np.array([fixed, passes]) - t)[held] / t[held]
    kernels = times[f"n_kernels.{provider}"].iloc[0]
    gaps = (times[f"median_us.{provider}"] - times[f"busy_us.{provider}"]).median()
    return Extension(
        provider,
        None if pd.isna(kernels) else int(kernels),
        float(fixed),
        None if pd.isna(gaps) else float(gaps),
        float(passes),
        tuple(map(int, batches[fit])),
        tuple(map(int, batches[held])),
        float(error.max()),
    )


def _same_run(configuration: Configuration, providers: list[str]) -> pd.DataFrame:
    """Return columns quantity.provider by B; each row is from the latest run with all providers."""
    rows = configuration.rows[configuration.rows.status == "ok"]
    quantities = ["median_us", "busy_us", "n_kernels"]
    wide = rows[rows.provider.isin(providers)].reindex(
        columns=["b", "folder", "provider", *quantities]
    )
    wide = wide.drop_duplicates(["b", "folder", "provider"], keep="last")
    wide = wide.pivot(index=["folder", "b"], columns="provider", values=quantities)
    wide = wide.reindex(columns=[(name, p) for name in quantities for p in providers])
    wide.columns = [f"{quantity}.{provider}" for quantity, provider in wide.columns]
    wide = wide.dropna(subset=[f"median_us.{provider}" for provider in providers])
    wide = wide.reset_index()
    wide["folder"] = pd.Categorical(wide.folder, rows.folder.unique())  # later runs below
    wide = wide.sort_values(["b", "folder"]).drop_duplicates("b", keep="last")
    return wide.set_index("b")
