"""Time per output token: docs/end-to-end.md."""

from __future__ import annotations

import pandas as pd

from fsbench.e2e.models import decoders
from pages.blocks import H200, block, bullets, listed, places, span, table, with_source

RUNS = {
    "Qwen3-1.7B": "e2e-vllm-1.7b-20261122",
    "Qwen3-8B": "e2e-vllm-8b-20261122",
    "Qwen3-32B, TP 2": "e2e-vllm-32b-20261122",
}


def _of(model: str) -> pd.DataFrame:
    return pd.read_csv(H200 / RUNS[model] / "e2e.csv").set_index(["sampler", "b"])


@block
def e2e_models() -> str:
    return f"Models: {listed(f'`{name}`' for name in decoders())}."


@block
def tpot() -> str:
    rows = []
    for model in RUNS:
        of = _of(model)
        for B, ours in of.loc["flash_sample"].iterrows():
            own, lean = of.loc[("vllm", B)], of.tpot_ms.get(("flashinfer_gumbel_lean", B))
            rows.append(
                [
                    *(model, B, f"{own.tpot_ms:.3f}"),
                    "" if lean is None else f"{lean:.3f}",
                    f"{ours.tpot_ms:.3f}",
                    f"{ours.reduction_pct:.1f} ± {ours.reduction_sd_pct:.1f}",
                    f"{ours.possible_pct:.1f}",
                    f"{own.amdahl_pct:.1f}",
                ]
            )
    heads = [
        *("model", "B", "vLLM, ms", "FI2 lean, ms", "`flash_sample`, ms", "saved, %"),
        *("possible, %", "sampling in no time, %"),
    ]
    return with_source(table(heads, rows), *places(*RUNS.values()))


@block
def tpot_findings() -> str:
    lines = []
    for model in list(RUNS)[1:]:
        of = _of(model)
        saved = of.loc["flash_sample"].reduction_pct
        share = 100 * (of.draw_us / (1e3 * of.tpot_ms)).loc["vllm"]
        lines.append(
            f"{model}: LM head and vLLM's sampler take {span(share, '.1f')} % of a step, and "
            f"`flash_sample` saves {span(saved, '.1f')} % of the time per token. The profiles say "
            f"that {span(of.loc['flash_sample'].possible_pct, '.1f')} % was possible."
        )
    lowest = _of("Qwen3-1.7B").tpot_min_ms
    saved = 100 * (1 - lowest["flash_sample"] / lowest["vllm"])
    lines.append(
        "Qwen3-1.7B is not decided. Whole runs of any sampler vary more than samplers do, because "
        "the GPU waits for the host. The lowest runs of `flash_sample` save "
        f"{span(saved, '.1f')} % (a negative number is a loss)."
    )
    return with_source(bullets(*lines), *places(*RUNS.values()))
