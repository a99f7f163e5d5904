"""Time per output token: docs/end-to-end.md."""

from __future__ import annotations

import json

import pandas as pd

from fsbench.e2e.models import decoders
from pages.blocks import (
    H200,
    RESULTS,
    block,
    bullets,
    listed,
    place,
    places,
    said,
    span,
    table,
    with_source,
)

SMALL_MODEL, MODEL, OLD = "Qwen3-1.7B", "Qwen3-8B", "Qwen3-32B, TP 2"
RUNS = {
    MODEL: "e2e-vllm-qwen3-8b-20261123",
    SMALL_MODEL: "e2e-vllm-qwen3-1.7b-20261123",
    OLD: "e2e-vllm-32b-20261122",  # vLLM 0.22.1
}
NOW = (MODEL, SMALL_MODEL)
FOUR = "e2e-vllm-qwen3-8b-all-20261123"
OF_FOUR = {
    MODEL: FOUR,
    "with fp8 layers": "e2e-vllm-qwen3-8b-fp8-20261124",
    "with V = 248,320": "e2e-vllm-qwen3-8b-248k-20261124",
}
DRAFTS = "e2e-vllm-drafts-20261124"
ON_H100 = "h100/e2e-vllm-qwen3-8b-20261124"
HF_DRAFTS = "h100/e2e-hf-drafts-20261124"
SAMPLERS = {
    "vllm-flashinfer": "vLLM with FlashInfer",
    "flash_sample": "`flash_sample`",
    "screened": "`screened`",
}


def tpots(run: str) -> pd.DataFrame:
    """The rows of a record by kind of requests, sampler and B."""
    found = pd.read_csv(RESULTS / place(run) / "e2e.csv")
    if "requests" not in found:
        found["requests"] = "plain"
    return found.set_index(["requests", "sampler", "b"]).sort_index()


def saved(model: str, requests: str, of: str = "reduction_pct") -> pd.Series[float]:
    """What flash_sample saves of vLLM's time per token, in percent, by B."""
    found: pd.Series[float] = tpots(RUNS[model])[of][requests, "flash_sample"]
    return found


@block
def e2e_models() -> str:
    return f"Models: {listed(f'`{name}`' for name in decoders())}."


@block
def tpot() -> str:
    rows = []
    for model in NOW:
        of = tpots(RUNS[model])
        for requests in of.index.unique("requests"):
            for B, ours in of.loc[requests, "flash_sample"].iterrows():
                own = of.loc[requests, "vllm", B]
                rows.append(
                    [
                        *(model, requests, B, f"{own.tpot_ms:.3f}", f"{ours.tpot_ms:.3f}"),
                        f"{ours.reduction_pct:.1f} ± {ours.reduction_sd_pct:.1f}",
                        f"{ours.gpu_reduction_pct:.1f} ± {ours.gpu_reduction_sd_pct:.1f}",
                        *(f"{ours.possible_pct:.1f}", f"{own.amdahl_pct:.1f}"),
                    ]
                )
    heads = [
        *("model", "requests", "B", "vLLM, ms", "`flash_sample`, ms", "saved, %"),
        *("GPU-bound, saved %", "possible, %", "sampling in no time, %"),
    ]
    return with_source(table(heads, rows, left=2), *places(*(RUNS[model] for model in NOW)))


@block
def tpot_samplers() -> str:
    """What four samplers in one model take, in turn."""
    rows = []
    for model, run in OF_FOUR.items():
        of = tpots(run)
        for requests, B in of.index.droplevel("sampler").unique():
            own = of.loc[requests, "vllm", B].tpot_ms
            cells = [_saved(of.loc[requests, name, B]) for name in SAMPLERS]
            rows.append([model, requests, B, f"{own:.3f}", *cells])
    heads = [
        *("model", "requests", "B", "vLLM, ms"),
        *(f"{name}, saved %" for name in SAMPLERS.values()),
    ]
    return with_source(table(heads, rows, left=2), *places(*OF_FOUR.values()))


