"""`fsbench plot`: the figures of one or several runs, from their results. No GPU, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(
    results: Annotated[
        list[Path], typer.Argument(help="Results folders, or folders that contain some.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("plots"),
    figures: Annotated[
        str | None,
        typer.Option("--figure", help="Comma list, as breakdown,costs. Default: all."),
    ] = None,
    formats: Annotated[str, typer.Option("--format", help="Comma list of png, pdf, svg.")] = "png",
) -> None:
    """Draw the figures of every configuration in the results.

    These are runtime, speedup, roofline and bandwidth; the breakdown of kernel time into matmul and
    sampling; costs: energy, memory and the first call; and what storing the logits adds. What was
    not measured is left out.
    Where several LM heads were measured alike, also the fastest sampler by B and LM head; where
    several numbers of GPUs were, the time against these. Of problems with filters, heat maps of
    the time over that of the matmul alone; their other figures only if --figure names them. Of
    folders of `fsbench e2e` tpot, the time per output token, a panel for each model.
    Runs of the same configuration are merged: a cell measured twice is drawn from the run given
    last (below one folder, the last by name), and a speedup always comes from a single run.
    """
    from fsbench.analysis import scaling
    from fsbench.analysis.tables import configurations, families
    from fsbench.cli.reading import measured_results
    from fsbench.e2e.records import STEPS, read
    from fsbench.e2e.summary import summary
    from fsbench.figures import (
        configuration as plotting,
    )
    from fsbench.figures import (
        filters as filters_figure,
    )
    from fsbench.figures import (
        parts as figure_parts,
    )
    from fsbench.figures import (
        scaling as scaling_figure,
    )
    from fsbench.figures import (
        winners,
    )
    from fsbench.figures.end_to_end import write_figures
    from fsbench.figures.style import styles
    from fsbench.provider import Kind

    chosen = plotting.check_figures(
        (name.strip() for name in figures.split(",")) if figures else plotting.ALL
    )
    suffixes = figure_parts.check_formats(name.strip() for name in formats.split(","))
    end_to_end = [folder for folder in results if (folder / STEPS).is_file()]
    if end_to_end and "tpot" in chosen:
        lines = (line for folder in end_to_end for line in read(folder))
        for path in write_figures(summary(lines), out, suffixes):
            print(f"wrote {path}")
    results = [folder for folder in results if folder not in end_to_end]
    if end_to_end and not results:
        return
    frame = measured_results(results)
    found = configurations(frame)
    looks = styles(frame)
    for configuration in found:
        if configuration.drawn is Kind.TRUNCATED and not figures:
            continue  # a sweep has dozens
        for name in (name for name in chosen if name in plotting.FIGURES):
            figure = plotting.draw(name, configuration, looks)
            if figure is None:
                print(f"no {name} figure for {configuration.stem}: {plotting.ABSENT[name]}")
                continue
            _save(figure, out / f"{name}_{configuration.stem}", suffixes)
    for stem, alike in scaling.over_ranks(found).items() if "scaling" in chosen else ():
        _save(scaling_figure.draw(alike, looks), out / f"scaling_{stem}", suffixes)
    for stem, alike in families(found).items() if "winner" in chosen else ():
        figure = winners.draw(alike, looks)
        if figure is not None:
            _save(figure, out / f"winner_{stem}", suffixes)
    for stem, alike in filters_figure.over_filters(found).items() if "filters" in chosen else ():
        figure = filters_figure.draw(alike)
        if figure is None:
            print(f"no filters figure for {stem}: no lower bound was measured")
        else:
            _save(figure, out / f"filters_{stem}", suffixes)


def _save(figure: Figure, stem: Path, suffixes: list[str]) -> None:
    from fsbench.figures.parts import save

    for suffix in suffixes:
        path = stem.with_name(f"{stem.name}.{suffix}")
        save(figure, path)
        print(f"wrote {path}")
