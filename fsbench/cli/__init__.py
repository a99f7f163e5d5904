"""The command line: one file per command, each thin (parse, call, print)."""

from __future__ import annotations

import codecs
import errno
import inspect
import io
import os
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import typer
from rich.console import Console

from fsbench import __version__, interrupts
from fsbench.cli import (
    compare,
    doctor,
    e2e,
    hotvocab,
    iomodel,
    listing,
    plot,
    recommend,
    report,
    run,
    tune,
    verify,
    warm,
)
from fsbench.cli.options import NAMES
from fsbench.errors import FsbenchError, UnusableFile

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.command("plot")(plot.plot)
app.command("compare")(compare.compare)
app.command("iomodel")(iomodel.iomodel)
app.command("report")(report.report)
app.command("recommend")(recommend.recommend)
app.command("list")(listing.list_)
app.command("verify")(verify.verify)
app.command("tune")(tune.tune)
app.command("doctor")(doctor.doctor)
app.command("e2e")(e2e.e2e)
app.command("warm")(warm.warm)
app.add_typer(hotvocab.app, name="hotvocab")


def _samplers() -> Iterable[str]:
    from fsbench.discover import discover

    return discover()


NAMES |= dict.fromkeys(("--provider", "--sampler"), _samplers)


def _print_version(is_given: bool) -> None:
    if is_given:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Benchmark exact LLM sampling fused into the LM-head matmul against other samplers.

    Exit codes: 0 ok; 1 a check failed; 2 an argument or file is wrong; 3 some cells failed;
    4 the device, timer or package is missing here; 5 verify found a defect; 128 + n stopped by
    signal n.
    """
    if context.invoked_subcommand != "run":  # `run` checks arguments and imports torch first
        interrupts.raise_exceptions()


_COMMANDS: list[Any] = [*app.registered_commands, *hotvocab.app.registered_commands]
for each in (app.registered_callback, *_COMMANDS):
    # A paragraph as one line, which --help wraps at the terminal's width.
    each.help = re.sub(r"(?<=\S)\n(?=\S)", " ", inspect.getdoc(each.callback) or "")
    each.short_help = each.help.split("\n")[0]  # in lists of commands, which would cut it


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace a character that the encoding of the output lacks.

    Bytes of file names that are not UTF-8 are printed unchanged, so that a name can be copied into
    a shell; other characters become "?".
    """
    assert isinstance(error, UnicodeEncodeError)
    letter = error.object[error.start]
    if "\udc80" <= letter <= "\udcff":
        return bytes([ord(letter) - 0xDC00]), error.start + 1
    return "?", error.start + 1


codecs.register_error("fsbench", _replace)


def main() -> None:
    """Console script `fsbench`: run a command; an FsbenchError becomes one line and a code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="fsbench")
    if os.environ.get("COLUMNS", "").strip() == "0":  # from a terminal that does not know its width
        del os.environ["COLUMNS"]
    try:
        os.getcwd()
    except OSError as error:
        _exit(f"working folder: {error.strerror}: `cd` to one that exists", UnusableFile.exit_code)
    try:
        try:
            app(prog_name="fsbench")  # for `python -m fsbench` too: completion needs one word
        finally:
            if sys.stdout is not None:  # None: closed by the caller
                sys.stdout.flush()
    except FsbenchError as error:
        _exit(str(error), error.exit_code)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
            raise
        # Python writes what is left of the output when it ends: let it succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader has enough
            sys.exit(1)
        _exit(f"cannot write: {error.strerror}", UnusableFile.exit_code)


def _exit(message: str, code: int) -> NoReturn:
    Console(stderr=True).print("[bold red]error:[/] ", end="")
    print(" ".join(message.split()), file=sys.stderr)
    sys.exit(code)
