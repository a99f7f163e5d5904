"""The figure of winners, read back from its cells."""

from __future__ import annotations

import pandas as pd
from cells import results_row
from matplotlib.colors import to_hex

from fsbench.report.figures import winners
from fsbench.report.figures.style import styles
from fsbench.report.tables import configurations, families


def row(provider, b, median, d=4096, fused=False, **changes):
    return results_row(provider, b, median, 0.01, d=d, fused=fused, **changes)


def small_and_large(**changes):
    return [
        *(row("ours", b, 75.0, fused=True, **changes) for b in (1, 8)),
        *(row("theirs", b, 100.0, **changes) for b in (1, 8)),
        row("ours", 8, 200.0, d=8192, fused=True, **changes),
        row("theirs", 8, 150.0, d=8192, **changes),
    ]


def drawn(rows):
    frame = pd.DataFrame(rows)
    looks = styles(frame)
    ((stem, alike),) = families(configurations(frame)).items()
    return stem, winners.draw(alike, looks), looks


def test_a_cell_has_the_winners_color_and_what_it_saves():
    stem, figure, looks = drawn(small_and_large())
    assert stem == "h200"
    (axes,) = figure.axes
    cells = {
        (text.get_position(), text.get_text(), to_hex(patch.get_facecolor()))
        for text, patch in zip(axes.texts, axes.patches, strict=True)
    }
    ours, theirs = (to_hex(looks[name].line["color"]) for name in ("ours", "theirs"))
    assert cells == {((0, 0), "25%", ours), ((1, 0), "25%", ours), ((1, 1), "25%*", theirs)}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "8"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "qwen3-8b, qwen3-235b-a22b, 4,096 × 151,936",
        "8,192 × 151,936",
    ]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        *("Label of ours", "Label of theirs"),
        *("no mark: over Label of theirs", "*: over Label of ours"),
    ]


def test_a_cell_with_one_candidate_has_no_winner():
    rows = [each for each in small_and_large() if (each["provider"], each["b"]) != ("theirs", 1)]
    _, figure, _ = drawn(rows)
    assert [text.get_text() for text in figure.axes[0].texts] == ["25%", "25%*"]
    _, figure, _ = drawn([each for each in rows if each["provider"] == "ours"])
    assert figure is None


def test_one_lm_head_is_no_map():
    _, figure, _ = drawn([each for each in small_and_large() if each["d"] == 4096])
    assert figure is None


def test_what_was_measured_differently_is_another_figure():
    rows = small_and_large() + small_and_large(dtype="fp16")
    found = families(configurations(pd.DataFrame(rows)))
    assert {stem: len(alike) for stem, alike in found.items()} == {"h200_bf16": 2, "h200_fp16": 2}
