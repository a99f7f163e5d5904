"""`fsbench run`: the main job."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsbench.cli.parsing import int_list
from fsbench.errors import DeviceUnavailable, InvalidArgument

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from fsbench.runner import Plan


def run(
    preset_name: Annotated[
        str | None,
        typer.Option("--preset", help="paper, lean, quick, smoke or cpu. Default: paper, or cpu."),
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
    gpu: Annotated[str, typer.Option(help="Local GPU indices, comma list; one after the other.")] = "0",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32. Default: the preset's.")] = None,
    temperature: Annotated[float, typer.Option(help="Temperature >= 0; 0 is greedy.")] = 1.0,
    timer: Annotated[str, typer.Option(help="auto, cupti, events, cpu or fake.")] = "auto",
    l2: Annotated[str, typer.Option(help="L2 before each step: cold, cold-write or warm.")] = "cold",
    graph: Annotated[bool, typer.Option(help="Replay CUDA graphs, as engines do.")] = True,
    warmup: Annotated[int | None, typer.Option(help="Untimed steps per cell.", min=0)] = None,
    iters: Annotated[int | None, typer.Option(help="Timed steps per cell.", min=1)] = None,
    rounds: Annotated[int | None, typer.Option(help="Interleaved rounds.", min=1)] = None,
    logits: Annotated[
        str, typer.Option(help="Law of the logits: normal:SIGMA, zipf:EXPONENT, peaked:GAP.")
    ] = "normal:1",
    seed: Annotated[int, typer.Option(help="Seed of inputs and noise.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Results folder. Default: results/<gpu>/<utc>-<commit>.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue this results folder: measure what is missing.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the cells, measure nothing.")] = False,
    check: Annotated[bool, typer.Option(help="Verify each sampler before timing it.")] = True,
) -> None:
    """Time samplers over batch sizes and LM heads; write CSV and Markdown tables.

    Without options: the paper's Tables 4 and 5 on this GPU, or the CPU samplers where there is
    none. A sampler that fails verification is not timed. What was measured survives any crash.
    """
    from fsbench import presets
    from fsbench.cli.parsing import int_list, shapes
    from fsbench.discover import discover, select
    from fsbench.problem import Problem
    from fsbench.runner import Plan

    from fsbench.cli.parsing import shapes
    from fsbench.discover import discover, select
    from fsbench.presets import preset as named_preset
    from fsbench.problem import Problem
    from fsbench.runner import Plan

    if out and resume:
        raise InvalidArgument("--out: expected without --resume, which names the folder already")
    device = device_to_use(device)
    preset_name = preset_name or ("paper" if device == "cuda" else "cpu")
    preset = named_preset(preset_name)
    found = discover(provider_path or [])
    if provider:
        chosen = select(found, provider)
    else:
        # A broken plug-in belongs to no preset that anybody knows: it stays visible as a row.
        chosen = [e for e in found.values() if not e.provider or preset_name in e.provider.presets]
    heads = shapes(model or [], d, v) or [("", D, V) for D, V in preset.shapes]
    batches = int_list(batch, "--batch") if batch else list(preset.batches)
    plan = Plan(
        [
            Problem(B, D, V, dtype or preset.dtype, temperature, device, logits)
            for _, D, V in heads
            for B in batches
        ],
        chosen,
        graph=graph,
        warmup=preset.warmup if warmup is None else warmup,
        iters=preset.iters if iters is None else iters,
        rounds=preset.rounds if rounds is None else rounds,
        seed=seed,
        check=check,
    )
    if dry_run:
        _print_plan(plan)
        return
    exit_code = 0
    indices = int_list(gpu, "--gpu", minimum=0) if device == "cuda" else [0]
    for index in indices:
        folder = resume or out
        if folder and len(indices) > 1:
            folder = folder / f"gpu{index}"
        exit_code = max(exit_code, _run_on(index, device, plan, timer, l2, folder, bool(resume)))
    if exit_code:
        raise typer.Exit(exit_code)


def device_to_use(asked: str) -> str:
    """cuda or cpu: what was asked for, or for auto what torch finds here."""
    if asked not in ("auto", "cuda", "cpu"):
        raise InvalidArgument(f"--device: expected auto, cuda or cpu; got {asked!r}")
    if asked == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if asked == "cuda":
        raise DeviceUnavailable("--device cuda: torch sees no CUDA device; `fsbench doctor` says why")
    return "cpu"


def _run_on(
    index: int, device: str, plan: Plan, timer: str, l2: str, folder: Path | None, resume: bool
) -> int:
    """Measure the plan on one GPU (or the CPU), export, print; returns the exit code so far."""
    from rich.console import Console

    from fsbench import hardware, summary, tables
    from fsbench.environment import environment
    from fsbench.iomodel import gpu_slug
    from fsbench.results import Store
    from fsbench.runner import Runner
    from fsbench.timers import make_timer

    nvml_index = None
    if device == "cuda":
        import torch

        if index >= torch.cuda.device_count():
            raise DeviceUnavailable(
                f"--gpu: expected indices below {torch.cuda.device_count()}; got {index}"
            )
        torch.cuda.set_device(index)
        nvml_index = hardware.nvml_index(index)
    clock = make_timer(timer, device, l2)
    facts = environment(device, sys.argv)
    if folder is None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        commit = (facts["git_sha"] or "nogit")[:7]
        folder = Path("results") / (gpu_slug(facts["gpu"]) or "cpu") / f"{stamp}-{commit}"
    store = Store.resume(folder, facts) if resume else Store.create(folder, facts)
    console = Console(stderr=True)
    try:
        with _Progress(console) as progress:
            Runner(plan, store, clock, facts["gpu"], nvml_index, progress.report).run()
    except BaseException:
        console.print(f"stopped; to continue: fsbench run ... --resume {folder}", highlight=False)
        raise
    finally:
        store.close()
    table = summary.export_csv(folder)
    written = tables.write_tables(folder, table)
    _print_summary(table)
    print(f"\nWrote {folder}/results.csv and {len(written)} tables beside it.")
    return _exit_code(table)


def _exit_code(table: pd.DataFrame) -> int:
    """1 if a sampler failed verification, 3 if cells failed or none was measured, else 0."""
    statuses = set(table["status"])
    if "check_failed" in statuses:
        return 1
    return 3 if statuses & {"error", "oom", "timeout"} or "ok" not in statuses else 0


class _Progress:
    """A progress bar with the time that remains, on standard error."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f} cells"),
            BarColumn(bar_width=30),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=1)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def report(self, done: int, total: int, what: str) -> None:
        self._bar.update(self._task, completed=done, total=total, description=what)


