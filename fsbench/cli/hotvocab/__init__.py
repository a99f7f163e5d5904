"""`fsbench hotvocab`: the CPU decision plane of SIMPLE, measured, modelled and drawn."""

from __future__ import annotations

import typer

from fsbench.cli.hotvocab import commands
from fsbench.cli.hotvocab.pipeline import pipeline

app = typer.Typer(
    no_args_is_help=True,
    help="Sampling on CPUs (SIMPLE): measure it, size its hot set, plot, predict a pipeline.",
)
for command in (
    commands.fit,
    commands.size,
    commands.bench,
    commands.exact,
    commands.plot,
    pipeline,
):
    app.command()(command)
