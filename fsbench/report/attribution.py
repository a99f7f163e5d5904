"""Time beyond the I/O model: gaps between kernels, passes over logits, the matmul.

The median step of a sampler over stored logits is, with nothing left over,

    t = t_matmul + (busy - t_matmul) + (t - busy)

that is the matmul alone (a lower bound of the same run), the other kernels, and the gaps
in which no kernel runs. The I/O model (records.iomodel, paper section 3.3) knows the matmul, one
write and one read of the logits, and no gaps. Input is the table of results.csv (report.tables).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from fsbench.records import iomodel
from fsbench.report.tables import Configuration


def attribute(configuration: Configuration, fused: str, other: str, matmul: str) -> pd.DataFrame:
    """The speedup t_other / t_fused against that of the I/O model, B by B.

    Args:
        fused, other, matmul: names of providers; the last times the matmul alone.

    Returns:
        Columns by B: predicted, measured; then what makes up measured - predicted, exactly: gaps
        (between the other's kernels), passes (its kernels beyond the matmul, less what the model
        knows of them), matmul (cuBLAS over the fused kernel, less 1); and bound, t_other /
        t_matmul: the speedup if sampling were free. No rows if no run has all three; gaps and
        passes are NaN where the timer sees no kernels.
    """
    times = _same_run(configuration, [fused, other, matmul])
    t, base, mine = (times[f"median_us.{name}"] for name in (other, matmul, fused))
    busy = times[f"busy_us.{other}"]
    predicted = [iomodel.predicted_speedup(configuration.problem(B)) for B in times.index]
    table = pd.DataFrame({"predicted": predicted}, index=times.index)
    table["measured"] = t / mine
    table["gaps"] = (t - busy) / mine
    table["passes"] = (busy - base) / mine - (table.predicted - 1)
    table["matmul"] = base / mine - 1
    table["bound"] = t / base
    return table


@dataclass(frozen=True)
class Extension:
    """The I/O model of one sampler with two terms more: t = t_matmul + fixed + passes x pass.

    A pass moves B V elements of the problem's dtype at the rate at which the weight streams.

    kernels: of one step, where B is smallest; None where the timer sees none.
    fixed_us: what a step takes however few its rows: launches, and kernels that cannot fill the
        GPU. gaps_us: median time without any kernel, a part of it; None likewise.
    passes: over the logits beyond the matmul's own write.
    fitted, held_out: the B it is fitted to, and the others. worst: largest relative error there.
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
    """Fit the extension to every other B by least squares of relative errors; both terms >= 0.

    Args:
        provider, matmul, stream: names of providers; the last two time the matmul alone and the
            weight read once.

    None unless the three share a run of three B or more.
    """
    times = _same_run(configuration, [provider, matmul, stream])
    if len(times) < 3:
        return None
    first = configuration.rows.iloc[0]
    t = times[f"median_us.{provider}"].to_numpy()
    base = times[f"median_us.{matmul}"].to_numpy()
    batches = times.index.to_numpy()
    # Of equal dtype, so a pass over B V logits takes B / D of what reading the weight takes.
    one_pass = times[f"median_us.{stream}"].to_numpy() * batches / first.d
    terms = np.stack([np.ones(len(t)), one_pass], axis=1)
    fit, held = slice(0, None, 2), slice(1, None, 2)
    (fixed, passes), _ = nnls(terms[fit] / t[fit, None], (t - base)[fit] / t[fit])
    error = np.abs(base + terms @ np.array([fixed, passes]) - t)[held] / t[held]
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
    """Columns quantity.provider by B, all of a row from one run: the latest that has them all."""
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
