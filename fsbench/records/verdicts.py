"""Records of `fsbench verify`: lines of what each check found, read and held to their types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fsbench.errors import ResultsError, one_line, shown
from fsbench.records.lines import Line, read_lines
from fsbench.records.typed import fits

_KINDS: dict[str, dict[str, Any]] = {
    "setting": {"setting": dict[str, Any], "environment": dict[str, Any]},
    "package": {
        **dict.fromkeys(("provider", "package", "source"), str),
        "claims": dict[str, list[str] | str | float | bool | None],
    },
    "skipped": {"provider": str, "skipped": str},
    "verdict": {
        **dict.fromkeys(("provider", "name", "verdict", "detail"), str),
        **{"passed": bool, "draws": int, "seconds": float},
        **dict.fromkeys(("p_value", "bound"), float | None),
        "detects": str | None,
    },
    "conclusion": {"provider": str, "conclusion": str},
}
"""Field that says what a line is -> the fields that a reader needs, with their types."""

_SETTING: dict[str, Any] = {
    **dict.fromkeys(("tier", "dtype", "weights"), str),
    "temperatures": list[float],
}
_PLACE: dict[str, Any] = dict.fromkeys(("device", "gpu", "cpu"), str)


def read_verdicts(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The lines of records: of files, or of all that lie below folders.

    Other .jsonl files below a folder are left out.

    Raises:
        ResultsError: a file is no record, cannot be read, or has a damaged line.
    """
    for path in paths:
        try:
            path.stat()
        except OSError as error:
            got = f"{shown(str(path))}: {error.strerror}"
            raise ResultsError(f"RECORDS: expected records of fsbench verify; got {got}") from error
        for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
            if _begins_record(file):
                yield from (_typed(file, line) for line in read_lines(file))
            elif not path.is_dir():
                raise ResultsError(f"{file}: expected a record of fsbench verify; got another")


def _begins_record(file: Path) -> bool:
    try:
        first = next(read_lines(file), None)
    except ResultsError:
        return False
    setting = first.value.get("setting") if first else None
    return isinstance(setting, dict) and "tier" in setting


def _typed(file: Path, line: Line) -> dict[str, Any]:
    value = line.value
    kind = next((name for name in _KINDS if name in value), None)
    try:
        if kind is None:
            raise ValueError(f"unknown fields: {', '.join(map(repr, sorted(value)))}")
        _require({"detects": None, **value}, _KINDS[kind])  # older records lack it
        if kind == "setting":
            setting = value["setting"]
            temperatures = setting.get("temperatures") or [setting.get("temperature")]
            _require({"weights": "", **setting, "temperatures": temperatures}, _SETTING)
            _require(value["environment"], _PLACE)
    except ValueError as error:
        raise ResultsError(f"{file}:{line.number}: {one_line(error)}") from None
    return value


def _require(value: dict[str, Any], fields: dict[str, Any]) -> None:
    for name, hint in fields.items():
        if name not in value:
            raise ValueError(f"expected a field {name!r}; got none")
        if not fits(value[name], hint):
            raise ValueError(f"{name}: expected {hint}; got {value[name]!r:.40}")
