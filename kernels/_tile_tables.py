"""Tables of tile shapes: how they are written, and which of them is for a GPU.

A file of tables is TOML (tiles/*.toml are shipped, `fsbench tune` writes others):

    [[tiles]]
    kernels = ["portable"]             # one or several of KERNELS
    gpus = ["H200", "NVIDIA H100 NVL"] # words of the name that the driver gives, or "*": any GPU
    record = "results/h200/tuning"     # the measurement behind it
    configs = [                        # a bucket of B, and the fields of the kernel's config
        { bucket = 64, max_d = 6144, warpgroups = 1, ... },  # for D <= 6144
        { bucket = 64, warpgroups = 2, ... },                # for the rest
    ]

A config is looked for in the file that the environment variable FSBENCH_TILES names, then in the
shipped ones; in each, the table that names most of the GPU's name goes first, and of its rows the
first that fits. A table need not have every bucket. Files are read once in a process.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fsbench.errors import InvalidArgument, unknown_name
from fsbench.kernels import _flash_sampling_config as portable
from fsbench.kernels import _hopper_config as hopper
from fsbench.kernels._flash_sampling_config import TileConfig
from fsbench.kernels._hopper_config import HopperConfig

VARIABLE = "FSBENCH_TILES"
ANY_GPU = "*"
SHIPPED = Path(__file__).with_name("tiles")


class Kernel(NamedTuple):
    """What a table can be about. config: the class of its rows' configs."""

    config: type[TileConfig] | type[HopperConfig]
    buckets: tuple[int, ...]


KERNELS = {
    "hopper": Kernel(HopperConfig, hopper.BUCKETS),
    "portable": Kernel(TileConfig, portable.BUCKETS),
    "portable-token": Kernel(TileConfig, portable.BUCKETS),
}
"""By name. "portable" is with group noise, "portable-token" the same kernel with token noise."""


def bucket(kernel: str, B: int) -> int:
    """The bucket a batch size belongs to: its upper end; a larger B belongs to the last one."""
    buckets = KERNELS[kernel].buckets
    return next((upper for upper in buckets if upper >= B), buckets[-1])


class Row(NamedTuple):
    """A config, and the batch and hidden sizes that it is for (max_d None: every D)."""

    bucket: int
    config: TileConfig | HopperConfig
    max_d: int | None = None


@dataclass(frozen=True)
class Table:
    """See the module."""

    kernels: tuple[str, ...]
    gpus: tuple[str, ...]
    record: str
    rows: tuple[Row, ...]

    def match(self, gpu_name: str) -> int | None:
        """How many characters of a GPU's name this table names; None if it is for others."""
        lengths = [
            0 if part == ANY_GPU else len(part)
            for part in self.gpus
            if part == ANY_GPU or re.search(rf"(?<!\w){re.escape(part)}(?!\w)", gpu_name)
        ]
        return max(lengths, default=None)


def find(kernel: str, B: int, D: int, gpu_name: str) -> TileConfig | HopperConfig:
    """The config of a kernel of KERNELS for a batch and hidden size on a GPU, by its name.

    Raises:
        InvalidArgument: the file that FSBENCH_TILES names cannot be read, or is no file of tables.
    """
    upper = bucket(kernel, B)
    for table in _tables_for(kernel, gpu_name):
        for row in table.rows:
            if row.bucket == upper and (row.max_d is None or row.max_d >= D):
                return row.config
    raise AssertionError(f"{kernel}: no config for B={B} on any GPU is shipped")


@cache
def _tables_for(kernel: str, gpu_name: str) -> list[Table]:
    """The tables to look into, in that order."""
    own = os.environ.get(VARIABLE)
    found: list[Table] = []
    for tables in ([read(Path(own), f"{VARIABLE}: ")] if own else []), [shipped()]:
        ours = [
            (match, table)
            for table in (table for file in tables for table in file)
            if kernel in table.kernels and (match := table.match(gpu_name)) is not None
        ]
        found += [table for _, table in sorted(ours, key=lambda pair: -pair[0])]
    return found


@cache
def shipped() -> list[Table]:
    """The tables of all shipped files."""
    return [table for path in sorted(SHIPPED.glob("*.toml")) for table in read(path)]


