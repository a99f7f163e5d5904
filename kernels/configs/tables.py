"""Tables of tile shapes: the config of a kernel by GPU, batch and hidden size.

A file of tables is TOML. The files in tiles/ are shipped; `fsbench tune` writes others:

    [[tiles]]
    kernels = ["hopper"]             # of KERNELS
    gpus = ["NVIDIA H200", "*H100*"] # patterns of the name that the driver gives; or "sm_90"
    record = "results/h200/tuning"   # the measurement behind it
    configs = [                      # a bucket of B, and the fields of the kernel's config
        { bucket = 64, max_d = 6144, warpgroups = 1, ... },  # for D <= 6144
        { bucket = 64, warpgroups = 2, ... },                # for the rest
    ]

Rows of the file that the environment variable FSBENCH_TILES names are preferred to shipped rows,
then the longest pattern that fits, then the smallest max_d. A table need not have every bucket.
"""

from __future__ import annotations

import os
import sys
import tomllib
from dataclasses import MISSING, fields
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from fsbench.errors import InvalidArgument, unknown_name
from fsbench.kernels.configs import hopper, portable, screen

KERNELS: dict[str, tuple[tuple[Any, ...], tuple[int, ...]]] = {
    "hopper": ((hopper.HopperConfig,), hopper.BUCKETS),
    "portable": ((portable.TileConfig,), portable.BUCKETS),
    "portable-token": ((portable.TileConfig,), portable.BUCKETS),
    "portable-byte": ((portable.TileConfig,), portable.BUCKETS),
    "screened": ((screen.ScreenConfig, screen.HopperScreenConfig), screen.BUCKETS),
}
"""Classes and buckets of the configs.

The portable kernel has other configs with token noise, and others for weights of one byte with any
noise. The screened sampler's first launch has two forms; a bucket has the config of one."""


class Row(NamedTuple):
    """A config with its kernel, GPU pattern, bucket of B, largest D and record of measurement."""

    kernel: str
    gpu: str
    bucket: int
    max_d: int
    config: Any
    record: str = ""


def find(kernel: str, B: int, D: int, gpu_name: str, capability: tuple[int, int] = (0, 0)) -> Any:
    """Return the config of `row_for`."""
    return row_for(kernel, B, D, gpu_name, capability).config


def row_for(kernel: str, B: int, D: int, gpu_name: str, capability: tuple[int, int]) -> Row:
    """Return the row of one of KERNELS for B and D on a GPU of this name and compute capability.

    Raises:
        InvalidArgument: The file that FSBENCH_TILES names cannot be read, or is no file of tables.
    """
    upper = portable.bucket(B, KERNELS[kernel][1])
    names = (gpu_name, f"sm_{capability[0]}{capability[1]}")
    return next(
        row
        for row in _all_rows()
        if (row.kernel, row.bucket) == (kernel, upper)
        and row.max_d >= D
        and any(fnmatchcase(name, row.gpu) for name in names)
    )


@cache
def _all_rows() -> list[Row]:
    """Read all files, once in a process; return their rows, the preferred ones first."""
    user_file = os.environ.get("FSBENCH_TILES")
    shipped = sorted(Path(__file__).with_name("tiles").glob("*.toml"))
    rows = []
    for paths in [Path(user_file)] if user_file else [], shipped:
        file_rows = [row for path in paths for row in read(path)]
        rows += sorted(file_rows, key=lambda row: (-len(row.gpu), row.max_d))
    return rows


def read(path: Path) -> list[Row]:
    """Read the rows of a file.

    Raises:
        InvalidArgument: It cannot be read, or is no file of tables; the message names the entry.
    """
    try:
        file = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: expected a TOML file of tables; got {error}") from error
    _check(file, {"tiles": list}, str(path))
    rows = []
    for i, table in enumerate(file["tiles"]):
        where = f"{path}: tiles[{i}]"
        _check(table, {"kernels": list, "gpus": list, "record": str, "configs": list}, where)
        for kernel, (j, entry) in product(table["kernels"], enumerate(table["configs"])):
            if kernel not in list(KERNELS):
                raise unknown_name(f"{where}.kernels", str(kernel), KERNELS)
            row = _row(entry, kernel, f"{where}.configs[{j}]")
            rows += [row._replace(gpu=str(g), record=table["record"]) for g in table["gpus"]]
    return rows


def sizes_of(config: Any, optional: bool = False) -> dict[str, str]:
    """Return the names and types of the fields that a table must have of a config, or may have."""
    return {
        field.name: str(field.type)
        for field in fields(config)
        if (field.metadata.get("in_tables") if optional else field.default is MISSING)
    }


def _row(entry: Any, kernel: str, where: str) -> Row:
    classes, buckets = KERNELS[kernel]
    types = {"int": int, "bool": bool}
    # The names decide between forms. For an entry of no form, the message names the first form's.
    names = set(entry) if isinstance(entry, dict) else set()
    config = next((form for form in classes if names >= set(sizes_of(form))), classes[0])
    optional = {"max_d": "int", **sizes_of(config, optional=True)}
    field_types = sizes_of(config) | {
        name: kind for name, kind in optional.items() if name in names
    }
    sizes = {name: types[kind] for name, kind in field_types.items()}
    _check(entry, {"bucket": int, **sizes}, where)
    if entry["bucket"] not in buckets:
        raise InvalidArgument(f"{where}.bucket: expected one of {buckets}; got {entry['bucket']}")
    try:
        tiles = config(**{name: entry[name] for name in sizes if name != "max_d"})
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}.{error}") from error
    return Row(kernel, "", entry["bucket"], entry.get("max_d", sys.maxsize), tiles)


def _check(values: Any, types: dict[str, type], where: str) -> None:
    """Raise unless `values` is a TOML table with these keys and types."""
    if not isinstance(values, dict):
        raise InvalidArgument(f"{where}: expected a table of {', '.join(types)}; got {values!r}")
    for name in values:
        if name not in types:
            raise unknown_name(where, name, types)
    for name, kind in types.items():
        if type(values.get(name)) is not kind:
            got = repr(values[name]) if name in values else "nothing"
            raise InvalidArgument(f"{where}.{name}: expected {kind.__name__}; got {got}")
