"""Shared options of commands, and readers that parse and check their values.

A reader takes (text, name of the option) and returns the value, or raises InvalidArgument.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from fsbench.cli.parsing import MOST, int_list, number_list
from fsbench.errors import (
    InvalidArgument,
    InvalidOption,
    ResultsError,
    printable,
    shown,
    unknown_name,
)
from fsbench.problem import DEVICES, DTYPES, QUANTIZED, models, parse_logits
from fsbench.records.typed import fits


@dataclass(frozen=True)
class Reader:
    """Parser of a value. metavar: its name in --help. names: the allowed values, if listed."""

    metavar: str
    read: Callable[[str, str], Any]
    names: Callable[[], Iterable[str]] | None = None

    def parser(self, name: str) -> Callable[[Any], Any]:
        """Return a parser for typer, which handles ValueError itself and also parses defaults."""

        def parse(value: Any) -> Any:
            try:
                return self.read(str(value), name)
            except InvalidArgument as error:
                raise InvalidOption(str(error)) from None

        return parse


NAMES: dict[str, Callable[[], Iterable[str]]] = {"--model": models}
"""Option -> names for shell completion, if its reader has none; cli adds the samplers."""


def _completer(name: str, reader: Reader) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        names = (reader.names or NAMES.get(name, tuple))()
        return [f"{before}{comma}{one}" for one in names if one.startswith(last)]

    return complete


def option(name: str, reader: Reader, help: str, **settings: Any) -> Any:
    """Return a typer.Option whose values are parsed by a reader."""
    return typer.Option(
        name,
        help=help,
        autocompletion=_completer(name, reader),
        parser=reader.parser(name),
        **{"metavar": reader.metavar, **settings},
    )


def argument(name: str, reader: Reader, help: str) -> Any:
    """Return a typer.Argument with this name in messages and in --help."""
    return typer.Argument(help=help, parser=reader.parser(name), metavar=name)


def whole(least: int = 1, most: int = MOST) -> Reader:
    """Read an integer from `least` to `most`."""

    def read(text: str, name: str) -> int:
        if re.fullmatch(r"[+-]?\d{1,40}", text, re.ASCII) and least <= int(text) <= most:
            return int(text)
        raise InvalidArgument(
            f"{name}: expected an integer from {least} to {most}; got {shown(text)}"
        )

    return Reader("INTEGER", read)


def number(least: float = -1e30, most: float = 1e30, above: bool = False) -> Reader:
    """Read a number from `least` to `most`; with `above`, `least` is excluded."""

    def read(text: str, name: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if least <= value <= most and not (above and value == least):
            return value
        bound = f"above {least:g}, at most {most:g}" if above else f"from {least:g} to {most:g}"
        raise InvalidArgument(f"{name}: expected a number {bound}; got {shown(text)}")

    return Reader("NUMBER", read)


def checked(metavar: str, read: Callable[[str, str], object]) -> Reader:
    """Read a text that `read` accepts, and return the text for the command to parse."""

    def same(text: str, name: str) -> str:
        read(text, name)
        return text

    return Reader(metavar, same)


def integers(least: int = 1, most: int = MOST) -> Reader:
    """Read a comma list of integers, for int_list."""
    return checked("INTEGERS", lambda text, name: int_list(text, name, least, most))


def one_of(names: Callable[[], Iterable[str]]) -> Reader:
    """Read one of the names that `names()` returns."""

    def read(text: str, name: str) -> str:
        allowed = list(names())
        if text not in allowed:
            raise unknown_name(name, text, allowed)
        return text

    return Reader("NAME", read, names)


def _word(text: str, name: str) -> None:
    if not (text.strip() and text.isprintable() and len(text) <= 200):
        raise InvalidArgument(f"{name}: expected a text that can be printed; got {shown(text)}")


def _models(text: str, name: str) -> None:
    _words(text, name)
    for each in text.split(","):
        if each.strip() not in models():
            raise unknown_name(name, each.strip(), models(), "fsbench list")


def _words(text: str, name: str) -> None:
    if not (all(map(str.strip, text.split(","))) and text.isprintable()):
        raise InvalidArgument(f"{name}: expected names separated by commas; got {shown(text)}")


def _distribution(text: str, name: str) -> None:
    if parse_logits(text)[1] > 1e4:
        raise InvalidArgument(f"{name}: expected a number up to 10000; got {shown(text)}")


def _path(text: str, name: str) -> Path:
    try:
        fine = bool(text.strip() and printable(text).isprintable())
        Path(text).exists()  # a name that is too long raises
    except (OSError, ValueError):
        fine = False
    if not fine:
        raise InvalidArgument(f"{name}: expected a path; got {shown(text)}")
    return Path(text)


def _folder(text: str, name: str) -> Path:
    path = _path(text, name)
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise InvalidArgument(
                f"{name}: expected a folder; got {shown(text)}: {part.name} is a file"
            )
    return path


def _file(text: str, name: str) -> Path:
    path = _path(text, name)
    if path.is_dir() or text.endswith("/"):
        raise InvalidArgument(f"{name}: expected a file; got the folder {shown(text)}")
    _folder(str(path.parent), name)
    return path


NUMBERS = checked("NUMBERS", number_list)
WORD = checked("NAME", _word)
WORDS = checked("NAMES", _words)
MODELS = checked("NAMES", _models)
DISTRIBUTION = checked("DISTRIBUTION", _distribution)


PATH = Reader("PATH", _path)
FOLDER = Reader("FOLDER", _folder)
FILE = Reader("FILE", _file)
SEED = whole(-(2**63), 2**63 - 1)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Results = Annotated[
    list[Path], argument("RESULTS", PATH, "Results folders, or folders that contain some.")
]
ProviderPath = Annotated[
    list[Path] | None,
    option(
        "--provider-path", PATH, "A .py file that defines PROVIDER or PROVIDERS; may be repeated."
    ),
]
Batches = Annotated[str | None, option("--batch", integers(), "Batch sizes B, comma list.")]
HiddenSizes = Annotated[
    str | None, option("--d", integers(), "Hidden sizes D, comma list; with --v.")
]
VocabularySizes = Annotated[
    str | None, option("--v", integers(), "Vocabulary sizes V, comma list; with --d.")
]
Models = Annotated[
    list[str] | None,
    option("--model", MODELS, "A named LM head; may be repeated. See `fsbench list`."),
]
_dtypes = one_of(lambda: DTYPES)
Dtype = Annotated[str, option("--dtype", _dtypes, "bf16, fp16 or fp32.")]
DtypeOrDefault = Annotated[
    str | None,
    option(
        "--dtype", _dtypes, "bf16, fp16 or fp32. Default: the preset's, or bf16, on a CPU fp32."
    ),
]
Weights = Annotated[
    str | None,
    option(
        "--weights",
        one_of(lambda: QUANTIZED),
        "int8 or fp8: the head is quantized itself. Default: it is of --dtype.",
    ),
]
Device = Annotated[
    str, option("--device", one_of(lambda: ("auto", *DEVICES)), "auto, cuda or cpu.")
]
ResultsFolder = Annotated[
    Path | None,
    option(
        "--out", FOLDER, "Folder. Default: a new one in results/<gpu>, named by time and commit."
    ),
]
Formats = Annotated[str, option("--format", WORDS, "Comma list of png, pdf, svg.")]


def options_of_folder(context: typer.Context, folder: Path | None) -> Path | None:
    """Set the defaults to the options of the run that --resume continues."""
    if folder is not None:
        from fsbench.records.store import read_environment

        options = read_environment(folder).get("options")
        if options is None:
            raise ResultsError(f"{folder}/env.json: expected the options of the run; got none")
        for parameter in context.command.params:
            value = options.get(parameter.name or "")
            if parameter.name == "provider_path" and fits(value, list[Any]):
                value = [printable(path) if isinstance(path, str) else path for path in value]
            texts = parameter.multiple
            if not fits(value, list[str] | None if texts else str | float | bool | None):
                expected = "a list of texts" if texts else "a text or a number"
                raise ResultsError(
                    f"{folder}/env.json: options: {parameter.name}: expected {expected}; "
                    f"got {value!r:.60}"
                )
        context.default_map = options
    return folder


ResumedFolder = Annotated[
    Path | None,
    option(
        "--resume",
        PATH,
        "Continue this results folder with its options: measure what is missing.",
        callback=options_of_folder,
        is_eager=True,
    ),
]


def require_one_folder(out: Path | None, resume: Path | None) -> None:
    """Raise InvalidArgument if both --out and --resume name a folder."""
    if out and resume:
        raise InvalidArgument("--out: expected without --resume, which names the folder already")


def repeatable(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that env.json records, for `options_of_folder`."""
    return {
        name: each for name, each in options.items() if name not in ("out", "resume", "dry_run")
    }


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer with an option per field of its dataclass parameters.

    Each field has a default and the annotation of a Typer option.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name in inspect.signature(command).parameters:
        group = groups.get(name)
        options = get_type_hints(group, include_extras=True) if group else {name: hints[name]}
        defaults = {each.name: each.default for each in fields(group)} if group else {}
        for each, hint in options.items():
            default = defaults.get(each, MISSING)
            parameters.append(
                Parameter(
                    each,
                    Parameter.KEYWORD_ONLY,
                    default=Parameter.empty if default is MISSING else default,
                    annotation=hint,
                )
            )

    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
        command(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__doc__, call.__name__ = command.__doc__, command.__name__
    return call
