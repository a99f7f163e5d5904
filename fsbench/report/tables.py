"""Speedup tables shaped like the paper's Tables 4 and 5, one per configuration.

A configuration is a GPU, a shape and measuring conditions; a row is a batch size B. A speedup is a
ratio of two medians of one run. Only samplers of one distribution are compared: exact samplers, or
on problems with filters truncated samplers. The input is results.csv of one or several runs
(fsbench.records.summary).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from fsbench.errors import ResultsError, one_line
from fsbench.problem import PENALTIES, Problem, models
from fsbench.provider import Kind
from fsbench.records.iomodel import gpu_slug
from fsbench.records.sheet import as_csv, escaped, markdown_table
from fsbench.records.stats import LEVEL, ratio_interval

_SHAPE = ["device", "gpu", "d", "v"]
FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "mixed": False, **PENALTIES, "history": 0}
"""Column of a filter or penalty -> value that turns it off."""
_LATER = {**FILTERS, "weights": ""}
"""Columns that older results lack -> their value in such results."""
CONDITIONS = ["dtype", "temperature", "logits", "tp", "timer", "graph", "l2", *_LATER]
"""Columns of the measuring conditions: all except machine, shape and sampler."""
_OTHERS = ["provider", "label", "kind", "fused", "b", "status", "median_us", "ci_lo_us", "ci_hi_us"]


@dataclass(frozen=True)
class Configuration:
    """The rows of one GPU, shape and set of measuring conditions.

    Attributes:
        stem: unique part of file names, such as 'h200_d4096_v151936'.
        rows: rows of any status; later runs are below earlier ones.
    """

    stem: str
    rows: pd.DataFrame

    @property
    def title(self) -> str:
        """The machine and the shape as text."""
        first = self.rows.iloc[0]
        parallel = f", TP = {first.tp}" if first.tp != 1 else ""
        return f"{first.gpu_name or 'CPU'}, D = {first.d:,}, V = {first.v:,}{parallel}"

    @property
    def head(self) -> str:
        """Names of the models with this LM head, and its size D x V."""
        first = self.rows.iloc[0]
        names = [one.name for one in models().values() if (first.d, first.v) == (one.D, one.V)]
        return ", ".join([*names, f"{first.d:,} × {first.v:,}"])

    @property
    def heading(self) -> str:
        """Text that distinguishes the configuration from others of the same GPU."""
        first = self.rows.iloc[0]
        subject = "Log-probabilities" if self.drawn is Kind.SCORE else "Sampling"
        if filters := filters_in_words(first):
            subject += f" with {filters}"
        unusual = {
            f"{first.weights} head": bool(first.weights),
            f"TP = {first.tp}": first.tp != 1,
            first["dtype"]: first["dtype"] != "bf16",
            f"T = {first.temperature:g}": first.temperature != 1,
            f"logits {first.logits}": first.logits != "normal:1",
            "eager": not first.graph,
            f"{first.l2} L2": first.l2 not in ("cold", ""),
        }
        words = (word for word, is_on in unusual.items() if is_on)
        return ", ".join([f"{subject}: {self.head}", *words])

    @property
    def conditions(self) -> str:
        """Conditions of the measurement as text."""
        return conditions_in_words(self.rows.iloc[0])

    @property
    def drawn(self) -> Kind:
        """Kind of the samplers that draw from the problem's distribution, which are compared.

        SCORE if log-probabilities were timed and nothing was drawn.
        """
        first = self.rows.iloc[0]
        if set(self.rows.kind) - {str(Kind.LOWER_BOUND)} == {str(Kind.SCORE)}:
            return Kind.SCORE
        off = all(first[name] == value for name, value in FILTERS.items())
        return Kind.EXACT if off else Kind.TRUNCATED

    @cached_property
    def measured(self) -> pd.DataFrame:
        """Rows with status ok, those of the latest run for each provider and B."""
        ok = self.rows[self.rows.status == "ok"]
        return ok.drop_duplicates(["provider", "b"], keep="last")

    def providers(self, kind: Kind | None = None, fused: bool | None = None) -> list[str]:
        """Return the names of the measured providers, in the order of the results.

        Those of a kind are compared, so samplers without a graph are left out among replays.
        """
        rows = self.measured
        if kind is not None:
            rows = rows[(rows.kind == kind) & ~rows.uncaptured]
        if fused is not None:
            rows = rows[rows.fused == fused]
        return list(rows.provider.unique())

    def problem(self, B: int) -> Problem:
        """Return the decode step of one batch size."""
        first = self.rows.iloc[0]
        sizes = (int(B), int(first.d), int(first.v))
        return Problem(*sizes, first["dtype"], tp=int(first.tp), weights=first.weights)

    def label(self, provider: str) -> str:
        """Return the label of a provider in its latest run."""
        return self.rows[self.rows.provider == provider].label.iloc[-1]

    def ratio(self, numerator: str, denominator: str) -> pd.DataFrame:
        """Return median(numerator) / median(denominator) by B, with its interval.

        Returns:
            Columns value, lo, hi with B as index. Both medians are from one run: the latest that
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
    """Return the measuring conditions of a row as text."""
    return ", ".join(
        [
            row["dtype"],  # Series.dtype is the dtype of the values
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
    """Return the active filters and penalties of a row, such as 'top-k 50, top-p 0.9', or ''."""
    on = [name for name in ("top_k", "top_p", "min_p") if row[name] != FILTERS[name]]
    words = [f"{name.replace('_', '-')} {row[name]:g}" for name in on]
    words += ["mixed rows"] if row.mixed else []
    on = [name for name, off in PENALTIES.items() if row[name] != off]
    words += [f"{name.replace('_', ' ')} {row[name]:g}" for name in on]
    words += [f"{row.history:g} tokens seen"] if row.history else []
    return ", ".join(words)


def normalized(frame: pd.DataFrame) -> pd.DataFrame:
    """Return results with all required columns and types, from a CSV file or from memory.

    Texts that pandas reads as missing become ''; `gpu` is the short name, `gpu_name` the full one.

    Raises:
        ResultsError: a column is missing, or a value is not valid.
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
    frame = _with_replays(normalized(frame))
    result = []
    for _, same_shape in frame.groupby(_SHAPE):
        varying = [name for name in CONDITIONS if same_shape[name].nunique() > 1]
        for _, rows in same_shape.groupby(CONDITIONS):
            if (rows.status == "ok").any():
                result.append(Configuration(_stem(rows.iloc[0], varying), rows))
    return sorted(result, key=lambda configuration: configuration.stem)


def _with_replays(frame: pd.DataFrame) -> pd.DataFrame:
    """Move samplers that no graph can hold to the graph replays of their run; the label says so.

    A column `uncaptured` marks their rows: their times are shown, and not compared.
    """
    alike = [frame[name] for name in (*_SHAPE, "folder", *CONDITIONS) if name != "graph"]
    replayed = frame.graph.groupby(alike, dropna=False).transform("any")
    never = ~frame.graph.groupby([*alike, frame.provider], dropna=False).transform("any")
    uncaptured = replayed & never
    label = frame.label.where(~uncaptured, frame.label + ", no graph")
    return frame.assign(graph=frame.graph | uncaptured, label=label, uncaptured=uncaptured)


def stems(measured: list[Configuration], free: Collection[str]) -> dict[str, list[Configuration]]:
    """Group configurations that differ only in the conditions `free`, by a stem for file names."""
    return _grouped(measured, _SHAPE, [name for name in CONDITIONS if name not in free])


def families(measured: list[Configuration]) -> dict[str, list[Configuration]]:
    """Group configurations that differ only in the LM head, by a stem for file names."""
    return _grouped(measured, _SHAPE[:2], CONDITIONS)


def _grouped(
    measured: list[Configuration], shape: list[str], conditions: list[str]
) -> dict[str, list[Configuration]]:
    first = pd.DataFrame([configuration.rows.iloc[0] for configuration in measured])
    grouped = {}
    for _, same in first.reset_index(drop=True).groupby(shape) if measured else ():
        varying = [name for name in conditions if same[name].nunique() > 1]
        for _, alike in same.groupby(conditions):
            stem = _stem(alike.iloc[0], varying, shape)
            grouped[stem] = [measured[number] for number in alike.index]
    return grouped


def _stem(row: pd.Series, varying: list[str], shape: list[str] = _SHAPE) -> str:
    """Return the file name stem of a configuration, with the conditions that vary."""
    size = [f"{name}{row[name]}" for name in shape[2:]]
    return "_".join([row.gpu or row.device, *size, *_words(row, varying)])


def _words(row: pd.Series, conditions: list[str]) -> list[str]:
    """Return conditions of a row as parts of a file name."""
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
    """Return a row per B with columns quantity.provider or quantity.provider.other.

    median_us.P for each measured provider P; speedup.F.P = median(P) / median(F) with speedup_lo
    and speedup_hi for each fused F and unfused P; ratio.F.L = median(F) / median(L) for each lower
    bound L. If no fused sampler was measured, ratio has the unfused ones.
    """
    columns: dict[str, pd.Series] = {}
    for provider in configuration.providers():
        rows = configuration.measured
        columns[f"median_us.{provider}"] = rows[rows.provider == provider].set_index("b").median_us
    for fused in configuration.providers(configuration.drawn, fused=True):
        for other in configuration.providers(configuration.drawn, fused=False):
            speedup = configuration.ratio(other, fused)
            columns[f"speedup.{fused}.{other}"] = speedup.value
            columns[f"speedup_lo.{fused}.{other}"] = speedup.lo
            columns[f"speedup_hi.{fused}.{other}"] = speedup.hi
    for provider in _compared(configuration):
        for bound in configuration.providers(Kind.LOWER_BOUND):
            columns[f"ratio.{provider}.{bound}"] = configuration.ratio(provider, bound).value
    batches = pd.Index(sorted(configuration.rows.b.unique()), name="b")
    return pd.DataFrame(columns, index=batches)


def _compared(configuration: Configuration) -> list[str]:
    """Return the samplers of a table: the fused ones, or all that draw if none is fused."""
    fused = configuration.providers(configuration.drawn, fused=True)
    return fused or configuration.providers(configuration.drawn)


def markdown(configuration: Configuration) -> str:
    """Return the speedup table as Markdown: a section per compared sampler, then all times."""
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
        heading = f"## {escaped(configuration.label(provider))}"
        parts += [heading, _markdown_table(table.index, columns)]
    parts += ["## Median time, us", _markdown_table(table.index, _times(configuration, table))]
    return "\n\n".join(parts) + "\n"


_Column = tuple[str, list[str]]
"""Heading and cells."""


def _section(configuration: Configuration, table: pd.DataFrame, provider: str) -> list[_Column]:
    """Return the columns of one sampler: time, speedups, ratios to lower bounds."""
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
    columns = [table[f"{quantity}.{pair}"] for quantity in ("speedup", "speedup_lo", "speedup_hi")]
    cells = []
    for value, low, high in zip(*columns, strict=True):
        bold = "**" if value == columns[0].max() else ""
        cells.append(f"{bold}{value:.2f}{bold} [{low:.2f}, {high:.2f}]" if value > 0 else "")
    return cells


def _times(configuration: Configuration, table: pd.DataFrame) -> list[_Column]:
    """Return a column of times per provider, lower bounds last; failed cells show their status."""
    status = configuration.rows.groupby(["provider", "b"]).status.last()
    bounds = configuration.providers(Kind.LOWER_BOUND)
    columns = []
    for provider in sorted(configuration.providers(), key=bounds.__contains__):
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


def files(measured: list[Configuration]) -> dict[str, str]:
    """Return the speedup tables of every configuration, as CSV and as Markdown, by file name."""
    texts = {}
    for each in measured:
        texts[f"speedup_{each.stem}.csv"] = as_csv(speedup_table(each))
        texts[f"speedup_{each.stem}.md"] = markdown(each)
    return texts
