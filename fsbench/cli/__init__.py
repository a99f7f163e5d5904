"""The command line: one file per command, each thin (parse, call, print)."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable

import typer
from rich.console import Console

from fsbench import __version__
from fsbench.cli import (
    audit,
    compare,
    doctor,
    e2e,
    export,
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
from fsbench.errors import FsbenchError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.command("plot")(plot.plot)
app.command("compare")(compare.compare)
app.command("iomodel")(iomodel.iomodel)
app.command("report")(report.report)
app.command("export")(export.export)
app.command("recommend")(recommend.recommend)
app.command("list")(listing.list_)
app.command("verify")(verify.verify)
app.command("audit")(audit.audit)
app.command("tune")(tune.tune)
app.command("doctor")(doctor.doctor)
app.command("e2e")(e2e.e2e)
app.command("warm")(warm.warm)
app.add_typer(hotvocab.app, name="hotvocab")
for each in (*app.registered_commands, *hotvocab.app.registered_commands):
    # A paragraph as one line, which --help wraps at the terminal's width.
    each.help = re.sub(r"(?<=\S)\n(?=\S)", " ", inspect.getdoc(each.callback) or "")


def _samplers() -> Iterable[str]:
    from fsbench.discover import discover

    return discover()


NAMES |= dict.fromkeys(("--provider", "--sampler", "--fused"), _samplers)


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """How fast is exact sampling fused into the LM-head matmul, against everything else?

    Exit codes: 0 ok, 1 a check failed, 2 usage, 3 some cells failed, 4 no usable device or timer,
    5 a defect that audit found.
    """


def main() -> None:
    """Console script `fsbench`: run a command; an FsbenchError becomes one line and a code."""
    try:
        app()
    except FsbenchError as error:
        Console(stderr=True).print("[bold red]error:[/] ", end="")
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(error.exit_code)
