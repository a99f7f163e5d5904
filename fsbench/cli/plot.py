"""`fsbench plot`: draw figures of one or several runs. No GPU, no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fsbench.cli.options import FOLDER, WORDS, Formats, Results, option
from fsbench.errors import ResultsError, unknown_name

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

    Figures of one configuration: runtime, speedup and bandwidth; breakdown, the kernel time of
    matmul and sampling; costs, energy and memory; logits_store, the cost of storing the logits.
    Figures of configurations that differ in one condition: headline, the time / time of the matmul;
    winner, the faster approach by B and LM head; scaling, the time by number of GPUs; filters, heat
    maps of the time / time of the matmul. Figures of `fsbench e2e`: tpot, the time per output
    token; share, the part of a step that the LM head and the sampler take. Without --figure,
    figures that do not apply and other figures of problems with filters are left out; with
    --figure, the reason is printed.

    Runs of the same configuration are merged: a cell measured twice is drawn from the run given
    last (below one folder, the last by name), and a speedup is always from one run.
    """
    from fsbench.cli.result_frames import measured_results
    from fsbench.e2e.records import read, steps_file
    from fsbench.e2e.summary import summary
    from fsbench.report.figures import end_to_end
    from fsbench.report.figures.catalog import FIGURES, plain, planned
    from fsbench.report.figures.parallel import drawn
    from fsbench.report.figures.parts import METADATA, save
    from fsbench.report.figures.style import styles
    from fsbench.report.tables import configurations

    names = (*FIGURES, *end_to_end.NAMES)
    chosen = _chosen("--figure", figures or ",".join(names), names)
    suffixes = _chosen("--format", formats, METADATA)
    folder = results[0] / "plots" if out is None else out

    plans: list[tuple[str, str, Callable[[], Figure | None]]] = []
    decodings = [path for path in results if steps_file(path).is_file()]
    if decodings:
        lines = (line for path in decodings for line in read(path))
        for name, engine, figure in end_to_end.draw_engines(summary(lines), chosen):
            plans.append((name, engine, partial(lambda figure: figure, figure)))
    runs = [path for path in results if path not in decodings]
    run_figures = [name for name in chosen if name in FIGURES]
    if runs and run_figures:
        frame = measured_results(runs)
        measured = configurations(frame)
        shown = measured if figures else plain(measured)
        looks = styles(frame)
        for name in run_figures:
            same_kind = list(planned(measured if name == "filters" else shown, [name], looks))
            plans += same_kind
            if figures and not same_kind:
                print(f"no {name} figure: {FIGURES[name].absent}")

    def paths(name: str, stem: str) -> list[Path]:
        return [folder / f"{name}_{stem}.{suffix}" for suffix in suffixes]

    def written(name: str, stem: str, drawing: Callable[[], Figure | None]) -> list[str]:
        """Draw a figure and write it; return the lines to print."""
        figure = drawing()
        if figure is None:
            return [f"no {name} figure for {stem}: {FIGURES[name].absent}"] if figures else []
        reports = []
        for path in paths(name, stem):
            before = path.read_bytes() if path.is_file() else None
            save(figure, path)
            word = "wrote" if before is None else "replaced"
            reports.append(f"{'kept' if before == path.read_bytes() else word} {path}")
        return reports

    files = 0
    for report in drawn([partial(written, *plan) for plan in plans]):
        files += sum(not line.startswith("no ") for line in report)
        print(*report, sep="\n", end="\n" if report else "", flush=True)
    if not files:
        raise ResultsError(
            f"--figure: expected one that these results have; got {', '.join(chosen)}"
        )
    print(f"{files} figures in {folder}")


def _chosen(option: str, text: str, allowed: Collection[str]) -> list[str]:
    """Return the names of a comma list without repetitions; each must be allowed."""
    names = list(dict.fromkeys(map(str.strip, text.split(","))))
    for name in names:
        if name not in allowed:
            raise unknown_name(option, name, allowed)
    return names