def forget() -> None:
    """Read FSBENCH_TILES again at the next `find`."""
    _tables_for.cache_clear()


def read(path: Path, origin: str = "") -> list[Table]:
    """The tables of a file.

    Raises:
        InvalidArgument: it cannot be read, or is no file of tables. The message begins with
            `origin`, the path and the key.
    """
    where = f"{origin}{path}"
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{where}: expected a file of tables; got {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{where}: expected TOML; got {error}") from error
    _check_keys(entries, {"tiles"}, where)
    return [
        _table(entry, f"{where}: tiles[{i}]")
        for i, entry in enumerate(_list(entries.get("tiles"), dict, f"{where}: tiles"))
    ]


def _table(entry: dict[str, Any], where: str) -> Table:
    _check_keys(entry, {"kernels", "gpus", "record", "configs"}, where)
    kernels = _list(entry.get("kernels"), str, f"{where}.kernels")
    for name in kernels:
        if name not in KERNELS:
            raise unknown_name(f"{where}.kernels", name, KERNELS)
    if len({KERNELS[name].config for name in kernels}) > 1:
        raise InvalidArgument(f"{where}.kernels: expected kernels of one config; got {kernels}")
    rows = [
        _row(row, KERNELS[kernels[0]], f"{where}.configs[{i}]")
        for i, row in enumerate(_list(entry.get("configs"), dict, f"{where}.configs"))
    ]
    return Table(
        tuple(kernels),
        tuple(_list(entry.get("gpus"), str, f"{where}.gpus")),
        _typed(entry.get("record"), str, f"{where}.record"),
        tuple(rows),
    )


def _row(entry: dict[str, Any], kernel: Kernel, where: str) -> Row:
    types = {
        field.name: {"int": int, "bool": bool}[str(field.type)] for field in fields(kernel.config)
    }
    _check_keys(entry, {"bucket", "max_d", *types}, where)
    upper = _typed(entry.get("bucket"), int, f"{where}.bucket")
    if upper not in kernel.buckets:
        wanted = " or ".join(map(str, kernel.buckets))
        raise InvalidArgument(f"{where}.bucket: expected {wanted}; got {upper}")
    max_d = entry.get("max_d")
    if max_d is not None:
        _typed(max_d, int, f"{where}.max_d")
    values = {
        name: _typed(entry.get(name), kind, f"{where}.{name}") for name, kind in types.items()
    }
    try:
        return Row(upper, kernel.config(**values), max_d)
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}.{error}") from error


_NAMES = {int: "an integer", bool: "true or false", str: "a string", dict: "a table"}


def _typed(value: Any, kind: type, where: str) -> Any:
    if type(value) is not kind:
        got = "nothing" if value is None else repr(value)
        raise InvalidArgument(f"{where}: expected {_NAMES[kind]}; got {got}")
    return value


def _list(value: Any, kind: type, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        got = "nothing" if value is None else repr(value)
        raise InvalidArgument(f"{where}: expected a list that is not empty; got {got}")
    return [_typed(entry, kind, f"{where}[{i}]") for i, entry in enumerate(value)]


def _check_keys(entry: dict[str, Any], known: Iterable[str], where: str) -> None:
    for key in entry:
        if key not in known:
            raise unknown_name(where, key, known)


def text(tables: Iterable[Table]) -> str:
    """A file with these tables, which `read` understands."""
    lines = []
    for table in tables:
        lines += [
            "[[tiles]]",
            f"kernels = {_toml(list(table.kernels))}",
            f"gpus = {_toml(list(table.gpus))}",
            f"record = {_toml(table.record)}",
            "configs = [",
        ]
        for row in table.rows:
            bound = {} if row.max_d is None else {"max_d": row.max_d}
            values = {"bucket": row.bucket, **bound, **asdict(row.config)}
            pairs = ", ".join(f"{name} = {_toml(value)}" for name, value in values.items())
            lines.append(f"    {{ {pairs} }},")
        lines += ["]", ""]
    return "\n".join(lines)


def _toml(value: object) -> str:
    """A string, integer, truth value or list of these, which TOML writes as JSON does."""
    return json.dumps(value, ensure_ascii=False)
