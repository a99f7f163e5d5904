"""Speedup tables shaped like the paper's Tables 4 and 5, one per configuration.

A configuration is a GPU, a shape and a way of measuring; a row is a batch size B. Speedups are
ratios of medians measured in the same run, never across runs; only samplers of one law
are compared: exact ones, on problems with filters truncated ones.
Input is the table of results.csv (fsbench.records.summary), one or several runs of it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from fsbench.errors import ResultsError, one_line
from fsbench.problem import PENALTIES, Problem, models
from fsbench.provider import Kind
from fsbench.records.disk import refusals, write_atomically
from fsbench.records.iomodel import gpu_slug
from fsbench.records.sheet import escaped, markdown_table
from fsbench.records.stats import LEVEL, ratio_interval

_SHAPE = ["device", "gpu", "d", "v"]
FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "mixed": False, **PENALTIES, "history": 0}
"""Columns of filters and penalties, and what they are where they are off."""
_LATER = {**FILTERS, "weights": ""}
"""Columns that older results lack, and what they were then."""
CONDITIONS = ["dtype", "temperature", "logits", "tp", "timer", "graph", "l2", *_LATER]
"""Columns that say how a cell was measured, apart from the machine, the shape and the sampler."""
_OTHERS = ["provider", "label", "kind", "fused", "b", "status", "median_us", "ci_lo_us", "ci_hi_us"]


@dataclass(frozen=True)
class Configuration:
    """The rows of one GPU, shape and way of measuring.

    stem: unique part of file names, such as 'h200_d4096_v151936'.
    rows: every row, whatever its status; later runs below earlier ones.
    """

    stem: str
    rows: pd.DataFrame

    @property
    def title(self) -> str:
        """The machine and the shape, in words."""
        first = self.rows.iloc[0]
        parallel = f", TP = {first.tp}" if first.tp != 1 else ""
        return f"{first.gpu_name or 'CPU'}, D = {first.d:,}, V = {first.v:,}{parallel}"

    @property
    def head(self) -> str:
        """The models that have this LM head, by name, and its size D x V."""
        first = self.rows.iloc[0]
        names = [one.name for one in models().values() if (first.d, first.v) == (one.D, one.V)]
        return ", ".join([*names, f"{first.d:,} × {first.v:,}"])

    @property
    def heading(self) -> str:
        """Words that distinguish the configuration from others of its GPU."""
        first = self.rows.iloc[0]
        what = "Log-probabilities" if self.drawn is Kind.SCORE else "Sampling"
        if filters := filters_in_words(first):
            what += f" with {filters}"
        unusual = {
            f"{first.weights} head": bool(first.weights),
            f"TP = {first.tp}": first.tp != 1,
            first["dtype"]: first["dtype"] != "bf16",
            f"T = {first.temperature:g}": first.temperature != 1,
            f"logits {first.logits}": first.logits != "normal:1",
            "eager": not first.graph,
            f"{first.l2} L2": first.l2 not in ("cold", ""),
        }
        return ", ".join([f"{what}: {self.head}", *(words for words, on in unusual.items() if on)])

    @property
    def conditions(self) -> str:
        """Conditions of the measurement, in words."""
        return conditions_in_words(self.rows.iloc[0])

    @property
    def drawn(self) -> Kind:
        """Kind of the samplers that draw from the distribution of this problem: they are compared.

        SCORE where nothing draws and log-probabilities were timed.
        """
        first = self.rows.iloc[0]
        if set(self.rows.kind) - {str(Kind.LOWER_BOUND)} == {str(Kind.SCORE)}:
            return Kind.SCORE
        off = all(first[name] == value for name, value in FILTERS.items())
        return Kind.EXACT if off else Kind.TRUNCATED

    @cached_property
    def measured(self) -> pd.DataFrame:
        """The rows with status ok: per provider and B that of the latest run."""
        ok = self.rows[self.rows.status == "ok"]
        return ok.drop_duplicates(["provider", "b"], keep="last")

    def providers(self, kind: Kind | None = None, fused: bool | None = None) -> list[str]:
        """Names of the measured providers of a kind, in the order of the results."""
        rows = self.measured
        if kind is not None:
            rows = rows[rows.kind == kind]
        if fused is not None:
            rows = rows[rows.fused == fused]
        return list(rows.provider.unique())

    def problem(self, B: int) -> Problem:
        """The decode step of one batch size."""
        first = self.rows.iloc[0]
        sizes = (int(B), int(first.d), int(first.v))
        return Problem(*sizes, first["dtype"], tp=int(first.tp), weights=first.weights)

    def label(self, provider: str) -> str:
        """Legend text of a provider, as its latest run gave it."""
        return self.rows[self.rows.provider == provider].label.iloc[-1]

    def ratio(self, numerator: str, denominator: str) -> pd.DataFrame:
        """median(numerator) / median(denominator) against B, with its interval.

        Returns:
            Columns value, lo, hi with B as index. Both medians come from one run: the latest that
            has both. The interval is conservative (stats.ratio_interval).
        """
        ok = self.rows[self.rows.status == "ok"]
        both = ok[ok.provider == numerator].merge(
            ok[ok.provider == denominator], on=["folder", "b"], suffixes=("", "_below")
        )
        both = both.drop_duplicates("b", keep="last").set_index("b").sort_index()
        lo, hi = ratio_interval(
            (both.ci_lo_us, both.ci_hi_us), (both.ci_lo_us_below, both.ci_hi_us_below)
        )
        return pd.DataFrame({"value": both.median_us / both.median_us_below, "lo": lo, "hi": hi})


def conditions_in_words(row: pd.Series) -> str:
    """Return the conditions in which a cell was measured, in words."""
    return ", ".join(
        [
            row["dtype"],  # Series.dtype is something else
            *([f"{row.weights} head"] if row.weights else []),
            f"T = {row.temperature:g}",
            f"logits {row.logits}",
            f"timer {row.timer}",
            "CUDA graph replay" if row.graph else "eager",
            *([f"{row.l2} L2"] if row.l2 else []),
            *([filters_in_words(row)] if filters_in_words(row) else []),
        ]
    )


def filters_in_words(row: pd.Series) -> str:
    """The filters and penalties of a row that are on, such as 'top-k 50, top-p 0.9', or ''."""
    on = [name for name in ("top_k", "top_p", "min_p") if row[name] != FILTERS[name]]
    words = [f"{name.replace('_', '-')} {row[name]:g}" for name in on]
    words += ["mixed rows"] if row.mixed else []
    on = [name for name, off in PENALTIES.items() if row[name] != off]
    words += [f"{name.replace('_', ' ')} {row[name]:g}" for name in on]
    words += [f"{row.history:g} tokens seen"] if row.history else []
    return ", ".join(words)


def normalized(frame: pd.DataFrame) -> pd.DataFrame:
    """Results with all columns needed here, whether read from a CSV file or made in memory.

    Texts that pandas reads as missing are '', `gpu` is the short name and `gpu_name` the long one.
    """
    old = {name: off for name, off in _LATER.items() if name not in frame}
    frame = frame.assign(**old).fillna(_LATER)
    missing = [name for name in _SHAPE + CONDITIONS + _OTHERS if name not in frame]
    if missing:
        raise ResultsError(f"results.csv: expected columns {', '.join(missing)}; they are missing")
    for name in ("provider", "dtype", "logits", "timer"):
        if frame[name].isna().any():
            raise ResultsError(f"results.csv: {name}: expected a text in every row; got none")
    for name in ("b", "d", "v", "tp"):
        if len(wrong := frame[name][~(frame[name] >= 1)]):
            got = f"{name}: expected an integer >= 1; got {wrong.iloc[0]!r:.40}"
            raise ResultsError(f"results.csv: {got}")
    frame = frame.astype(dict.fromkeys(("b", "d", "v", "tp"), "int64"))
    frame = frame.assign(folder=frame.get("folder", ""))
    frame["mixed"] = frame.mixed.astype(bool)
    for name in ("gpu", "l2"):  # '' and 'n/a', which pandas reads as NaN
        frame[name] = frame[name].astype(object).where(frame[name].notna(), "").replace("n/a", "")
    frame["label"] = frame.label.map(one_line).str.replace("^['_]+", "", regex=True)
    frame["gpu_name"] = frame.gpu
    frame["gpu"] = frame.gpu.map(gpu_slug)
    return frame


def configurations(frame: pd.DataFrame) -> list[Configuration]:
    """Split results into configurations with at least one measured cell, sorted by stem."""
    if frame.empty:
        return []
    frame = normalized(frame)
    found = []
    for _, same_shape in frame.groupby(_SHAPE):
        varying = [name for name in CONDITIONS if same_shape[name].nunique() > 1]
        for _, rows in same_shape.groupby(CONDITIONS):
            if (rows.status == "ok").any():
                found.append(Configuration(_stem(rows.iloc[0], varying), rows))
    return sorted(found, key=lambda configuration: configuration.stem)


def stems(found: list[Configuration], free: Collection[str]) -> dict[str, list[Configuration]]:
    """Configurations that differ in the conditions `free` alone, by a stem for common files."""
    return _alike(found, _SHAPE, [name for name in CONDITIONS if name not in free])


def families(found: list[Configuration]) -> dict[str, list[Configuration]]:
    """Configurations that differ in nothing but the LM head, by a stem for common files."""
    return _alike(found, _SHAPE[:2], CONDITIONS)


def _alike(
    found: list[Configuration], shape: list[str], conditions: list[str]
) -> dict[str, list[Configuration]]:
    first = pd.DataFrame([configuration.rows.iloc[0] for configuration in found])
    grouped = {}
    for _, same in first.reset_index(drop=True).groupby(shape) if found else ():
        varying = [name for name in conditions if same[name].nunique() > 1]
        for _, alike in same.groupby(conditions):
            stem = _stem(alike.iloc[0], varying, shape)
            grouped[stem] = [found[number] for number in alike.index]
    return grouped


def _stem(row: pd.Series, varying: list[str], shape: list[str] = _SHAPE) -> str:
    """File name stem of a row's configuration, naming only the conditions that vary."""
    size = [f"{name}{row[name]}" for name in shape[2:]]
    return "_".join([row.gpu or row.device, *size, *_words(row, varying)])


