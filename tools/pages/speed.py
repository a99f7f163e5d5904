"""Times of one GPU: README.md, docs/results.md and docs/kernel.md."""

from __future__ import annotations

import pandas as pd

from fsbench.problem import models as named_models
from pages import released
from pages.blocks import (
    FI1,
    FI2,
    FI2_LEAN,
    H200,
    HOPPER,
    MATMUL,
    ONE_PASS,
    PORTABLE,
    RESULTS,
    SMALL,
    STEMS,
    STREAM,
    block,
    bullets,
    listed,
    medians,
    place,
    places,
    results,
    said,
    span,
    table,
    with_source,
)
from pages.engines import FOUR, MODEL, saved, tpots
from pages.exact import checks_of
from pages.heads import quantised, scores
from pages.speculation import ratios as drafted

PAPER, LEAN, TUNED = "paper-20261123", "lean-20261123", "tuned-20261123"
ODD = ("sweep-20261123", "boxes-20261123", "sweep-20261125")  # after changes of the Hopper kernel
SUSTAINED = "sustained-20261123"
SCREENED = "screened-d4096-20261125"
HEADS = ("models-20261123",)
ALL = (PAPER, LEAN, "lean-d8192-20261123", "lean-d8192-large-20261123")
OURS = (PORTABLE, HOPPER)
RACE, MULTINOMIAL = "exponential_race", "multinomial_compiled"
BETWEEN = (
    *(3, 24, 33, 40, 77, 96, 128, 129, 144, 160, 176, 192, 200, 224, 257, 320, 384, 512),
    *(768, 1024),
)
"""Batch sizes of the tables of odd ones."""
NO_RIVALS = {
    *("auto", HOPPER, PORTABLE, MATMUL, STREAM),
    *("flash_sampling_greedy", "flash_sampling_token", "greedy"),
}
"""Forms of the fused kernel, greedy decoding and lower bounds."""


def cells(*runs: str) -> pd.DataFrame:
    """Median times in us by run, D, V and B, a column for each provider, and "auto".

    "auto" is what flash_sample runs: see kernels/configs/choice.py.
    """
    found = results(*runs).pivot_table(
        index=["run", "d", "v", "b"], columns="provider", values="median_us"
    )
    if HOPPER in found:
        where = found.index.to_frame()
        most = where.run.map(lambda run: 128 if run.startswith("h100/") else 64)
        portable = (where.b <= most) & ((where.b <= 32) | (where.b >= 64) | (most > 64))
        found["auto"] = found[PORTABLE].where(portable, found[HOPPER])
    return found


def leads(*runs: str, ours: str = "auto") -> pd.Series[float]:
    """Time of every exact sampler over stored logits over ours, by run, D, V, B and provider."""
    found = cells(*runs)
    rivals = found[[name for name in found if name not in NO_RIVALS]]
    return rivals.div(found[ours], axis=0).stack()


def over_matmul(*runs: str, ours: str = "auto") -> pd.Series[float]:
    """Time of ours over that of the matmul alone, by run, D, V and B."""
    found = cells(*runs)
    return found[ours] / found[MATMUL]


def at(values: pd.Series[float], least: int, most: int) -> pd.Series[float]:
    """Those of B in least .. most."""
    B = values.index.get_level_values("b")
    return values[(least <= B) & (most >= B)]


@block
def headline(run: str = LEAN) -> str:
    us = cells(run).loc[run, *SMALL]
    names = ("auto", MATMUL, ONE_PASS, FI2_LEAN, RACE)
    rows = [
        [B, *(f"{us[name][B]:.0f}" for name in names), f"{us.auto[B] / us[MATMUL][B]:.2f}"]
        for B in (1, 16, 64, 128, 256)
    ]
    heads = [
        *("B", "`flash_sample`, us", "matmul alone", "matmul + one-pass argmax"),
        *("matmul + FlashInfer, lean", "matmul + exponential race (vLLM)", "ours / matmul"),
    ]
    return with_source(table(heads, rows, left=0), *places(run))


@block
def headline_figure() -> str:
    """The figure that `make plots` draws of these records, and their source."""
    runs = (LEAN, SCREENED)
    picture = (
        "![Time over the matmul alone, by batch size: fused, fused with a screened head, the "
        f"fastest that stores logits, FlashInfer](ROOT/plots/headline_{STEMS[SMALL[0]]}.png)"
    )
    told = "Each line is over the matmul of its own run. The screened head's logits are normal:3."
    return with_source(f"{picture}\n\n{told}", *places(*runs))