def _print_plan(plan: Plan) -> None:
    """What would be measured, one line per problem, and what would be left out and why."""
    print(f"{len(plan.problems)} problems x {len(plan.providers)} providers, "
          f"{plan.warmup} warm-up and {plan.iters} timed steps in {plan.rounds} rounds")  # fmt: skip
    for problem in plan.problems:
        able = []
        for entry in plan.providers:
            reason = entry.unavailable_reason(problem.device)
            if not reason and entry.provider:
                reason = entry.provider.unsupported_reason(problem)
            able.append(f"{entry.name} (not: {reason})" if reason else entry.name)
        print(f"  {problem}: {', '.join(able)}")


def _print_summary(table: pd.DataFrame) -> None:
    """Median times, one line per problem and one column per sampler; then what went wrong."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    measured = table[table["status"] == "ok"]
    for (d, v), group in measured.groupby(["d", "v"]):
        times = group.pivot_table(index="b", columns="label", values="median_us", sort=False)
        shown = Table(title=f"median time, us  (D={d}, V={v})")
        shown.add_column("B", justify="right")
        for label in times.columns:
            shown.add_column(str(label), justify="right")
        for b, row in times.sort_index().iterrows():
            shown.add_row(str(b), *(f"{value:.1f}" if value == value else "-" for value in row))
        console.print(shown)
    for (label, status, reason), group in table[table["status"] != "ok"].groupby(
        ["label", "status", "reason"]
    ):
        cells = "all" if len(group) == table["b"].nunique() else f"{len(group)}"
        console.print(f"{label}: {status} ({cells} cells): {reason}", highlight=False)
    for warning in _warnings(table):
        console.print(f"warning: {warning}", highlight=False)


def _warnings(table: pd.DataFrame) -> list[str]:
    from fsbench.doubts import doubts

    return doubts(table)