def _words(row: pd.Series, conditions: list[str]) -> list[str]:
    """These conditions of a row as parts of a file name."""
    words = {
        "dtype": row["dtype"],
        "temperature": f"t{row.temperature:g}",
        "logits": row.logits.replace(":", "-"),
        "tp": f"tp{row.tp}",
        "timer": row.timer,
        "graph": "graph" if row.graph else "eager",
        "l2": f"{row.l2}-l2",
        "top_k": f"k{row.top_k:g}",
        "top_p": f"p{row.top_p:g}",
        "min_p": f"minp{row.min_p:g}",
        "mixed": "mixed" if row.mixed else "uniform",
        "repetition_penalty": f"rep{row.repetition_penalty:g}",
        "presence_penalty": f"pres{row.presence_penalty:g}",
        "frequency_penalty": f"freq{row.frequency_penalty:g}",
        "history": f"seen{row.history:g}",
        "weights": row.weights or row["dtype"],
    }
    return [words[name] for name in conditions]


def speedup_table(configuration: Configuration) -> pd.DataFrame:
    """One row per B; columns are named quantity.provider or quantity.provider.other.

    median_us.P for every provider measured; for each fused F and unfused P that draw from
    the law
    speedup.F.P = median(P) / median(F) with speedup_lo and speedup_hi; ratio.F.L =
    median(F) / median(L) to each lower bound L. Where nothing fused was measured, the ratios are
    those of the unfused samplers.
    """
    table = pd.DataFrame(index=pd.Index(sorted(configuration.rows.b.unique()), name="b"))
    for provider in configuration.providers():
        rows = configuration.measured
        table[f"median_us.{provider}"] = rows[rows.provider == provider].set_index("b").median_us
    for fused in configuration.providers(configuration.drawn, fused=True):
        for other in configuration.providers(configuration.drawn, fused=False):
            speedup = configuration.ratio(other, fused)
            table[f"speedup.{fused}.{other}"] = speedup.value
            table[f"speedup_lo.{fused}.{other}"] = speedup.lo
            table[f"speedup_hi.{fused}.{other}"] = speedup.hi
    for provider in _compared(configuration):
        for bound in configuration.providers(Kind.LOWER_BOUND):
            table[f"ratio.{provider}.{bound}"] = configuration.ratio(provider, bound).value
    return table