@block
def decisions() -> str:
    """Which call for which request, and what it costs or gains."""
    plain, h100 = (at(over_matmul(run), 1, 128) for run in (PAPER, f"h100/{PAPER}"))
    default_us = released.of_request("default")
    screened = over_matmul(SCREENED, ours="flash_sampling_screened")
    ideal = pd.read_csv(H200 / "tp-20261122" / f"scaling_{STEMS[8192]}.csv")
    ideal = ideal[ideal.provider == HOPPER].tp4_ideal
    screened_default = tpots(FOUR).reduction_pct["default", "screened"]
    default, plain_requests = (saved(MODEL, kind) for kind in ("default", "plain"))
    scored = scores().flash_score / scores()[MATMUL]
    own = quantised()
    rows = [
        [
            "a token from the softmax; temperature, bias, mask, seed, log-probability per row",
            "[`flash_sample`](ROOT/docs/using-the-kernel.md)",
            f"{span(plain)} of the time of the matmul alone, B up to 128; {span(h100)} on an H100",
        ],
        [
            "top-k, top-p, min-p, penalties",
            "[`truncated_sample`](ROOT/docs/truncated.md)",
            f"{MODEL}'s default: {span(default_us.fused / default_us.matmul)} of the matmul alone, "
            "B up to 256; the fastest of vLLM 0.26.0, FlashInfer 0.7.2 and Hugging Face takes "
            f"{span(default_us.rival / default_us.fused)} times as long as ours",
        ],
        [
            "small batches, and memory for half of the head once more",
            "[`screened_sample`](ROOT/docs/screened-head.md)",
            f"{span(at(screened, 1, 64))} of the matmul, B up to 64, D = 4096",
        ],
        [
            "an LM head that is int8 or fp8 itself",
            "[`flash_sample` with a `QuantisedHead`](ROOT/docs/quantised-heads.md)",
            f"{span(at(own.fp8, 1, 64))} of the matmul in bf16 with fp8, "
            f"{span(at(own.int8, 1, 64))} with int8, B up to 64",
        ],
        [
            "log-probabilities of given tokens, equal in rollout and trainer, with a gradient",
            "[`score`](ROOT/docs/log-probabilities.md)",
            f"{span(scored.loc[:64])} of the matmul alone, B up to 64",
        ],
        [
            "an LM head sharded over the GPUs of one host",
            "[`flash_sample` with a `VocabShard`](ROOT/docs/several-gpus.md)",
            f"{span(100 * ideal, '.0f')} % of ideal scaling on four GPUs, D = 8192",
        ],
        [
            "drafts of any drafter, no token changed",
            "[`draft_sample`, `verify_drafts`](ROOT/docs/speculation.md)",
            f"from a screened head {span(drafted('screened, sampled'))} of cuBLAS and argmax",
        ],
        [
            "vLLM 0.26.0 or 0.33.0",
            "[the plug-in](ROOT/docs/end-to-end.md#the-plug-in-for-vllm)",
            f"{span(default, '.1f')} % less time per output token with {MODEL}'s default requests, "
            f"{span(plain_requests, '.1f')} % with plain ones; with a screened head "
            f"{span(screened_default[[1, 16]], '.1f')} %, B = 1 and 16",
        ],
    ]
    return table(["request", "call", "on an H200 (its page has date and commit)"], rows, left=3)


@block
def findings() -> str:
    """What the tables of docs/results.md say."""
    matmul, rivals = over_matmul(PAPER), leads(*ALL)
    heads, of_heads = over_matmul(*HEADS), leads(*HEADS)
    lean = medians(LEAN).unstack("provider").loc[SMALL[0]]
    noise = lean[HOPPER] / lean["flash_sampling_greedy"]
    token = lean["flash_sampling_token"] / lean[PORTABLE]
    extra = results(LEAN).groupby("provider").peak_extra_bytes.max() / 1e6
    checks = {name: checks_of(name) for name in (PORTABLE, HOPPER)}
    bounds = [each["variation"]["bound"] for each in checks.values()]
    passed = [check["verdict"] == "ok" for each in checks.values() for check in each.values()]
    lines = (
        f"Up to B = 128 fused sampling takes {span(at(matmul, 1, 128))} of the time of cuBLAS's "
        f"matmul alone, at B = 256 {span(at(matmul, 256, 256))}.",
        said("Every sampler over stored logits takes longer: ", rivals.min() > 1)
        + f"{span(rivals)} times as long, over all B and both LM heads. The one-pass argmax takes "
        f"{span(rivals.xs(ONE_PASS, level='provider'))} times as long.",
        f"Over the LM heads of all {len(named_models())} models of `fsbench list`, at B = 1, 64 "
        f"and 256, fused sampling takes {span(heads)} of the matmul, and the rivals "
        f"{span(of_heads)} times as long.",
        f"The noise costs {100 * (noise[256] - 1):.0f} % at B = 256, and "
        f"{100 * (at_most(noise, 64) - 1):.1f} % at most up to B = 64, over the same kernel at "
        "T = 0 (D = 4096).",
        f"A Gumbel for every token in place of [one for 32](ROOT/docs/noise.md) would cost "
        f"{token[128]:.2f} times the time at B = 128 and {token[256]:.2f} times at B = 256.",
        f"The kernel needs {extra[HOPPER]:.1f} MB beyond its inputs. Samplers over stored logits "
        f"need {extra[ONE_PASS]:.0f} MB or more.",
        said("Both kernels passed every check of the ", all(passed))
        + "[recorded battery](ROOT/docs/exactness.md#what-was-found), with a total variation below "
        f"{max(bounds):.2g}.",
    )
    return with_source(bullets(*lines), *places(*ALL, *HEADS))


