"""Tables, numbers and claims of pages, declared in tables.toml and computed from records.

A view is a table of records, one row for each cell of a benchmark:

    files    paths below results/: a folder means its results.csv, a name without a date the
             newest record of this name; "*.jsonl" are all files that match
    python   the function of computed.py that returns the rows, called with the files
    set      new columns, by pandas expressions, before `where`; `let` after `join`
    last     columns: of rows that are equal in them the last one is kept
    key      columns whose values, joined by /, become a column `key`
    where    a pandas query that rows satisfy
    by       columns whose values become columns, with `values` in them (median_us) and a row for
             each `index` (d, v, b)
    join     other views, and the columns `on` which their rows are joined

A table has a view (`in`), `where`, `let`, and `columns`: heads and Python formats of a row's cells;
"a || b" is b if a shows a number that the record lacks. With `across`, a column whose values become
heads, `cells` are the columns of each. `names` maps, by column, the values that have rows to their
labels, in order. A column whose head starts with "?" is left out if the view lacks what it shows. A
number has a view, `where`, `value` and `show`: span, least, most, list, only, count or sum, and a
format; and `missing`, the text if the record does not exist yet. A claim has a view, `where` and
`all`, a condition that every row must satisfy; the words on the page are written by hand.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from fsbench.records.sheet import filled, shown_names
from pages import computed
from pages.blocks import RESULTS, Shown, listed, newest, source, span, table

Spec = dict[str, Any]
DECLARED = Path(__file__).with_name("tables.toml")


@cache
def declared() -> Spec:
    """Return the sections of tables.toml: view, table, number, claim."""
    return tomllib.loads(DECLARED.read_text(encoding="utf-8"))


def _spec(kind: str, name: str) -> Spec:
    """Return an entry, including what it takes from the one that it is `like`."""
    spec = declared()[kind][name]
    return {**_spec(kind, spec["like"]), **spec} if "like" in spec else spec


def least(*columns: pd.Series[float]) -> pd.Series[float]:
    """Return the smallest of several columns, row by row; a NaN does not count."""
    return pd.concat(columns, axis=1).min(axis=1)


def most(*columns: pd.Series[float]) -> pd.Series[float]:
    """Return the largest of several columns, row by row; a NaN does not count."""
    return pd.concat(columns, axis=1).max(axis=1)


def choose(condition: pd.Series[bool], yes: str, no: str) -> pd.Series[str]:
    """Return `yes` where a condition holds, else `no`."""
    return condition.map({True: yes, False: no})


FUNCTIONS = {"least": least, "most": most, "choose": choose}


def evaluated(frame: pd.DataFrame, expression: str, where: str) -> Any:
    """Return the value of a pandas expression over the columns of a frame.

    Raises:
        ValueError: the expression names a column that the frame lacks; `where` names the entry.
    """
    try:
        return frame.eval(expression, local_dict=FUNCTIONS, engine="python")
    except (NameError, pd.errors.UndefinedVariableError) as error:
        raise ValueError(
            f"tables.toml, [{where}]: {expression!r}: {error}; the columns are "
            f"{', '.join(map(str, frame.columns))}"
        ) from error


def files_of(spec: Spec) -> list[str]:
    """Return the paths below results/ that a view reads."""
    return [path for name in spec.get("files", []) for path in _matching_paths(name)]


def _matching_paths(name: str) -> list[str]:
    if not name.endswith("*.jsonl"):
        return [newest(name)]
    paths = sorted(RESULTS.glob(name))
    if not paths:
        raise FileNotFoundError(f"tables.toml: no record results/{name}")
    return [str(path.relative_to(RESULTS)) for path in paths]


def _read(name: str) -> pd.DataFrame:
    path = RESULTS / name
    if path.suffix.startswith(".json"):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        rows = pd.json_normalize([json.loads(line) for line in lines])
        return rows.rename(columns=lambda column: _name([column]))
    rows = pd.read_csv(path / "results.csv" if path.is_dir() else path)
    if path.is_dir():
        rows = rows[rows.status == "ok"]
    return rows.assign(run=path.name)


@cache
def view(name: str) -> pd.DataFrame:
    """Return the rows of a view; the caller must not change them."""
    spec, where = _spec("view", name), f"view.{name}"
    if "python" in spec:
        frame = getattr(computed, spec["python"])(*files_of(spec))
    else:
        frame = pd.concat(map(_read, files_of(spec)), ignore_index=True)
    frame = _let(frame, spec, where, "set")
    if "last" in spec:
        frame = frame.drop_duplicates(spec["last"], keep="last")
    if "where" in spec:
        frame = frame[evaluated(frame, spec["where"], where)]
    if "key" in spec:
        frame = frame.assign(key=frame[spec["key"]].astype(str).agg("/".join, axis=1))
    if "by" in spec:
        frame = _wide(frame, spec)
    for other in spec.get("join", []):
        frame = frame.merge(view(other), on=spec["on"], how="left")
    return _let(frame, spec, where)


def _let(frame: pd.DataFrame, spec: Spec, where: str, kind: str = "let") -> pd.DataFrame:
    for column, expression in spec.get(kind, {}).items():
        frame = frame.assign(**{column: evaluated(frame, expression, where)})
    return frame


def _wide(frame: pd.DataFrame, spec: Spec) -> pd.DataFrame:
    columns, values = _several(spec["by"]), _several(spec.get("values", "median_us"))
    index = spec.get("index", ["d", "v", "b"])
    wide = frame.pivot_table(values, index, columns, aggfunc=spec.get("of", "median"), sort=False)
    order = list(dict.fromkeys(frame[index].itertuples(index=False, name=None)))
    wide = wide.loc[[key if len(index) > 1 else key[0] for key in order if _has(wide, key)]]
    short = len(values) == 1
    wide.columns = [_name(key[1:] if short else key) for key in wide.columns.to_flat_index()]
    return wide.reset_index()


def _has(wide: pd.DataFrame, key: tuple[Any, ...]) -> bool:
    return (key if len(key) > 1 else key[0]) in wide.index


def _several(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names


def _name(parts: Iterable[Any]) -> str:
    """Return a column's name: its parts, with _ for characters that names cannot have."""
    return re.sub(r"\W", "_", "_".join(map(str, parts)))


