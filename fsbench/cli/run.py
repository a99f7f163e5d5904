"""`fsbench run`: the main job."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsbench.cli.devices import device_to_use, require_gpus
from fsbench.cli.parsing import int_list, shapes
from fsbench.errors import InvalidArgument

if TYPE_CHECKING:
    import pandas as pd

    from fsbench.discover import Found
    from fsbench.runner import Plan


def _as_before(context: typer.Context, folder: Path | None) -> Path | None:
    """--resume: options that are not given are those of the run to be continued."""
    if folder is not None:
        from fsbench.results import read_environment

        context.default_map = read_environment(folder).get("options", {})
    return folder


def run(
    context: typer.Context,
    preset: Annotated[
        str | None,
        typer.Option(help="paper, lean, quick, smoke or cpu. Default: paper, or cpu."),
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
    gpu: Annotated[
        str, typer.Option(help="Local GPU indices, comma list; one after the other.")
    ] = "0",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32. Default: the preset's.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Temperature >= 0; 0 is greedy.")] = 1.0,
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
    from fsbench.discover import discover
    from fsbench.presets import preset as named_preset
    from fsbench.problem import Problem
    from fsbench.runner import Plan
    from fsbench.timers import timer_name

    if out and resume:
        raise InvalidArgument("--out: expected without --resume, which names the folder already")
    indices = int_list(gpu, "--gpu", minimum=0)
    if resume and len(indices) > 1:
        raise InvalidArgument(f"--gpu: expected one index with --resume; got {gpu!r}")
    device = device_to_use(device)
    preset = preset or ("paper" if device == "cuda" else "cpu")
    effort = named_preset(preset)
    found = discover(provider_path or [])
    heads = shapes(model or [], d, v) or [("", D, V) for D, V in effort.shapes]
    batches = effort.batches if batch is None else int_list(batch, "--batch")
    iters = effort.iters if iters is None else iters
    plan = Plan(
        [
            Problem(B, D, V, effort.dtype if dtype is None else dtype, temperature, device, logits)
            for _, D, V in heads
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
    if device == "cuda":
        require_gpus(indices)
    else:
        indices = [0]
    if dry_run:
        from fsbench.cli.reporting import print_plan

        timer_name(timer, device)
        print_plan(plan)
        return
    options = _to_repeat({**context.params, "device": device, "preset": preset})
    exit_code = 0
    for index in indices:
        suffix = f"gpu{index}" if len(indices) > 1 else ""
        options["gpu"] = str(index)
        exit_code = max(exit_code, _run_on(index, plan, options, out, resume, suffix))
    if exit_code:
        raise typer.Exit(exit_code)


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


def _run_on(
    index: int,
    plan: Plan,
    options: dict[str, Any],
    out: Path | None,
    resume: Path | None,
    suffix: str,
) -> int:
    """Measure the plan on one GPU (or the CPU), export and print; returns the exit code.

    suffix tells the folders of several GPUs apart.
    """
    from rich.console import Console

    from fsbench import breakdown, hardware, logits_store, summary, tables
    from fsbench.cli.reporting import Progress, print_breakdown, print_energy, print_summary
    from fsbench.environment import environment
    from fsbench.results import Store
    from fsbench.runner import Runner
    from fsbench.timers import make_timer

    device = options["device"]
    nvml_index = None
    if device == "cuda":
        import torch

        torch.cuda.set_device(index)
        nvml_index = hardware.nvml_index(index)
    timer = make_timer(options["timer"], device, options["l2"])
    facts = {**environment(device, sys.argv), "options": options}
    folder = resume or (out / suffix if out else new_folder(facts, suffix))
    store = Store.resume(folder, facts) if resume else Store.create(folder, facts)
    console = Console(stderr=True, highlight=False, markup=False)
    try:
        with Progress(console) as progress:
            Runner(plan, store, timer, facts["gpu"], nvml_index, progress.report).run()
    except BaseException:
        again = f"fsbench run --resume {shlex.quote(str(folder))}"
        console.print(f"stopped; to continue: {again}", soft_wrap=True)
        raise
    finally:
        store.close()
    table = summary.export_csv(folder)
    written = tables.write_tables(folder, table)
    written += logits_store.write_tables(folder, table)
    if kernels := breakdown.export_csv(folder, store.records):
        written.append(kernels)
    print_summary(table)
    if options["breakdown"]:
        print_breakdown(table, store.records)
    if options["energy"] is not None:
        print_energy(table)
    print(f"\nWrote {folder}/results.csv and {len(written)} tables beside it.")
    return _exit_code(table)


def new_folder(facts: dict[str, Any], suffix: str) -> Path:
    """results/<gpu>/<utc>-<commit>, with the suffix if there is one."""
    from fsbench.iomodel import gpu_slug

    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    commit = (facts["git_sha"] or "nogit")[:7]
    name = "-".join(filter(None, (stamp, commit, suffix)))
    return Path("results") / (gpu_slug(facts["gpu"]) or "cpu") / name


def _exit_code(table: pd.DataFrame) -> int:
    """1 if a sampler failed verification, 3 if cells failed or none was measured, else 0."""
    statuses = set(table["status"])
    if "check_failed" in statuses:
        return 1
    failed = {"error", "oom", "timeout", "timer_unavailable"}
    return 3 if statuses & failed or "ok" not in statuses else 0