def at_most(values: pd.Series[float], B: int) -> float:
    """The largest up to a batch size."""
    return float(values[values.index <= B].max())


@block
def speedups(run: str, D: str) -> str:
    """The committed table of the Hopper kernel."""
    (path,) = (RESULTS / place(run)).glob(f"speedup_*_d{D}_v*.md")
    text = path.read_text(encoding="utf-8")
    section = text.split("## FlashSampling (Hopper)")[1].split("\n## ")[0]
    return with_source(section.strip(), *places(run))


@block
def host_times() -> str:
    """Of an eager call: of 0.1.0, past Triton's binder, and past the checks of a plain call."""
    us = pd.concat(pd.read_csv(H200 / run / "host.csv") for run in ("against-0.1.0", "host"))
    us = us.assign(label=us.label.replace("host", "now"))
    labels, calls = us.label.unique(), us.call.unique()
    times = us.pivot(index="call", columns="label", values="median_us")
    where = places("against-0.1.0", "host/host.csv")
    rows = [
        [call, *("" if time != time else f"{time:.0f}" for time in times.loc[call, labels])]
        for call in calls
    ]
    return with_source(table(["call", *(f"{each}, us" for each in labels)], rows), *where)


@block
def heads_of_models(run: str = HEADS[0]) -> str:
    ratio, lead = over_matmul(run), leads(run).unstack("provider").min(axis=1)
    ratio, lead = ratio.droplevel("run"), lead.droplevel("run")
    rows = [
        [model.name, f"{model.D:,}", f"{model.V:,}"]
        + [
            f"{ratio[model.D, model.V, B]:.2f} ({lead[model.D, model.V, B]:.2f})"
            for B in (1, 64, 256)
        ]
        for model in named_models().values()
    ]
    return with_source(table(["model", "D", "V", "B = 1", "64", "256"], rows), *places(run))


@block
def odd_batches(*runs: str) -> str:
    """Of the runs, the last that has a batch size."""
    runs = runs or ODD
    found = results(*runs)
    found = found[found.run == found.b.map(found.groupby("b").run.last())]
    us = found.pivot(index="b", columns="provider", values="median_us")
    rows = [
        [
            B,
            f"{row[HOPPER]:.0f}",
            *(f"{row[name] / row[MATMUL]:.2f}" for name in (HOPPER, PORTABLE, ONE_PASS)),
            *(f"{row[ONE_PASS] / row[name]:.2f}" for name in (HOPPER, PORTABLE)),
        ]
        for B, row in us.loc[us.index.isin(BETWEEN)].iterrows()
    ]
    heads = [
        *("B", "Hopper, us", "Hopper / matmul", "portable / matmul", "one-pass argmax / matmul"),
        *("argmax / Hopper", "argmax / portable"),
    ]
    slower = {name: [B for B in us.index if us[ONE_PASS][B] < us[name][B]] for name in OURS}
    at_b = {name: f"at B = {listed(slower[name])}" if slower[name] else "nowhere" for name in OURS}
    told = (
        f"The one-pass argmax is faster than the Hopper kernel {at_b[HOPPER]}, and than the "
        f"portable one {at_b[PORTABLE]}."
    )
    return with_source(f"{table(heads, rows, left=0)}\n\n{told}", *places(*runs))


