"""Table of all figures. A new figure is a function, an entry in FIGURES and a test."""

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
    """A kind of figure, drawn from one or several configurations.

    Attributes:
        draw: (configurations, styles) -> figure, or None if there is nothing to draw.
        absent: message for the case of None.
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
        "no sampler with filters was measured in one run with the matmul alone",
        filters.over_filters,
    ),
}


def planned(
    measured: Alike, names: Sequence[str], styles: Styles
) -> Iterator[tuple[str, str, Callable[[], Figure | None]]]:
    """Yield (name, stem, function that draws or returns None) for each possible figure.

    Raises:
        KeyError: a name is not in FIGURES.
    """
    for name in names:
        entry = FIGURES[name]
        for stem, alike in entry.groups(measured).items():
            yield name, stem, partial(entry.draw, alike, styles)


def plain(measured: Alike) -> Alike:
    """Return the configurations without filters; a sweep of filters adds dozens."""
    return [each for each in measured if each.drawn is not Kind.TRUNCATED]