def _saved(row: pd.Series) -> str:
    bound = "" if pd.isna(row.gpu_reduction_pct) else f" ({row.gpu_reduction_pct:.1f})"
    return f"{row.reduction_pct:.1f} ± {row.reduction_sd_pct:.1f}{bound}"


@block
def tpot_drafts() -> str:
    """Steps of three drafts and their verification."""
    return _two_samplers(DRAFTS)


@block
def tpot_h100() -> str:
    return _two_samplers(ON_H100)


def _two_samplers(run: str) -> str:
    """What the plug-in's two samplers save of vLLM's time in a record."""
    of = tpots(run)
    rows = []
    for requests, B in of.index.droplevel("sampler").unique():
        own = of.loc[requests, "vllm", B].tpot_ms
        cells = [_saved(of.loc[requests, name, B]) for name in ("flash_sample", "screened")]
        rows.append([requests, B, f"{own:.3f}", *cells])
    heads = ["requests", "B", "vLLM, ms", "`flash_sample`, saved %", "`screened`, saved %"]
    return with_source(table(heads, rows), *places(run))


@block
def hf_drafts() -> str:
    """Whole models in transformers with drafts and without."""
    of = tpots(HF_DRAFTS).loc["plain"].reset_index().sort_values(["b", "label"])
    rows = [
        [
            *(row.b, row.label, f"{row.tokens_per_s:,.0f}", number(row.reduction_pct, ".1f")),
            *(number(row.accepted, ".2f"), number(row.draft_us, ".0f")),
            *(number(row.draft_draw_pct, ".0f"), number(row.same_pct, ".0f")),
        ]
        for row in of[of.status == "ok"].itertuples()
    ]
    heads = [
        *("B", "sampler", "tokens/s", "saved, %", "accepted per step", "a draft, us"),
        *("of it head and draw, %", "tokens before a last bit differs, %"),
    ]
    return with_source(table(heads, rows, left=2), *places(HF_DRAFTS))


def number(x: float, form: str) -> str:
    """A number of a record, or a dash where it has none."""
    return "-" if pd.isna(x) else f"{x:{form}}"


@block
def tpot_findings() -> str:
    served, left = drawn_by()
    large = saved(OLD, "plain")
    bound = {kind: saved(SMALL_MODEL, kind, "gpu_reduction_pct") for kind in ("default", "plain")}
    kinds = {
        "Qwen3's default requests (T = 0.6, top-k 20, top-p 0.95)": "default",
        "top-p = 0.9 alone": "top-p",
        "log-probabilities": "logprobs",
        "a mix with penalties": "mixed",
        "plain requests, T = 1": "plain",
    }
    of = {words: saved(MODEL, kind) for words, kind in kinds.items()}
    told = [f"{words} {listed(f'{x:.1f}' for x in each)}" for words, each in of.items()]
    lines = (
        said("Every kind of request gains at every B. ", min(map(min, of.values())) > 0)
        + f"{MODEL}, percent of the time per token saved at B = "
        f"{listed(of[next(iter(of))].index)}: {'; '.join(told)}.",
        f"The plug-in drew {100 * served / (served + left):.4g} % of {served + left:,} tokens.",
        f"{SMALL_MODEL} waits for the host, and whole runs differ by more than samplers do. While "
        f"the GPU is what one waits for, {span(bound['default'], '.1f')} % are saved with default "
        f"requests, and {span(bound['plain'], '.1f')} % with plain ones.",
        f"{OLD} (vLLM 0.22.1, plain requests): {span(large, '.1f')} % are saved, "
        f"{span(saved(OLD, 'plain', 'possible_pct'), '.1f')} % were possible.",
    )
    return with_source(bullets(*lines), *places(*RUNS.values()))


def drawn_by() -> tuple[int, int]:
    """Tokens that the plug-in drew, and that it left to vLLM, in the records of today."""
    served = left = 0
    for model in NOW:
        text = (H200 / RUNS[model] / "steps.jsonl").read_text(encoding="utf-8")
        for line in filter(lambda line: '"counts"' in line, text.splitlines()):
            counts = json.loads(line)["counts"]
            served, left = served + counts["served"], left + sum(counts["left"].values())
    return served, left