@block
def tuned() -> str:
    """What max-autotune finds for the matmul of a rival."""
    us = medians(TUNED).unstack("provider").droplevel("d")
    found, given = us["exponential_race_tuned"], us[RACE]
    told = (
        "torch's max-autotune, which may replace cuBLAS's matmul and what follows it, takes "
        f"{listed(f'{x:.0f}' for x in found)} us at B = {listed(us.index)} for the exponential "
        f"race, {span(found / given)} of what cuBLAS takes. "
        + said("cuBLAS and the one-pass argmax are faster", (us[ONE_PASS] < found).all())
        + f": {listed(f'{x:.0f}' for x in us[ONE_PASS])} us."
    )
    return with_source(told, *places(TUNED))


@block
def reached(run: str = PAPER) -> str:
    """Both kernels over the matmul, and the share of the rate at which a read streams."""
    rows = []
    for D, of in medians(run).unstack("provider").groupby("d"):
        for B, row in of.droplevel("d").iterrows():
            ratios = (row[HOPPER] / row[MATMUL], row[PORTABLE] / row[MATMUL])
            share = f"{row[STREAM] / row[HOPPER]:.2f}" if B <= 128 else ""
            rows.append([D, B, *(f"{ratio:.3f}" for ratio in ratios), share])
    heads = ["D", "B", "Hopper / matmul", "portable / matmul", "share of the stream rate"]
    return with_source(table(heads, rows, left=0), *places(run))


@block
def sustained() -> str:
    """A step that stands alone, and one of seconds of steps back to back."""
    names = {
        HOPPER: "Hopper",
        PORTABLE: "portable",
        MATMUL: "matmul alone",
        ONE_PASS: "matmul + one-pass argmax",
        FI2_LEAN: "matmul + FlashInfer, lean",
        RACE: "matmul + exponential race (vLLM)",
    }
    found = results(SUSTAINED).set_index(["d", "b", "provider"]).sort_index()
    alone, loop = found.median_us, found.sustained_us
    rows = [
        [D, B, *(f"{loop[D, B, name]:.0f} ({alone[D, B, name]:.0f})" for name in names)]
        for D, B in found.index.droplevel("provider").unique()
    ]
    return with_source(table(["D", "B", *names.values()], rows, left=0), *places(SUSTAINED))


@block
def costs() -> str:
    """Energy, memory and the first call."""
    names = {
        HOPPER: "FlashSampling (Hopper)",
        PORTABLE: "FlashSampling (Triton)",
        FI2: "FI2",
        FI2_LEAN: "FI2, lean",
        FI1: "FI1",
        MULTINOMIAL: "Multinomial",
        RACE: "Exponential race",
        ONE_PASS: "matmul + one-pass argmax",
        MATMUL: "matmul alone",
    }
    warm = results("profile-20261121").set_index(["provider", "b"])
    cold = results("first-call-20261121").set_index(["provider", "b"]).first_call_s
    digits = {1: 1, 16: 2, 64: 2, 256: 3}
    rows = [
        [
            label,
            *(f"{1e3 * warm.j_per_token[name, B]:.{n}f}" for B, n in digits.items()),
            f"{warm.peak_extra_bytes[name, 256] / 1e6:.1f}",
            *(_seconds(value) for value in (cold[name, 1], warm.first_call_s[name, 1])),
        ]
        for name, label in names.items()
    ]
    heads = [
        *("", "mJ per token, B = 1", "16", "64", "256", "extra MB, B = 256"),
        *("first call, caches empty, s", "caches warm, s"),
    ]
    idle = warm.idle_w.iloc[0]
    note = f"The whole GPU's energy, nothing subtracted; it draws {idle:.0f} W when idle."
    records = places("profile-20261121", "first-call-20261121")
    return with_source(f"{table(heads, rows)}\n\n{note}", *records)


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value > 0.3 else f"{value:.2f}" if value > 0.005 else f"{value:.4f}"


@block
def options_cost(D: str, gpu: str = "h200") -> str:
    """What an option costs, in percent over plain sampling; in brackets its own bytes."""
    path = f"{gpu}/options/options.csv"
    of = pd.read_csv(RESULTS / path).query(f"d == {D}").set_index(["option", "b"])
    rows = []
    for option in of.index.get_level_values("option").unique().drop("plain"):
        cells = [option]
        for B in (1, 16, 64, 256):
            row = of.loc[(option, B)]
            own = 100 * row.floor_us / of.time_us["plain", B]
            cost = f"{100 * (row.ratio_to_plain - 1):+.1f}"
            cells.append(f"{cost} ({own:.1f})" if own >= 0.05 else cost)
        rows.append(cells)
    return with_source(table(["option", "B = 1", "16", "64", "256"], rows), path)
