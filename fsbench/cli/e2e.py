"""`fsbench e2e`: time per output token of a model in an engine, by sampler."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsbench.cli.devices import device_to_use
from fsbench.cli.options import (
    WORDS,
    Device,
    DtypeOrDefault,
    ResultsFolder,
    ResumedFolder,
    integers,
    number,
    one_of,
    option,
    repeatable,
    require_one_folder,
    whole,
)
from fsbench.cli.parsing import int_list
from fsbench.cli.tables import console
from fsbench.errors import ExitCode, InvalidArgument, shown

if TYPE_CHECKING:
    from fsbench.e2e.measure import Engine

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def e2e(
    context: typer.Context,
    engine: Annotated[
        str,
        option(
            "--engine",
            one_of(lambda: ("hf", "vllm")),
            "hf: a decode loop over transformers. vllm: vLLM 0.26.0.",
        ),
    ] = "hf",
    model: Annotated[
        str | None,
        option("--model", WORDS, "Models, comma list. Default: qwen3-1.7b, on a CPU tiny."),
    ] = None,
    batch: Annotated[
        str, option("--batch", integers(), "Requests at a time, comma list.")
    ] = "1,2,4,8,16,32,64",
    sampler: Annotated[
        str | None,
        option(
            "--sampler",
            WORDS,
            "Samplers, comma list, the baseline first: flash_sample, vLLM's own (vllm, "
            "vllm-flashinfer), or names of `fsbench list`. Default: the engine's own, FlashInfer, "
            "flash_sample.",
        ),
    ] = None,
    requests: Annotated[
        str,
        option("--requests", WORDS, "Kinds of requests, comma list (vllm). hf has plain ones."),
    ] = "plain",
    tp: Annotated[str, option("--tp", integers(), "GPUs of a model, comma list (vllm).")] = "1",
    runs: Annotated[int, option("--runs", whole(), "Recorded runs of each sampler.")] = 5,
    attempts: Annotated[
        int,
        option(
            "--attempts",
            whole(),
            "Most times that the runs of a batch size are made on a GPU, while the percent saved "
            "differs between them by a standard deviation of more than 2. The last ones count.",
        ),
    ] = 3,
    profiles: Annotated[
        int, option("--profiles", whole(), "Profiles of each sampler, for the GPU's own time.")
    ] = 10,
    speculate: Annotated[
        int | None,
        option("--speculate", whole(), "Drafts per step: hf compares with none; vllm, samplers."),
    ] = None,
    drafter: Annotated[
        str | None,
        option(
            "--drafter",
            WORDS,
            "In hf, comma list: ngram, early-exit. Default: both.",
        ),
    ] = None,
    prompt_tokens: Annotated[int, option("--prompt-tokens", whole(), "Tokens of a prompt.")] = 128,
    output_tokens: Annotated[int, option("--output-tokens", whole(4), "Tokens to decode.")] = 128,
    dtype: DtypeOrDefault = None,
    device: Device = "auto",
    memory: Annotated[
        float,
        option(
            "--memory",
            number(0, 1, above=True),
            "Share of the GPU's memory for all engines together (vllm).",
        ),
    ] = 0.9,
    seed: Annotated[
        int, option("--seed", whole(0, 2**32 - 1), "Seed of weights, prompts and noise.")
    ] = 0,
    out: ResultsFolder = None,
    resume: ResumedFolder = None,
) -> None:
    """Measure time per output token with random weights; samplers take turns in each run.

    Prints the share of the baseline's time that each sampler saves, and the most that a profile
    allows; writes CSV, Markdown and a figure. Nothing is downloaded. Samples are on disk as soon as
    they are taken: a call that was stopped can be continued.
    """
    from fsbench.e2e.measure import DecodePlan, measure
    from fsbench.e2e.models import decoder, default_samplers
    from fsbench.e2e.records import StepStore
    from fsbench.machine.environment import environment
    from fsbench.machine.packages import package_version
    from fsbench.records.store import new_folder

    require_one_folder(out, resume)
    device = device_to_use(device)
    on_gpu = device == "cuda"
    names = _names(model) if model else ["qwen3-1.7b" if on_gpu else "tiny"]
    dtype = dtype or ("bf16" if on_gpu else "fp32")
    in_vllm = bool(speculate) and engine == "vllm"
    if in_vllm:
        samplers = _of_vllm(sampler, drafter)
    elif speculate or drafter:
        samplers = _drafts(speculate, drafter, sampler, output_tokens)
    else:
        samplers = _names(sampler) if sampler else default_samplers()[engine]
    plan = DecodePlan(
        models=tuple(decoder(name) for name in names),
        batches=tuple(int_list(batch, "--batch")),
        samplers=tuple(samplers),
        tp=tuple(int_list(tp, "--tp")),
        runs=runs,
        attempts=attempts if on_gpu else 1,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        dtype=_DTYPES[dtype],
        seed=seed,
        requests=tuple(_names(requests)),
        profiles=profiles,
        speculate=0 if in_vllm else speculate or 0,
        drafts=speculate or 0 if in_vllm else 0,
    )
    versions = {package: package_version(package) for package in ("transformers", "vllm")}
    options = repeatable({**context.params, "device": device})
    facts = {**environment(device, sys.argv), **versions, "engine": engine, "options": options}
    make_engine(engine, device, Path(), memory).check(plan)  # before anything is written
    folder = resume or out or new_folder(facts, "e2e")
    chosen = make_engine(engine, device, folder, memory)
    store = StepStore(folder, facts, resume is not None)
    say = partial(print, file=sys.stderr, flush=True)
    try:
        failed = measure(plan, chosen, store, say)
    except BaseException:
        say(f"stopped; to continue: fsbench e2e --resume {shlex.quote(str(folder))}")
        raise
    finally:
        store.close()
    _finish(folder)
    if failed:
        raise typer.Exit(ExitCode.INCOMPLETE)


def make_engine(name: str, device: str, folder: Path, memory: float) -> Engine:
    """Return the engine of --engine, which writes its logs to the results folder."""
    if name == "hf":
        from fsbench.e2e.hf import HuggingFace

        return HuggingFace(device)
    from fsbench.e2e.vllm_engine import Vllm

    return Vllm(device, folder, memory)


def _drafts(
    k: int | None, drafters: str | None, sampler: str | None, output_tokens: int
) -> Sequence[str]:
    """Return the samplers of --speculate in transformers."""
    if k is None:
        raise InvalidArgument("--drafter: expected --speculate with it; got none")
    from fsbench.e2e.models import DRAFTERS, with_drafts

    if sampler and sampler != "flash_sample":
        raise InvalidArgument(
            f"--sampler: expected flash_sample with --speculate; got {shown(sampler)}"
        )
    return with_drafts(_names(drafters) if drafters else DRAFTERS, k, output_tokens)


def _of_vllm(sampler: str | None, drafters: str | None) -> Sequence[str]:
    """Return the samplers of --speculate in vLLM, each with an EAGLE drafter."""
    if drafters not in (None, "eagle"):
        raise InvalidArgument(f"--drafter: expected eagle in vllm; got {shown(drafters)}")
    able = ("vllm", "flash_sample", "screened")
    for name in (names := _names(sampler) if sampler else list(able[:2])):
        if name not in able:
            raise InvalidArgument(
                f"--sampler: expected {', '.join(able)} with --speculate; got {shown(name)}"
            )
    return names


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def _finish(folder: Path) -> None:
    from rich.markdown import Markdown

    from fsbench.e2e.tables import markdown, write_tables
    from fsbench.report.figures.end_to_end import write_figures

    frame = write_tables(folder)
    figures = write_figures(frame, folder)
    console(soft_wrap=False).print(Markdown(markdown(frame)))
    for path in (folder / "steps.jsonl", folder / "e2e.csv", folder / "e2e.md", *figures):
        print(f"wrote {path}")