def _compared(configuration: Configuration) -> list[str]:
    """The samplers a table is about: fused ones, or without any all that draw."""
    fused = configuration.providers(configuration.drawn, fused=True)
    return fused or configuration.providers(configuration.drawn)


def markdown(configuration: Configuration) -> str:
    """The speedup table as Markdown: one section per sampler compared, then all the times."""
    table = speedup_table(configuration)
    parts = [
        f"# {configuration.title}",
        f"{configuration.conditions}.",
        "Times are medians in microseconds. A speedup is a ratio of medians of one run "
        f"[with a conservative interval from both {LEVEL:.0%} intervals]; bold marks the peak of "
        "its column.",
    ]
    for provider in _compared(configuration):
        columns = _section(configuration, table, provider)
        parts += [
            f"## {escaped(configuration.label(provider))}",
            _markdown_table(table.index, columns),
        ]
    parts += ["## Median time, us", _markdown_table(table.index, _times(configuration, table))]
    return "\n\n".join(parts) + "\n"


_Column = tuple[str, list[str]]
"""Heading and cells."""


def _section(configuration: Configuration, table: pd.DataFrame, provider: str) -> list[_Column]:
    """Time, speedups and ratios of one sampler."""
    columns = [("time, us", _cells(table[f"median_us.{provider}"], ".1f"))]
    for other in configuration.providers(configuration.drawn, fused=False):
        if f"speedup.{provider}.{other}" in table:
            heading = f"vs {configuration.label(other)}"
            columns.append((heading, _speedup_cells(table, f"{provider}.{other}")))
    for bound in configuration.providers(Kind.LOWER_BOUND):
        heading = f"time / {configuration.label(bound)}"
        columns.append((heading, _cells(table[f"ratio.{provider}.{bound}"], ".2f")))
    return columns


