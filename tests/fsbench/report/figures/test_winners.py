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
    ((stem, alike),) = families(configurations(frame)).items()
    return stem, winners.draw(alike, styles(frame))


def test_a_cell_says_which_way_is_faster_and_what_it_saves():
    rows = small_and_large()
    rows[4]["median_us"] = 152.0  # 1.3 % slower: noise
    rows += [row("ours", 1, 200.0, d=8192, fused=True), row("theirs", 1, 150.0, d=8192)]
    stem, figure = drawn(rows)
    assert stem == "h200"
    (axes,) = figure.axes
    cells = {
        (text.get_position(), text.get_text(), to_hex(patch.get_facecolor()))
        for text, patch in zip(axes.texts, axes.patches, strict=True)
    }
    assert cells == {
        ((0, 0), "25%", winners.FUSED),
        ((1, 0), "25%", winners.FUSED),
        ((0, 1), "25%*", winners.STORED),
        ((1, 1), "1%*", winners.NOISE),
    }
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "8"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "qwen3-8b, qwen3-235b-a22b, 4,096 × 151,936",
        "8,192 × 151,936",
    ]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        *("fused: Label of ours", "over stored logits: Label of theirs"),
        *("no difference above 2%", "no mark: over Label of theirs", "*: over Label of ours"),
    ]
    title = figure.get_suptitle()
    assert title.startswith(
        "Fused sampling is faster at 2 of 4 points, slower at 1, within 2% at 1"
    )
    sizes = [text.get_fontsize() for text in [*axes.texts, *axes.get_yticklabels()]]
    assert min(sizes) * 850 / 96 / figure.get_figwidth() >= 8


def test_the_call_of_users_counts_where_it_was_measured():
    called = row("flash_sampling_auto", 1, 80.0, fused=True)
    rows = [*small_and_large(), row("flash_sampling", 1, 60.0, fused=True), called]
    rows = [each for each in rows if each["provider"] != "ours" or each["d"] == 8192]
    assert [text.get_text() for text in drawn(rows)[1].axes[0].texts] == ["20%", "25%*"]


def test_of_many_batch_sizes_the_powers_of_two_are_shown():
    rows = [
        row(name, b, 75.0, d=d, fused=name == "ours")
        for name in ("ours", "theirs")
        for b in range(1, 17)
        for d in (4096, 8192)
    ]
    labels = drawn(rows)[1].axes[0].get_xticklabels()
    assert [label.get_text() for label in labels] == ["1", "2", "4", "8", "16"]


def test_a_cell_with_one_candidate_has_no_winner():
    rows = [each for each in small_and_large() if (each["provider"], each["b"]) != ("theirs", 1)]
    texts = [text.get_text() for text in drawn(rows)[1].axes[0].texts]
    assert texts == ["25%", "25%*"]
    assert drawn([each for each in rows if each["provider"] == "ours"])[1] is None


def test_one_lm_head_is_no_map():
    _, figure = drawn([each for each in small_and_large() if each["d"] == 4096])
    assert figure is None


def test_what_was_measured_differently_is_another_figure():
    rows = small_and_large() + small_and_large(dtype="fp16")
    groups = families(configurations(pd.DataFrame(rows)))
    assert {stem: len(alike) for stem, alike in groups.items()} == {"h200_bf16": 2, "h200_fp16": 2}
