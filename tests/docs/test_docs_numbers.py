"""The numbers in the documentation are those of the committed results."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
from docs_pages import fsbench, section, text
from tree import H200, ROOT

from fsbench import paper
from fsbench.analysis.comparisons import paper as beside_paper
from fsbench.analysis.comparisons import runs
from fsbench.analysis.tables import configurations
from fsbench.cli.reading import read_results


def test_times_in_vllm_are_the_measured_ones() -> None:
    """The table, and that neither 8B nor 32B loses anywhere."""
    page = section("end-to-end.md", "Measured")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| Qwen3")]
    assert len(rows) == 7 + 7 + 4
    for model, b, *cells in ([cell.strip() for cell in row] for row in rows):
        size = model.removeprefix("Qwen3-").split("B")[0]
        frame = pd.read_csv(ROOT / f"results/h200/e2e-vllm-{size}b-20261122" / "e2e.csv")
        of = frame[frame.b == int(b)].set_index("sampler")
        ours, own = of.loc["flash_sample"], of.loc["vllm"]
        lean = of.tpot_ms.get("flashinfer_gumbel_lean")
        assert cells == [
            f"{own.tpot_ms:.3f}",
            "" if lean is None else f"{lean:.3f}",
            f"{ours.tpot_ms:.3f}",
            f"{ours.reduction_pct:.1f} ± {ours.reduction_sd_pct:.1f}",
            f"{ours.possible_pct:.1f}",
            f"{own.amdahl_pct:.1f}",
        ], (model, b)
        assert size == "1.7" or ours.reduction_pct > 0
    small = pd.read_csv(ROOT / "results/h200/e2e-vllm-1.7b-20261122" / "e2e.csv")
    lowest = small.pivot(index="b", columns="sampler", values="tpot_min_ms")
    saved = (100 * (1 - lowest.flash_sample / lowest.vllm)).drop(8)
    listed = ", ".join(f"{value:.1f}" for value in saved.iloc[:-1])
    assert f"save {listed} and {saved.iloc[-1]:.1f} % at B = 1, 2, 4, 16, 32 and 64" in page


def options_table(d: int) -> str:
    """What an option costs, in percent over plain sampling, by batch size."""
    costs = pd.read_csv(H200 / "options" / "options.csv")
    costs = costs[costs["d"] == d].set_index(["option", "b"])
    lines = ["| option | B = 1 | 16 | 64 | 256 |", "| :--- | ---: | ---: | ---: | ---: |"]
    for option in costs.index.get_level_values("option").unique().drop("plain"):
        cells = [option]
        for b in (1, 16, 64, 256):
            row = costs.loc[option, b]
            own = 100 * row["floor_us"] / costs.loc["plain", b]["time_us"]
            cost = f"{100 * (row['ratio_to_plain'] - 1):+.1f}"
            cells.append(f"{cost} ({own:.1f})" if own >= 0.05 else cost)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_cost_of_the_options_is_the_measured_one():
    page = (ROOT / "docs" / "using-the-kernel.md").read_text(encoding="utf-8")
    assert options_table(4096) in page


def test_what_is_compared_with_the_paper_is_in_the_page_on_comparing() -> None:
    page = text("comparing.md")
    source = paper.source()
    for method, entry in source["baselines"].items():
        assert f"| {method} | `{entry['provider']}` | {entry['note']} |" in page
    own = source["fused"]
    assert (
        f"| {own['method']} | `{own['provider']}`, or what `--fused` names | {own['note']} ("
        in page
    )
    margins = (runs.WITHIN, beside_paper.WITHIN)
    assert margins == (0.02, 0.05) and "margin than 2 %" in page and "within 5 % of 1" in page


def test_two_runs_of_one_commit_differ_by_what_the_page_on_comparing_says() -> None:
    h200 = H200
    one, other = (read_results([h200 / name]) for name in ("paper-20261121", "lean-20261121"))
    cells = runs.pairs(one, other)
    furthest = max(cells["hi"].max() - 1, 1 - cells["lo"].min())
    assert f"differ by up to {100 * furthest:.1f} %, interval included" in text("comparing.md")
    assert furthest < runs.WITHIN


def test_the_comparison_of_the_committed_run_with_the_paper() -> None:
    run = H200 / "paper-20261121"
    summary = fsbench("compare", run, "--paper", "h200").splitlines()[-2:]
    assert "\n".join(summary) in text("comparing.md")
    found = beside_paper.compare(
        configurations(read_results([run])), "h200", paper.source()["fused"]["provider"]
    )
    cells = pd.concat([cells for _, cells in found]).set_index("b")["ratio"]
    assert (cells[cells.index <= 32] - 1).abs().max() < 0.09
    large = cells[cells.index >= 128]
    assert f"ours are {large.min():.2f} to {large.max():.2f} times" in text("comparing.md")


def test_what_the_hopper_kernel_reaches_is_the_measured() -> None:
    def us(run: str, name: str, D: int, batches: list[int]) -> list[float]:
        table = pd.read_csv(H200 / run / "results.csv")
        return list(
            table.set_index(["provider", "d", "b"]).sort_index()["median_us"][name, D].loc[batches]
        )

    def row(head: str, above: list[float], below: list[float], digits: int) -> str:
        cells = [f"{a / b:.{digits}f}" for a, b in zip(above, below, strict=True)]
        return f"| {head} | {' | '.join(cells)} |"

    reached = section("kernel.md", "What it reaches").replace("**", "")
    batches = [2**i for i in range(9)]
    for D, head in ((4096, "D = 4096, V = 151,936"), (8192, "D = 8192, V = 128,256")):
        hopper, portable, matmul, stream = (
            us("paper-20261121", name, D, batches)
            for name in ("flash_sampling_hopper", "flash_sampling", "matmul_only", "weight_stream")
        )
        assert row(f"{head}: time / matmul", hopper, matmul, 3) in reached
        assert row("the portable kernel", portable, matmul, 3) in reached
        assert row("share of the stream rate", stream[:8], hopper[:8], 2) in reached
    odd = [3, 24, 77, 96, 129, 144, 160, 176, 192, 200, 224, 512, 1024]
    hopper, argmax, matmul = (
        us("odd-20261121", name, 4096, odd)
        for name in ("flash_sampling_hopper", "gumbel_argmax", "matmul_only")
    )
    assert row("time, us", hopper, [1.0] * len(odd), 0) in reached
    assert row("time / matmul", hopper, matmul, 2) in reached
    assert row("argmax / matmul", argmax, matmul, 2) in reached
    profile = pd.read_csv(H200 / "profile-20261121" / "results.csv")
    joules = profile.set_index(["provider", "b"])["j_per_token"] * 1e3
    names = ("flash_sampling_hopper", "flash_sampling", "matmul_only")
    told = [[f"{joules[name, B]:.{0 if B == 1 else 1}f}" for name in names] for B in (1, 64, 256)]
    assert f"takes {told[0][0]} mJ, of the portable one {told[0][1]} and" in reached
    assert f"matmul alone {told[0][2]}; at B = 64 " + "{}, {} and {} mJ".format(*told[1]) in reached
    assert "at 256 {}, {} and {}".format(*told[2]) in reached


def test_times_over_several_gpus_are_the_measured_ones() -> None:
    page = section("several-gpus.md", "What was measured, and what was not")
    folder = H200 / "tp-20261122"
    large, small = (
        pd.read_csv(folder / f"scaling_h200_{stem}.csv").set_index(["provider", "b"])
        for stem in ("d8192_v128256", "d4096_v151936")
    )
    table = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(table) == len(large.index.get_level_values("provider").unique())
    for line in table:
        (name,) = re.findall("`(.*?)`", line)
        numbers = []
        for B in (16, 64, 256):
            numbers += [f"{large[f'tp{n}_median_us'][name, B]:.0f}" for n in (1, 2, 4)]
            numbers.append(f"{100 * large.tp4_ideal[name, B]:.0f} %")
        assert [part.strip() for part in line.strip("|").split("|")[1:]] == numbers

    def spread(values: pd.Series) -> tuple[float, float]:
        return values.round(2).min(), values.round(2).max()

    ours = "flash_sampling_hopper"
    assert spread(large.tp2_ideal[ours]) == (0.96, 0.97)
    assert spread(large.tp4_ideal[ours]) == (0.89, 0.92)
    assert spread(small.tp2_ideal[ours]) == (0.92, 0.94)
    assert spread(small.tp4_ideal[ours]) == (0.76, 0.80)
    assert [round(small.tp4_median_us[ours].agg(f)) for f in ("min", "max")] == [90, 142]
    gained = {}
    for n in (2, 4):
        median = large[f"tp{n}_median_us"].unstack()
        hopper, matmul = median.loc[ours], median.loc["matmul_only"]
        two_step = median.loc["flash_sampling_two_step"]
        assert two_step.sub(hopper).max() < 1.45
        collectives = median.loc[["flash_sampling_all_reduce", "flash_sampling_gather"]]
        more = collectives.sub(two_step)
        gained[n] = round(more.min().min()), round(more.max().max())
        ratio = (hopper / matmul).round(2)
        rival = (median.loc["gumbel_argmax"] / hopper).round(2)[[16, 64, 256]].tolist()
        if n == 2:
            assert (hopper < matmul)[[1, 16, 64]].all() and ratio[256] == 1.03
            assert round(hopper[256] - 385) == 15
            assert rival == [1.11, 1.16, 1.05]
        else:
            assert spread(ratio[[1, 16, 64]]) == (1.0, 1.02) and ratio[256] == 1.06
            assert rival == [1.15, 1.16, 1.06]
            logits = (median.loc["flashinfer_gumbel"] / hopper)[[16, 64, 256]]
            assert logits.round(1).tolist() == [1.7, 2.1, 2.9]
    assert gained == {2: (12, 20), 4: (14, 20)}
    gathered = large.tp2_min_us - large.tp1_min_us / 2
    for B, written in ((16, 77), (256, 283)):
        assert round(gathered["flashinfer_gumbel", B]) == written


def test_eight_gpus_are_predicted_from_the_records() -> None:
    from eight_gpus import markdown, table

    page = section("several-gpus.md", "Eight GPUs, by a model")
    h200 = H200
    found = table(h200 / "tp-20261122", h200 / "shards-20261122")
    assert markdown(found) in page
    assert (found.tp8_predicted_us < found.tp4_us).all()
    fused = found[found.provider != "gumbel_argmax"]
    ideal = fused.groupby("d").tp8_ideal.agg(["min", "max"]).round(2)
    assert ideal.loc[8192].tolist() == [0.77, 0.82] and ideal.loc[4096].tolist() == [0.51, 0.62]
    off = found.tp4_predicted_us / found.tp4_us - 1
    assert off.max().round(2) == 0.16 and off[fused.index].round(2).max() == 0.06
    assert off[fused.index].min() > 0
    large = fused[fused.d == 8192].round({"x1_us": 0, "x2_us": 0, "x4_us": 0, "shard8_us": 0})
    few, many = large[large.b <= 64], large[large.b == 256]
    assert (few.shard8_us.min(), few.shard8_us.max()) == (68, 70)
    assert set(many.shard8_us) <= {107, 108}

    def ends(rows: pd.DataFrame, *names: str) -> tuple[float, float]:
        return rows[list(names)].min().min(), rows[list(names)].max().max()

    assert ends(few, "x2_us", "x4_us") == (5, 10)
    assert ends(many, "x2_us", "x4_us") == (15, 27) and ends(many, "x1_us") == (25, 26)
    small = fused[(fused.d == 4096) & (fused.b <= 64)]
    assert [round(f(small.shard8_us)) for f in (min, max)] == [50, 57]
    # Four ranks with an eighth of the vocabulary each.
    measured: dict[tuple[str, int], list[float]] = {}
    points = (h200 / "shards-20261122" / "d8192_v64512_tp4" / "points.jsonl").read_text()
    for point in map(json.loads, points.splitlines()):
        key = point["cell"]["provider"], point["cell"]["b"]
        measured.setdefault(key, []).extend(point["measured"]["span_us"])
    medians = {key: float(np.median(spans)) for key, spans in measured.items()}
    for row in few[few.b <= 16].itertuples():
        assert round(medians[row.provider, row.b]) == 74
        assert -0.5 < row.tp8_predicted_us - medians[row.provider, row.b] < 3.5
