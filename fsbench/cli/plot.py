"""`fsbench plot`: the figures of one or several runs, from their results. No GPU, no torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fsbench.cli.options import FOLDER, WORDS, Formats, Results, option
from fsbench.errors import ResultsError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(
    results: Results,
    out: Annotated[
        Path | None,
        option("--out", FOLDER, "Folder for the figures. Default: plots/ in the first RESULTS."),
    ] = None,
    figures: Annotated[
        str | None, option("--figure", WORDS, "Comma list, as breakdown,costs. Default: all.")
    ] = None,
    formats: Formats = "png",
) -> None:
    """Draw the figures of every configuration in the results.

    These are runtime, speedup, roofline and bandwidth; headline: the time over that of the matmul;
    the breakdown of kernel time into matmul and sampling; costs: energy, memory and the first call;
    and what storing the logits adds. A figure that does not apply is left out; one that --figure
    names is explained.
    Where several LM heads were measured alike, also the fastest sampler by B and LM head; where
    several numbers of GPUs were, the time against these. Of problems with filters, heat maps of
    the time over that of the matmul alone; their other figures only if --figure names them. Of
    folders of `fsbench e2e` tpot, the time per output token, a panel for each model.
    Runs of the same configuration are merged: a cell measured twice is drawn from the run given
    last (below one folder, the last by name), and a speedup always comes from a single run.
    """
    from fsbench.cli.result_frames import measured_results
    from fsbench.e2e.records import STEPS, read
    from fsbench.e2e.summary import summary
    from fsbench.report.figures import end_to_end
    from fsbench.report.figures.catalog import FIGURES, plain, planned
    from fsbench.report.figures.parallel import drawn
    from fsbench.report.figures.parts import check_formats, each_once, save
    from fsbench.report.figures.style import styles
    from fsbench.report.tables import configurations

    known = (*FIGURES, "tpot")
    chosen = each_once("--figure", map(str.strip, (figures or ",".join(known)).split(",")), known)
    suffixes = check_formats(name.strip() for name in formats.split(","))
    folder = results[0] / "plots" if out is None else out

    def written(name: str, stem: str, drawing: Callable[[], Figure | None]) -> list[str]:
        """Draw a figure and write it; returns what to print."""
        figure = drawing()
        if figure is None:
            return [f"no {name} figure for {stem}: {FIGURES[name].absent}"] if figures else []
        paths = [folder / f"{name}_{stem}.{suffix}" for suffix in suffixes]
        for path in paths:
            save(figure, path)
        return [f"wrote {path}" for path in paths]

    tasks: list[Callable[[], list[str]]] = []
    decodings = [folder for folder in results if (folder / STEPS).is_file()]
    if "tpot" in chosen:
        lines = (line for folder in decodings for line in read(folder))
        for engine, figure in end_to_end.draw_engines(summary(lines)):
            tasks.append(partial(written, "tpot", engine, partial(lambda figure: figure, figure)))
    runs = [folder for folder in results if folder not in decodings]
    of_runs = [name for name in chosen if name in FIGURES]
    if runs and of_runs:
        frame = measured_results(runs)
        found = configurations(frame)
        shown = found if figures else plain(found)
        groups = {name: found if name == "filters" else shown for name in of_runs}
        looks = styles(frame)
        for name, same in groups.items():
            plans = list(planned(same, [name], looks))
            tasks += [partial(written, *plan) for plan in plans]
            if figures and not plans:
                print(f"no {name} figure: {FIGURES[name].absent}")
    wrote = 0
    for said in drawn(tasks):
        wrote += sum(line.startswith("wrote ") for line in said)
        print(*said, sep="\n", end="\n" if said else "", flush=True)
    if not wrote:
        raise ResultsError(
            f"--figure: expected one that these results have; got {', '.join(chosen)}"
        )
    print(f"{wrote} figures in {folder}")
