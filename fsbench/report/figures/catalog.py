"""The one table of figures: name -> what draws it, of which configurations, and why it may lack.

A new figure is a function, an entry here and a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure

from fsbench.provider import Kind
from fsbench.report.figures import configuration, filters, headline, scaling, winners
from fsbench.report.figures.parts import Styles
from fsbench.report.scaling import over_ranks
from fsbench.report.tables import Configuration, families

Alike = list[Configuration]


@dataclass(frozen=True)
class Entry:
    """A figure of one or several configurations.

    draw: (configurations, styles) -> figure, or None where there is nothing to draw.
    absent: why there is none then.
    groups: all configurations -> those of each figure, by a stem for file names.
    """

    draw: Callable[[Alike, Styles], Figure | None]
    absent: str
    groups: Callable[[Alike], dict[str, Alike]]


def _each(measured: Alike) -> dict[str, Alike]:
    return {one.stem: [one] for one in measured}


def _of_one(drawing: Callable[[Configuration, Styles], Figure | None], absent: str = "") -> Entry:
    return Entry(lambda alike, looks: drawing(alike[0], looks), absent or "no cell", _each)


FIGURES: dict[str, Entry] = {
    "runtime": _of_one(configuration.runtime),
    "speedup": _of_one(
        configuration.speedup, "no fused and unfused exact sampler were measured in one run"
    ),
    "bandwidth": _of_one(configuration.bandwidth),
    "breakdown": _of_one(
        configuration.breakdown,
        "not measured: no kernel times, as `fsbench run --breakdown` takes them",
    ),
    "costs": _of_one(
        configuration.costs,
        "not measured: neither energy (`fsbench run --energy`) nor memory",
    ),
    "logits_store": _of_one(
        configuration.logits_store,
        "not measured: no run has the fused kernel with and without the store",
    ),
    "headline": Entry(
        lambda alike, _: headline.draw(alike),
        "no fused sampler, one that stores logits and the matmul alone were measured in one run",
        headline.over_logits,
    ),
    "winner": Entry(
        winners.draw,
        "fewer than two LM heads were measured alike, with samplers of both ways",
        lambda measured: families(plain(measured)),
    ),
    "scaling": Entry(scaling.draw, "one number of GPUs was measured", over_ranks),
    "filters": Entry(
        lambda alike, _: filters.draw(alike),
        "no samplers with filters were measured beside the matmul alone",
        filters.over_filters,
    ),
}


def planned(
    measured: Alike, names: Sequence[str], styles: Styles
) -> Iterator[tuple[str, str, Callable[[], Figure | None]]]:
    """Yield (name, stem, function that draws it or returns None) of each figure that may be drawn.

    Raises:
        KeyError: a name is not in FIGURES.
    """
    for name in names:
        entry = FIGURES[name]
        for stem, alike in entry.groups(measured).items():
            yield name, stem, partial(entry.draw, alike, styles)


def plain(measured: Alike) -> Alike:
    """Return the configurations without filters: a sweep of filters has dozens of others."""
    return [each for each in measured if each.drawn is not Kind.TRUNCATED]
