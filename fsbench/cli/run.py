"""`fsbench run`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsbench.cli.devices import device_to_use, require_gpus
from fsbench.cli.parsing import filters, int_list, penalties_of, shapes
from fsbench.errors import InvalidArgument

if TYPE_CHECKING:
    from fsbench.discover import Found


def _as_before(context: typer.Context, folder: Path | None) -> Path | None:
    """--resume: options that are not given are those of the run to be continued."""
    if folder is not None:
        from fsbench.records.store import read_environment

        context.default_map = read_environment(folder).get("options", {})
    return folder


def run(
    context: typer.Context,
    preset: Annotated[
        str | None,
        typer.Option(
            help="paper, lean, tp, quick, truncated, smoke or cpu. Default: paper, tp or cpu."
        ),
    ] = None,
    provider: Annotated[
        list[str] | None,
        typer.Option(help="A sampler; may be repeated. Default: those of the preset."),
    ] = None,
    provider_path: Annotated[
        list[Path] | None, typer.Option(help="A .py file that defines PROVIDER; may be repeated.")
    ] = None,
    batch: Annotated[str | None, typer.Option(help="Batch sizes B, comma list.")] = None,
    d: Annotated[str | None, typer.Option(help="Hidden sizes D, comma list; with --v.")] = None,
    v: Annotated[str | None, typer.Option(help="Vocabulary sizes V, comma list; with --d.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A named LM head; may be repeated. See `fsbench list`.")
    ] = None,
    tp: Annotated[
        str,
        typer.Option(help="Ranks that share the vocabulary (tensor parallel), comma list."),
    ] = "1",
    gpu: Annotated[
        str,
        typer.Option(
            help="Local GPU indices, comma list; one after the other. With --tp: of the ranks."
        ),
    ] = "0",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32. Default: the preset's.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Temperature >= 0; 0 is greedy.")] = 1.0,
    top_k: Annotated[
        str | None,
        typer.Option("--top-k", help="Keep the k likeliest tokens, comma list; 0 is off."),
    ] = None,
    top_p: Annotated[
        str | None,
        typer.Option("--top-p", help="Keep the likeliest of probability p, comma list; 1 is off."),
    ] = None,
    min_p: Annotated[
        str | None,
        typer.Option(
            "--min-p", help="Keep those of this part of the largest, comma list; 0 is off."
        ),
    ] = None,
    mixed: Annotated[
        bool, typer.Option("--mixed", help="Rows take turns: all filters, some, none.")
    ] = False,
    repetition_penalty: Annotated[
        float,
        typer.Option(help="Divide the logits > 0 of tokens seen, multiply the others; 1 is off."),
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Less for a token that is in the output; 0 is off.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Less for each time that it is there; 0 is off.")
    ] = 0.0,
    history: Annotated[
        int | None,
        typer.Option(help="Tokens that a row has seen, made up; with penalties. Default: 1024."),
    ] = None,
    timer: Annotated[str, typer.Option(help="auto, cupti, events, cpu or fake.")] = "auto",
    l2: Annotated[
        str, typer.Option(help="L2 before each step: cold, cold-write or warm.")
    ] = "cold",
    graph: Annotated[bool, typer.Option(help="Replay CUDA graphs, as engines do.")] = True,
    warmup: Annotated[int | None, typer.Option(help="Untimed steps per cell.")] = None,
    iters: Annotated[int | None, typer.Option(help="Timed steps per cell, in all rounds.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Interleaved rounds.")] = None,
    logits: Annotated[
        str, typer.Option(help="Law of the logits: normal:SIGMA, zipf:EXPONENT, peaked:GAP.")
    ] = "normal:1",
    seed: Annotated[int, typer.Option(help="Seed of inputs and noise.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Results folder. Default: results/<gpu>/<utc>-<commit>.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Continue this results folder: measure what is missing, with its options.",
            callback=_as_before,
            is_eager=True,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cells, measure nothing.")
    ] = False,
    check: Annotated[bool, typer.Option(help="Verify each sampler before timing it.")] = True,
    timeout: Annotated[
        float, typer.Option(help="Seconds that ranks (--tp) may be silent before their cell ends.")
    ] = 300.0,
    breakdown: Annotated[
        bool,
        typer.Option(
            "--breakdown",
            help="Show the time of matmul, sampling and the rest; time fused kernels without "
            "sampling, too, to split them.",
        ),
    ] = False,
    energy: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="After timing, repeat each cell this long and count the joules per token.",
        ),
    ] = None,
) -> None:
    """Time samplers over batch sizes and LM heads; write CSV and Markdown tables.

    Without options: the paper's Tables 4 and 5 on this GPU, or the CPU samplers where there is
    none. A sampler that fails verification is not timed. What was measured survives any crash.
    """
    from fsbench.cli.measuring import measure_on, measure_over_ranks
    from fsbench.discover import discover
    from fsbench.measure.plan import Plan
    from fsbench.measure.presets import preset as named_preset
    from fsbench.measure.ranks import Job
    from fsbench.problem import Problem
    from fsbench.timers import timer_name

    if out and resume:
        raise InvalidArgument("--out: expected without --resume, which names the folder already")
    indices = int_list(gpu, "--gpu", minimum=0)
    degrees = int_list(tp, "--tp")
    several = max(degrees) > 1
    if resume and len(indices) > 1 and not several:
        raise InvalidArgument(f"--gpu: expected one index with --resume; got {gpu!r}")
    device = device_to_use(device)
    preset = preset or ("cpu" if device == "cpu" else "tp" if several else "paper")
    effort = named_preset(preset)
    found = discover(provider_path or [])
    heads = shapes(model or [], d, v) or [("", D, V) for D, V in effort.shapes]
    batches = effort.batches if batch is None else int_list(batch, "--batch")
    iters = effort.iters if iters is None else iters
    penalties = penalties_of(repetition_penalty, presence_penalty, frequency_penalty, history)
    plan = Plan(
        [
            Problem(
                *(B, D, V, effort.dtype if dtype is None else dtype),
                *(temperature, device, logits, degree),
                **{**one, **penalties},
            )
            for degree in degrees
            for _, D, V in heads
            for one in filters(top_k, top_p, min_p, mixed) or effort.filters
            for B in batches
        ],
        _chosen(found, provider or [], preset, provider_path or []),
        graph=graph,
        warmup=effort.warmup if warmup is None else warmup,
        iters=iters,
        rounds=max(1, min(effort.rounds, iters)) if rounds is None else rounds,
        seed=seed,
        check=check,
        forms=breakdown,
        energy_s=energy,
    )
    if several:
        if breakdown or energy is not None:
            raise InvalidArgument("--tp: expected 1 with --breakdown or --energy; got " + tp)
        indices = _of_ranks(indices, max(degrees), gpu)
    if device == "cuda":
        require_gpus(indices)
    elif not several:
        indices = [0]
    timer = timer_name(timer, device, several)
    if dry_run:
        from fsbench.cli.reporting import print_plan

        print_plan(plan)
        return
    options = _to_repeat({**context.params, "device": device, "preset": preset})
    if several:
        job = Job(
            plan, [entry.name for entry in plan.providers], options["provider_path"], device,
            indices, timer, l2, timeout,
        )  # fmt: skip
        if exit_code := measure_over_ranks(job, options, out, resume):
            raise typer.Exit(exit_code)
        return
    exit_code = 0
    for index in indices:
        suffix = f"gpu{index}" if len(indices) > 1 else ""
        options["gpu"] = str(index)
        exit_code = max(exit_code, measure_on(index, plan, options, out, resume, suffix))
    if exit_code:
        raise typer.Exit(exit_code)


def _of_ranks(indices: list[int], ranks: int, given: str) -> list[int]:
    """The GPUs of the ranks: those given, or the first ones if there is nothing but the default."""
    if indices == [0]:
        return list(range(ranks))
    if len(indices) < ranks:
        raise InvalidArgument(f"--gpu: expected an index for each of {ranks} ranks; got {given!r}")
    return indices[:ranks]


def _chosen(
    found: dict[str, Found], names: list[str], preset: str, own_files: list[Path]
) -> list[Found]:
    """The samplers to measure: those named, or else those of the preset and the user's files.

    A broken plug-in belongs to no preset that anybody knows: it stays visible as a row.
    """
    from fsbench.discover import select

    if names:
        return select(found, names)
    own = {path.stem for path in own_files}
    return [
        entry
        for entry in found.values()
        if entry.provider is None or entry.name in own or preset in entry.provider.presets
    ]


def _to_repeat(options: dict[str, Any]) -> dict[str, Any]:
    """What env.json keeps of the options, for `_as_before`."""
    kept = {
        name: value for name, value in options.items() if name not in ("out", "resume", "dry_run")
    }
    kept["provider_path"] = [str(path.resolve()) for path in kept["provider_path"] or []]
    return kept