def _cells(values: pd.Series, form: str) -> list[str]:
    return ["" if pd.isna(value) else f"{value:{form}}" for value in values]


def _speedup_cells(table: pd.DataFrame, pair: str) -> list[str]:
    values, lows, highs = (
        table[f"{quantity}.{pair}"] for quantity in ("speedup", "speedup_lo", "speedup_hi")
    )
    cells = []
    for text, low, high, value in zip(
        *(_cells(column, ".2f") for column in (values, lows, highs)), values, strict=True
    ):
        number = f"**{text}**" if value == values.max() else text
        cells.append(f"{number} [{low}, {high}]" if text else "")
    return cells


def _times(configuration: Configuration, table: pd.DataFrame) -> list[_Column]:
    """Every provider's time, lower bounds last; a cell without a time shows its status."""
    status = configuration.rows.groupby(["provider", "b"]).status.last()
    bounds = configuration.providers(Kind.LOWER_BOUND)
    samplers = [name for name in configuration.providers() if name not in bounds]
    columns = []
    for provider in samplers + bounds:
        times = _cells(table[f"median_us.{provider}"], ".1f")
        cells = [
            time or status.get((provider, b), "")
            for b, time in zip(table.index, times, strict=True)
        ]
        note = " (lower bound)" if provider in bounds else ""
        columns.append((configuration.label(provider) + note, cells))
    return columns


def _markdown_table(batches: pd.Index, columns: list[_Column]) -> str:
    rows = zip(map(str, batches), *(cells for _, cells in columns), strict=True)
    return markdown_table(["B", *(heading for heading, _ in columns)], rows)


def write_tables(folder: Path, frame: pd.DataFrame) -> list[Path]:
    """Write speedup_<stem>.csv and .md of every configuration; returns the paths."""
    written = []
    with refusals("write tables in", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for configuration in configurations(frame):
            texts = {
                ".csv": speedup_table(configuration).to_csv(float_format="%.6g"),
                ".md": markdown(configuration),
            }
            for suffix, text in texts.items():
                written.append(folder / f"speedup_{configuration.stem}{suffix}")
                write_atomically(written[-1], text)
    return written
