"""Time vLLM's start with each sampler, and count what it compiles afterwards; writes CSV.

    python tools/measure_engine_start.py results/h100/vllm-start/start.csv [--model qwen3-8b]

Needs a GPU and vLLM. Each sampler starts twice: with empty caches of Triton, torch and vLLM, and
with the caches that the first start left. Weights are random, so no weights are read from disk.
With --warm, `fsbench warm` fills Triton's cache before one more start of each plug-in's sampler,
whose other caches are empty. After each start 1,000 mixed requests are served in groups of 1 to
`--rows`. The file next to the CSV has the environment. Columns:

    sampler, caches         vllm is its own sampler; caches are empty, filled, or warmed
    ready_s                 from the start of the process until the engine takes requests
    engine_s                the part of it after imports
    first_s                 of the first request, one token
    serving_s               of the 1,000 requests
    ours, others            kernels that Triton compiled after the engine was ready
    reported                messages of vLLM's monitor about compilation after that
    served, left            tokens that the plug-in drew, and left to vLLM while kernels compiled
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from write_csv import write_csv

from fsbench.e2e.models import decoder, sampling_parameters

COLUMNS = (
    *("sampler", "caches", "ready_s", "engine_s", "first_s", "serving_s"),
    *("ours", "others", "reported", "served", "left"),
)
CACHES = {
    "TRITON_HOME": "triton",  # as without TRITON_CACHE_DIR, which torch.compile would leave alone
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
}
"""Environment variable -> folder of a cache."""
KINDS = ("plain", "default", "top-p", "seeded", "logprobs", "greedy", "presence")
REQUESTS = 1000
PROMPT_TOKENS, OUTPUT_TOKENS = 16, 4


def serve(started: float, folder: str, rows: int, sampler: str) -> dict[str, Any]:
    """Start the engine in this process, serve the requests and return a row of the CSV file."""
    import triton
    from vllm import LLM, SamplingParams

    reports = Reports()
    logging.getLogger("vllm").addHandler(reports)
    imported = time.monotonic()
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=rows,
        max_model_len=PROMPT_TOKENS + OUTPUT_TOKENS,
        gpu_memory_utilization=0.8,
        enable_prefix_caching=False,
        enable_flashinfer_autotune=False,
    )
    ready = time.monotonic()
    compiled = {"ours": 0, "others": 0}

    def count(*, src: Any, cache_hit: bool, **_: Any) -> None:
        module = getattr(getattr(src, "fn", None), "__module__", "")
        if not cache_hit:
            compiled["ours" if "kernels." in module and "vllm" not in module else "others"] += 1

    triton.knobs.compilation.listener = count
    reports.count = 0

    def generate(first: int, number: int) -> None:
        sent = range(first, first + number)
        prompts = [{"prompt_token_ids": [1 + row % 997] * PROMPT_TOKENS} for row in sent]
        settings = [
            SamplingParams(
                max_tokens=OUTPUT_TOKENS,
                ignore_eos=True,
                detokenize=False,
                **sampling_parameters(KINDS[row % len(KINDS)], row, 1),
            )
            for row in sent
        ]
        llm.generate(prompts, settings, use_tqdm=False)

    settings = SamplingParams(max_tokens=1, detokenize=False)
    llm.generate([{"prompt_token_ids": [1] * PROMPT_TOKENS}], settings, use_tqdm=False)
    first = time.monotonic()
    sent, number = 0, 1
    while sent < REQUESTS:
        generate(sent, min(number, REQUESTS - sent))
        sent += number
        number = 1 if number >= rows else min(rows, number * 2 - number // 4 + 1)
    end = time.monotonic()
    counts = llm.collective_rpc("fsbench_counts")[0] if sampler != "vllm" else None
    return {
        "sampler": sampler,
        "ready_s": round(ready - started, 2),
        "engine_s": round(ready - imported, 2),
        "first_s": round(first - ready, 3),
        "serving_s": round(end - first, 2),
        **compiled,
        "reported": reports.count,
        "served": counts["served"] if counts else "",
        "left": sum(counts["left"].values()) if counts else "",
    }


class Reports(logging.Handler):
    """Counts vLLM's messages about compilation during inference."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "during inference" in record.getMessage()


def start(arguments: argparse.Namespace, sampler: str, root: Path, log: Path) -> dict[str, Any]:
    """Start an engine in a process whose caches are in the folder `root`; return its row."""
    variables = environment(root)
    if sampler != "vllm":
        variables["FSBENCH_VLLM"] = sampler
    variables |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that Triton's listener sees the engine
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # Each start from these caches has the same path of the model: vLLM's cache depends on it.
    folder, result = root / "model", root / "row.json"
    folder.mkdir(exist_ok=True)
    config = decoder(arguments.model).config("bfloat16", PROMPT_TOKENS + OUTPUT_TOKENS)
    (folder / "config.json").write_text(json.dumps(config))
    request = json.dumps([time.monotonic(), str(folder), arguments.rows, sampler])
    child = [sys.executable, __file__, "--serve", request, str(result)]
    with log.open("a") as output:
        subprocess.run(child, env=variables, stdout=output, stderr=output, check=True)
    row: dict[str, Any] = json.loads(result.read_text())
    return row


def environment(root: Path) -> dict[str, str]:
    """Return the variables of a process whose caches are in the folder `root`."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    return kept | {name: str(root / cache) for name, cache in CACHES.items()}


def warm(arguments: argparse.Namespace, sampler: str, root: Path, log: Path) -> None:
    """Have `fsbench warm` compile what a sampler's engine needs."""
    request = {"flash_sample": "vllm", "screened": "vllm-screened"}[sampler]
    command = [sys.executable, "-m", "fsbench", "warm", "--model", arguments.model]
    command += ["--request", request, "--batch", str(arguments.rows)]
    with log.open("a") as output:
        subprocess.run(command, env=environment(root), stdout=output, stderr=output, check=True)


def rows(arguments: argparse.Namespace) -> Iterator[list[object]]:
    """Start the engine with each sampler and each state of the caches; print and yield each row."""
    log = arguments.csv.with_suffix(".log")

    def measured(sampler: str, caches: str, root: str) -> list[object]:
        row = start(arguments, sampler, Path(root), log) | {"caches": caches}
        print(*(f"{name}={row[name]}" for name in COLUMNS), flush=True)
        return [row[name] for name in COLUMNS]

    for sampler in arguments.sampler.split(","):
        with tempfile.TemporaryDirectory() as root:
            yield measured(sampler, "empty", root)
            yield measured(sampler, "filled", root)
        if arguments.warm and sampler != "vllm":
            with tempfile.TemporaryDirectory() as root:
                warm(arguments, sampler, Path(root), log)
                yield measured(sampler, "warmed", root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("csv", type=Path, nargs="?")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--rows", type=int, default=128, help="max_num_seqs of the engine")
    parser.add_argument("--sampler", default="vllm,flash_sample")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        request, result = arguments.serve
        Path(result).write_text(json.dumps(serve(*json.loads(request))))
        return
    write_csv(arguments.csv, COLUMNS, rows(arguments), "cuda")


if __name__ == "__main__":
    main()
