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

    Of each configuration: runtime, speedup and bandwidth; breakdown, the kernel time of matmul and
    sampling; costs, energy and memory; and what storing the logits adds. Of configurations that
    differ in one thing: headline, the time divided by that of the matmul; winner, whether fused
    sampling is faster by B and LM head; scaling, the time by number of GPUs; filters, heat maps of
    the time divided by that of the matmul. Of folders of `fsbench e2e`: tpot, the time per output
    token. Other figures of problems with filters are drawn only if --figure names them.
    A figure that does not apply is left out; one that --figure names is explained. A file that
    a figure replaces is reported as replaced.
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

    names = (*FIGURES, "tpot")
    chosen = each_once("--figure", map(str.strip, (figures or ",".join(names)).split(",")), names)
    suffixes = check_formats(name.strip() for name in formats.split(","))
    folder = results[0] / "plots" if out is None else out

    def written(name: str, stem: str, drawing: Callable[[], Figure | None]) -> list[str]:
        """Draw a figure and write it; returns what to print."""
        figure = drawing()
        if figure is None:
            return [f"no {name} figure for {stem}: {FIGURES[name].absent}"] if figures else []
        paths = [folder / f"{name}_{stem}.{suffix}" for suffix in suffixes]
        reports = []
        for path in paths:
            before = path.read_bytes() if path.is_file() else None
            save(figure, path)
            word = "wrote" if before is None else "replaced"
            reports.append(f"{'kept' if before == path.read_bytes() else word} {path}")
        return reports

    tasks: list[Callable[[], list[str]]] = []
    decodings = [folder for folder in results if (folder / STEPS).is_file()]
    if "tpot" in chosen:
        lines = (line for folder in decodings for line in read(folder))
        for engine, figure in end_to_end.draw_engines(summary(lines)):
            tasks.append(partial(written, "tpot", engine, partial(lambda figure: figure, figure)))
    runs = [folder for folder in results if folder not in decodings]
    run_figures = [name for name in chosen if name in FIGURES]
    if runs and run_figures:
        frame = measured_results(runs)
        measured = configurations(frame)
        shown = measured if figures else plain(measured)
        groups = {name: measured if name == "filters" else shown for name in run_figures}
        looks = styles(frame)
        for name, group in groups.items():
            plans = list(planned(group, [name], looks))
            tasks += [partial(written, *plan) for plan in plans]
            if figures and not plans:
                print(f"no {name} figure: {FIGURES[name].absent}")
    files = 0
    for report in drawn(tasks):
        files += sum(not line.startswith("no ") for line in report)
        print(*report, sep="\n", end="\n" if report else "", flush=True)
    if not files:
        raise ResultsError(
            f"--figure: expected one that these results have; got {', '.join(chosen)}"
        )
    print(f"{files} figures in {folder}")
