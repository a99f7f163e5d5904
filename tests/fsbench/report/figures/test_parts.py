"""Shared parts of figures."""

from __future__ import annotations

from matplotlib.figure import Figure

from fsbench.report.figures.parallel import drawn
from fsbench.report.figures.parts import laid_out


def test_a_dollar_sign_is_prose_in_a_title_and_powers_are_powers_at_a_logarithmic_axis():
    figure = Figure()
    axes = figure.subplots()
    axes.set(yscale="log", ylim=(1, 1e4), title="$a$")
    axes.get_yticklabels()  # as rotating the labels does: they exist before the layout
    assert laid_out(lambda: figure)() is figure
    assert not axes.title.get_parse_math()
    labels = [label for label in axes.get_yticklabels() if label.get_text().startswith("$")]
    assert labels and all(label.get_parse_math() for label in labels)


def test_who_waits_for_many_figures_is_told(capfd):
    assert list(drawn([lambda i=i: i for i in range(13)])) == list(range(13))
    assert capfd.readouterr().err == "drawing 13 figures\n"
    assert list(drawn([lambda: 1])) == [1] and capfd.readouterr().err == ""
