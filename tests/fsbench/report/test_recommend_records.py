"""The advice from all committed records, against the figure of winners and against single runs."""

from __future__ import annotations

import re

import pytest
from matplotlib.colors import to_hex
from tree import H200, RESULTS, ROOT

from fsbench.cli.result_frames import by_time
from fsbench.provider import Kind
from fsbench.records.summary import read_csv
from fsbench.report.figures import winners
from fsbench.report.figures.style import styles
from fsbench.report.recommend import recommend
from fsbench.report.tables import configurations, families


@pytest.fixture(scope="module")
def recorded():
    folders = by_time([H200, RESULTS / "h100"])
    return read_csv(folder for folder in folders if (folder / "results.csv").exists())


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_advice_is_what_the_figure_of_winners_shows(recorded, gpu):
    """On all recorded cells: the figure's own runs agree with all runs, to a point of a percent."""
    (line,) = re.findall(r"call RUNS,(.*)\) --figure winner", (ROOT / "Makefile").read_text())
    names = "|".join(line.split())
    shown = recorded[recorded.folder.str.contains(rf"/{gpu}/(?:{names})-2\d+$")]
    every = {_key(each): each for each in configurations(recorded)}
    looks, cells = styles(shown), 0
    for alike in families(configurations(shown)).values():
        alike = [each for each in alike if each.drawn is Kind.EXACT]
        if (figure := winners.draw(alike, looks)) is None:
            continue
        axes = figure.axes[0]
        batches = [int(label.get_text()) for label in axes.get_xticklabels()]
        heads = sorted(alike, key=lambda each: tuple(each.rows[["d", "v"]].iloc[0]))
        whole = [every[_key(head)] for head in heads]
        found = [
            {
                advised.b: advised
                for advised in recommend(each, each.providers(Kind.EXACT), forced=winners.FORCED)
            }
            for each in whole
        ]
        for text, patch in zip(axes.texts, axes.patches, strict=True):
            x, y = text.get_position()
            advised = found[y][batches[x]]
            assert abs(float(text.get_text().rstrip("%*")) / 100 - advised.saves) < 0.0151
            fused = advised.best in whole[y].providers(Kind.EXACT, fused=True)
            color = winners.FUSED if fused else winners.STORED
            assert to_hex(patch.get_facecolor()) in {color, winners.NOISE}
            cells += 1
    assert cells > 40


def _key(configuration):
    first = configuration.rows.iloc[0]
    return first.gpu, first.d, first.v, configuration.conditions


@pytest.mark.full
def test_no_recorded_run_has_a_much_stronger_alternative(recorded):
    """In no run with the advised sampler does it save less by more than runs differ: 2 points.

    Runs in which it does not win are of older kernels.
    """
    for each in configurations(recorded):
        ok = each.rows[(each.rows.status == "ok") & (each.rows.kind == each.drawn)]
        if ok.fused.nunique() == 1:
            continue
        for advised in recommend(each, each.providers(each.drawn)):
            if advised.saves is None:
                continue
            same = ok[(ok.b == advised.b) & (ok.provider != "flash_sampling_store")]
            best = same[same.provider == advised.best]
            for folder, us in zip(best.folder, best.median_us, strict=True):
                run = same[same.folder == folder]
                rival = run[run.fused != best.fused.iloc[0]].median_us.min()
                saves = 1 - us / rival
                assert not 0 < saves < advised.saves - 0.02, (each.title, advised, folder)
