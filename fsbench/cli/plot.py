"""`fsbench plot`: the figures of one or several runs, from their results. No GPU, no torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fsbench.cli.options import WORDS, FigureFolder, Formats, Results, option
from fsbench.errors import ResultsError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(
    results: Results,
    out: FigureFolder = Path("plots"),
    figures: Annotated[
        str | None, option("--figure", WORDS, "Comma list, as breakdown,costs. Default: all.")
    ] = None,
    formats: Formats = "png",
) -> None:
    """Draw the figures of every configuration in the results.

    These are runtime, speedup, roofline and bandwidth; headline: the time over that of the matmul;
    the breakdown of kernel time into matmul and sampling; costs: energy, memory and the first call;
    and what storing the logits adds. What was not measured is left out.
    Where several LM heads were measured alike, also the fastest sampler by B and LM head; where
    several numbers of GPUs were, the time against these. Of problems with filters, heat maps of
    the time over that of the matmul alone; their other figures only if --figure names them. Of
    folders of `fsbench e2e` tpot, the time per output token, a panel for each model.
    Runs of the same configuration are merged: a cell measured twice is drawn from the run given
    last (below one folder, the last by name), and a speedup always comes from a single run.
    """
    from fsbench.cli.reading import measured_results
    from fsbench.e2e.records import STEPS, read
    from fsbench.e2e.summary import summary
    from fsbench.provider import Kind
    from fsbench.report import scaling
    from fsbench.report.figures import configuration as of_one
    from fsbench.report.figures import end_to_end, filters, headline, winners
    from fsbench.report.figures import scaling as of_ranks
    from fsbench.report.figures.parallel import drawn
    from fsbench.report.figures.parts import check_formats, save
    from fsbench.report.figures.style import styles
    from fsbench.report.tables import configurations, families

    names = (name.strip() for name in figures.split(",")) if figures else of_one.ALL
    chosen = of_one.check_figures(names)
    suffixes = check_formats(name.strip() for name in formats.split(","))
    tasks: list[Callable[[], list[str]]] = []

    def add(name: str, drawing: Callable[[], Figure | None], absent: str = "") -> None:
        """Plan a figure: a task that writes it, or says `absent`, and returns what to print."""

        def task() -> list[str]:
            figure = drawing()
            if figure is None:
                return [absent] if absent else []
            paths = [out / f"{name}.{suffix}" for suffix in suffixes]
            for path in paths:
                save(figure, path)
            return [f"wrote {path}" for path in paths]

        tasks.append(task)

    decodings = [folder for folder in results if (folder / STEPS).is_file()]
    if "tpot" in chosen:
        lines = (line for folder in decodings for line in read(folder))
        for engine, figure in end_to_end.draw_engines(summary(lines)):
            add(f"tpot_{engine}", partial(lambda figure: figure, figure))
    runs = [folder for folder in results if folder not in decodings]
    if runs:
        frame = measured_results(runs)
        found, looks = configurations(frame), styles(frame)
        for one in found:
            if one.drawn is Kind.TRUNCATED and not figures:
                continue  # a sweep has dozens
            for name in (name for name in chosen if name in of_one.FIGURES):
                absent = f"no {name} figure for {one.stem}: {of_one.ABSENT.get(name)}"
                add(f"{name}_{one.stem}", partial(of_one.draw, name, one, looks), absent)
        for stem, alike in scaling.over_ranks(found).items() if "scaling" in chosen else ():
            add(f"scaling_{stem}", partial(of_ranks.draw, alike, looks))
        for stem, same in headline.over_logits(found).items() if "headline" in chosen else ():
            add(f"headline_{stem}", partial(headline.draw, same))
        for stem, alike in families(found).items() if "winner" in chosen else ():
            add(f"winner_{stem}", partial(winners.draw, alike, looks))
        for stem, alike in filters.over_filters(found).items() if "filters" in chosen else ():
            absent = f"no filters figure for {stem}: no lower bound was measured"
            add(f"filters_{stem}", partial(filters.draw, alike), absent)
    wrote = False
    for said in drawn(tasks):
        wrote = wrote or any(line.startswith("wrote ") for line in said)
        print(*said, sep="\n", end="\n" if said else "", flush=True)
    if not wrote:
        raise ResultsError(
            f"--figure: expected one that these results have; got {', '.join(chosen)}"
        )