def made_table(name: str) -> str:
    """Return the Markdown of a table and its source line."""
    spec, frame = _spec("table", name), rows_of("table", name)
    shown = shown_by(name, frame)
    if "sort" in spec:
        frame = frame.sort_values(spec["sort"], kind="stable")
    for column, names in spec.get("names", {}).items():
        frame = frame[frame[column].astype(str).isin(names)]
        order = frame[column].astype(str).map(list(names).index)
        frame = frame.assign(**{column: frame[column].astype(str).map(names)})
        frame = frame.loc[order.sort_values(kind="stable").index]
    columns = {
        head.removeprefix("?"): form
        for head, form in spec["columns"].items()
        if not (head.startswith("?") and shown_names(form) - set(frame))
    }
    if "across" in spec:
        heads, rows = _across(frame, columns, spec)
    else:
        missing = spec.get("missing", "")
        heads = list(columns)
        rows = [
            [filled(form, row, missing) for form in columns.values()]
            for row in frame.to_dict("records")
        ]
    text = table(heads, rows, left=spec.get("left", 1))
    if not spec.get("source", True):
        return text
    return f"{text}\n\n{source(*records_of(spec['in']), shown=shown)}"


def shown_by(name: str, rows: pd.DataFrame) -> Shown:
    """Return what a table shows of its records, by its rows_of."""
    spec = _spec("table", name)
    is_computed = "python" in _spec("view", spec["in"])  # of samplers that only the code names
    text = "" if is_computed else f"{spec} {_text_of(spec['in'])}"
    return Shown.from_rows(rows, text)


def _text_of(name: str) -> str:
    """Return the text of a view and of those that it joins."""
    spec = _spec("view", name)
    return " ".join([str(spec), *map(_text_of, spec.get("join", []))])


def records_of(name: str) -> list[str]:
    """Return the paths below results/ of all records of a view."""
    spec = _spec("view", name)
    records = spec["record"] if "record" in spec else files_of(spec)
    joined = [record for other in spec.get("join", []) for record in records_of(other)]
    return list(dict.fromkeys(records + joined))


def _across(
    frame: pd.DataFrame, columns: dict[str, str], spec: Spec
) -> tuple[list[str], list[list[str]]]:
    """Return the heads and rows of a table with `across`."""
    across, missing = _several(spec["across"]), spec.get("missing", "")
    groups = frame[across].drop_duplicates()
    if spec.get("sorted", True):
        groups = groups.sort_values(across)
    heads = [
        *columns,
        *(head.format_map(group) for group in groups.to_dict("records") for head in spec["cells"]),
    ]
    rows: dict[tuple[str, ...], dict[tuple[Any, ...], list[str]]] = {}
    for row in frame.to_dict("records"):
        key = tuple(filled(form, row, missing) for form in columns.values())
        cells = [filled(form, row, missing) for form in spec["cells"].values()]
        rows.setdefault(key, {})[tuple(row[name] for name in across)] = cells
    none = [missing] * len(spec["cells"])
    order = list(groups.itertuples(index=False, name=None))
    return heads, [
        [*key, *(cell for group in order for cell in cells.get(group, none))]
        for key, cells in rows.items()
    ]


def rows_of(kind: str, name: str) -> pd.DataFrame:
    """Return the rows of a table, a number or a claim.

    Raises:
        ValueError: no row is left.
    """
    spec, where = _spec(kind, name), f"{kind}.{name}"
    frame = _let(view(spec["in"]), spec, where)
    frame = frame[evaluated(frame, spec["where"], where)] if "where" in spec else frame
    if frame.empty:
        raise ValueError(f"tables.toml, [{where}]: no row of the view {spec['in']} is left")
    return frame


def made_number(name: str) -> str:
    """Return the text of a number of [number]."""
    spec, where = declared()["number"][name], f"number.{name}"
    kind, _, form = spec["show"].partition(" ")
    rows, parts = rows_of("number", name), _several(spec["value"])
    rows = rows.sort_values("b") if kind == "list" else rows
    try:
        values = pd.concat(evaluated(rows, part, where) for part in parts).dropna()
    except ValueError:
        if "missing" in spec:
            return str(spec["missing"])
        raise
    if kind == "only" and values.nunique() != 1:
        raise ValueError(f"tables.toml, [{where}]: expected one value; got {list(values)}")
    if kind == "span":
        return span(values, form)
    if kind == "list":
        return listed(f"{value:{form}}" for value in values)
    one = {"least": values.min, "most": values.max, "only": lambda: values.iloc[0]}
    one |= {"count": lambda: int(values.sum()), "sum": values.sum}
    return f"{one[kind]():{form}}"


def check_claim(name: str) -> None:
    """Recompute a claim of [claim] from the records.

    Raises:
        ValueError: some row of its view contradicts the claim; the message has the first ones.
    """
    spec, where = declared()["claim"][name], f"claim.{name}"
    frame = rows_of("claim", name)
    wrong = frame[~evaluated(frame, spec["all"], where).astype(bool)]
    if len(wrong):
        raise ValueError(
            f"tables.toml, [{where}]: expected {spec['all']} in every row; got {len(wrong)} of "
            f"{len(frame)} without it, first {wrong.iloc[0].to_dict()}"
        )
