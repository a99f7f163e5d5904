"""`fsbench compare`: two runs, or a run and the paper's tables. No GPU, no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from fsbench import paper as published
from fsbench.cli.options import PATH, WORD, Reader, argument, one_of, option
from fsbench.errors import ExitCode, InvalidArgument, ResultsError, shown


def percent(text: str, option: str) -> float:
    """Return a percentage as a fraction: '3%' or '3' -> 0.03."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%?", text)
    if not match or float(match[1]) >= 100:
        raise InvalidArgument(
            f"{option}: expected a percentage below 100, as 3%; got {shown(text)}"
        )
    return float(match[1]) / 100


def compare(
    results: Annotated[
        list[Path],
        argument("RESULTS", PATH, "Two runs A and B; with --paper, one or several."),
    ],
    paper: Annotated[
        str | None,
        option(
            "--paper",
            one_of(lambda: published.GPUS),
            "Compare with this GPU's columns in the paper's Tables 4 and 5.",
            metavar=f"[{'|'.join(published.GPUS)}]",
        ),
    ] = None,
    within: Annotated[
        float | None,
        option(
            "--within",
            Reader("PERCENT", percent),
            "Largest difference that counts as the same. Default: 2%; with --paper 5%.",
        ),
    ] = None,
    fail_on: Annotated[
        str | None,
        option(
            "--fail-on",
            WORD,
            metavar="slow[:PERCENT]",
            help="Exit code 1 if a cell is slower by more than this, as in slow:3%; with --paper, "
            "worse or worse:3%. Default: as --within.",
        ),
    ] = None,
) -> None:
    """Compare two runs cell by cell, or a run with the tables of the FlashSampling paper.

    Two runs: time of B / time of A with its interval, and FAST, SLOW, SAME or AMBIGUOUS. With
    --paper: our speedups over the paper's baselines, compared with the published ones.
    """
    if paper is not None:
        failed = _with_paper(results, paper, within, fail_on)
    elif len(results) != 2:
        raise InvalidArgument(
            f"RESULTS: expected two runs, or --paper; got {len(results)} and no --paper"
        )
    else:
        failed = _two_runs(results[0], results[1], within, fail_on)
    if fail_on is None:
        return
    for line in failed:
        print(f"--fail-on {fail_on}: {line}")
    if failed:
        raise typer.Exit(ExitCode.CHECK_FAILED)


def _two_runs(a: Path, b: Path, within: float | None, fail_on: str | None) -> list[str]:
    """Print the comparison; return a text for each cell that --fail-on rejects."""
    from fsbench.cli import comparing
    from fsbench.cli.result_frames import read_results
    from fsbench.records.store import read_environment
    from fsbench.report import compare as runs

    margin = runs.WITHIN if within is None else within
    limit = fail_limit(fail_on, "slow", margin)
    folders = [_only_run(a), _only_run(b)]
    cells = runs.pairs(*(read_results([folder]) for folder in folders))
    environments = [read_environment(folder) for folder in folders]
    comparing.print_environments(folders, environments, cells)
    comparing.print_runs(cells, margin)
    return comparing.slow_in_words(cells, limit) + comparing.lost_in_words(cells, "b")


def _only_run(path: Path) -> Path:
    from fsbench.records.store import results_folders

    folders = results_folders([path])
    if len(folders) != 1:
        names = ", ".join(map(str, folders))
        raise ResultsError(f"{path}: expected one run; got {len(folders)}: {names}")
    return folders[0]


def _with_paper(
    paths: list[Path], gpu: str, within: float | None, fail_on: str | None
) -> list[str]:
    """Print the comparison; return a text for each cell that --fail-on rejects."""
    from fsbench.cli import comparing
    from fsbench.cli.result_frames import read_results
    from fsbench.report import against_paper as paper
    from fsbench.report.tables import configurations

    margin = paper.WITHIN if within is None else within
    limit = fail_limit(fail_on, "worse", margin)
    compared = paper.compare(configurations(read_results(paths)), gpu)
    comparing.print_sources(gpu)
    comparing.print_speedups(compared, gpu, margin)
    comparing.print_summary([cells for _, cells in compared], margin)
    return [
        f"Table {cell.table}, B = {cell.b}, vs {cell.method}: {cell.ratio:.3f} of the paper's"
        for _, cells in compared
        for cell in cells[cells["ratio"] < 1 - limit].itertuples()
    ]


def fail_limit(text: str | None, word: str, default: float) -> float:
    """Return the limit of --fail-on, 'slow' or 'slow:3%'; `word` is the word that is allowed."""
    if text is None or text == word:
        return default
    kind, _, limit = text.partition(":")
    if kind != word or not limit:
        raise InvalidArgument(f"--fail-on: expected {word} or {word}:3% here; got {text!r}")
    return percent(limit, "--fail-on")
