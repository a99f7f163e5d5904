"""`fsbench e2e`: time per output token of a model in an engine, with one sampler or another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsbench.cli.devices import device_to_use
from fsbench.cli.parsing import int_list
from fsbench.errors import InvalidArgument, unknown_name

if TYPE_CHECKING:
    from fsbench.e2e.measure import Engine

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def e2e(
    engine: Annotated[
        str, typer.Option(help="hf: a decode loop over transformers. vllm: vLLM 0.22.1.")
    ] = "hf",
    model: Annotated[
        str | None,
        typer.Option(help="Models, comma list. Default: qwen3-1.7b, on a CPU tiny."),
    ] = None,
    batch: Annotated[
        str, typer.Option(help="Requests at a time, comma list.")
    ] = "1,2,4,8,16,32,64",
    sampler: Annotated[
        str | None,
        typer.Option(
            help="Samplers, comma list, the baseline first: flash_sample, vllm (with that engine), "
            "or names of `fsbench list`. Default: the engine's usual one, FlashInfer, flash_sample."
        ),
    ] = None,
    tp: Annotated[str, typer.Option("--tp", help="GPUs of a model, comma list (vllm).")] = "1",
    runs: Annotated[int, typer.Option(help="Recorded runs of each sampler.", min=1)] = 5,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 128,
    output_tokens: Annotated[int, typer.Option(help="Tokens to decode.", min=4)] = 128,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32. Default: bf16, on a CPU fp32.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    memory: Annotated[
        float, typer.Option(help="Part of the GPU's memory for all engines together (vllm).")
    ] = 0.9,
    seed: Annotated[int, typer.Option(help="Seed of weights, prompts and noise.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder. Default: results/<gpu>/<utc>-<commit>-e2e.")
    ] = None,
) -> None:
    """Measure time per output token with random weights: samplers in turn, run after run.

    Prints what each saves of the baseline's time, beside what a profile says could be saved, and
    writes CSV, Markdown and a figure. Nothing is downloaded.
    """
    from fsbench.cli.measuring import new_folder
    from fsbench.e2e.measure import Plan, measure
    from fsbench.e2e.models import decoder, default_samplers
    from fsbench.e2e.records import Store
    from fsbench.machine.environment import environment
    from fsbench.machine.packages import package_version

    engines = default_samplers()
    if engine not in engines:
        raise unknown_name("--engine", engine, engines)
    device = device_to_use(device)
    on_gpu = device == "cuda"
    names = _names(model) if model else ["qwen3-1.7b" if on_gpu else "tiny"]
    dtype = dtype or ("bf16" if on_gpu else "fp32")
    if dtype not in _DTYPES:
        raise unknown_name("--dtype", dtype, _DTYPES)
    plan = Plan(
        models=tuple(decoder(name) for name in names),
        batches=tuple(int_list(batch, "--batch")),
        samplers=tuple(_names(sampler) if sampler else engines[engine]),
        tp=tuple(int_list(tp, "--tp")),
        runs=runs,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        dtype=_DTYPES[dtype],
        seed=seed,
    )
    versions = {package: package_version(package) for package in ("transformers", "vllm")}
    facts = {**environment(device, sys.argv), **versions, "engine": engine}
    folder = out or new_folder(facts, "e2e")
    chosen = make_engine(engine, device, folder, memory)
    chosen.check(plan)  # before anything is written
    store = Store(folder, facts)
    try:
        failed = measure(plan, chosen, store, lambda text: print(text, file=sys.stderr, flush=True))
    finally:
        store.close()
    _finish(folder)
    if failed:
        raise typer.Exit(3)


def make_engine(name: str, device: str, folder: Path, memory: float) -> Engine:
    """The engine of --engine; its logs, if it has any, go to the results folder."""
    if name == "hf":
        from fsbench.e2e.hf import HuggingFace

        return HuggingFace(device)
    from fsbench.e2e.vllm_engine import Vllm

    return Vllm(device, folder, memory)


def _names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise InvalidArgument(f"expected names separated by commas; got {text!r}")
    return list(dict.fromkeys(found))


def _finish(folder: Path) -> None:
    from fsbench.e2e.tables import markdown, write_tables
    from fsbench.figures.end_to_end import write_figures

    frame = write_tables(folder)
    figures = write_figures(frame, folder)
    print(markdown(frame))
    for path in (folder / "steps.jsonl", folder / "e2e.csv", folder / "e2e.md", *figures):
        print(f"wrote {path}")
