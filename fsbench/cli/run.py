"""`fsbench run`: check the arguments, measure, write tables, print."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from fsbench import interrupts
from fsbench.cli.devices import device_to_use, require_energy, require_gpus
from fsbench.cli.options import grouped, repeatable, require_one_folder
from fsbench.cli.run_options import (
    Distribution,
    Machine,
    Output,
    RunOptions,
    Samplers,
    Shapes,
)
from fsbench.errors import DeviceUnavailable, ExitCode, InvalidArgument, ProviderUnavailable
from fsbench.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from fsbench.cli.progress import Progress
    from fsbench.measure.plan import Job, Plan
    from fsbench.measure.session import Session


@grouped
def run(
    context: typer.Context,
    samplers: Samplers,
    sizes: Shapes,
    distribution: Distribution,
    machine: Machine,
    options: RunOptions,
    output: Output,
) -> None:
    """Time samplers over batch sizes and LM heads; write CSV and Markdown tables.

    Without options: the paper's Tables 4 and 5 on this GPU; without a GPU the smoke preset, a
    minute of CPU samplers. A sampler that fails verification is not timed. Measurements are on
    disk as soon as they are made: a run that was stopped can be continued.
    """
    from fsbench.measure import server
    from fsbench.measure.plan import torchrun_rank
    from fsbench.records.store import require_empty

    require_one_folder(output.out, output.resume)
    samplers.require_known()
    several = max(machine.degrees()) > 1
    rank = None
    if not output.dry_run:
        if several:
            rank = torchrun_rank(machine.degrees(), output.out or output.resume)
        else:
            server.start()  # imports torch while the arguments are checked
    device = _likely_device(machine.device, output.dry_run)
    job, preset = job_of(device, samplers, sizes, distribution, machine, options, output)
    if output.dry_run:
        from fsbench.cli.run_output import print_plan

        return print_plan(job.plan)
    if output.out:
        require_empty(output.out)
    if not output.resume:
        _require_runnable(job.plan)
    from fsbench.cli.progress import Progress
    from fsbench.cli.tables import console

    with Progress(
        console(stderr=True, soft_wrap=False), is_silent=rank not in (None, 0)
    ) as progress:
        progress.announce(job, preset)
        if (actual := device_to_use(machine.device)) != device:  # torch and NVML disagree
            job, preset = job_of(actual, samplers, sizes, distribution, machine, options, output)
        if job.device == "cuda":
            require_gpus(job.indices)
        if options.energy is not None:
            require_energy(job.device, job.indices)
        repeated = _options_to_repeat({**context.params, "device": job.device, "preset": preset})
        parts: list[tuple[Job, str]] = [(job, "")]
        if not several:
            parts = [
                (replace(job, indices=[i]), f"gpu{i}" if len(job.indices) > 1 else "")
                for i in job.indices
            ]
        code = ExitCode.OK
        for part, suffix in parts:
            gpu = {} if several else {"gpu": str(part.indices[0])}
            code = max(code, _measure(part, {**repeated, **gpu}, output, suffix, progress))
    if code:
        raise typer.Exit(code)


def _likely_device(name: str, planned: bool) -> str:
    """Return the device that --device means as far as NVML shows, which needs no torch."""
    from fsbench.machine import hardware

    if name == "auto":
        return "cuda" if hardware.gpus() else "cpu"
    if name == "cuda" and not planned and not hardware.gpus():
        reason = hardware.nvml_problem() or "NVML sees no GPU"
        raise DeviceUnavailable(f"--device cuda: {reason}; `fsbench doctor` says why")
    return name


def job_of(
    device: str,
    samplers: Samplers,
    sizes: Shapes,
    distribution: Distribution,
    machine: Machine,
    options: RunOptions,
    output: Output,
) -> tuple[Job, str]:
    """Return the Job that the options describe on a device, and the name of its preset."""
    from fsbench.measure.plan import Job
    from fsbench.measure.presets import preset as named_preset
    from fsbench.timers import timer_name

    several = max(machine.degrees()) > 1
    name = samplers.preset or ("smoke" if device == "cpu" else "tp" if several else "paper")
    preset = named_preset(name)
    problems = [
        Problem(B, D, V, sizes.dtype or preset.dtype, device=device, tp=degree, **arguments)
        for degree in machine.degrees()
        for D, V in sizes.heads(preset)  # problems that share a weight follow one another
        for arguments in distribution.arguments(preset)
        for B in sizes.batches(preset)
    ]
    plan = options.plan(problems, samplers.entries(name), preset)
    if several and (options.breakdown or options.energy or options.sustained):
        others = "--breakdown, --energy or --sustained"
        raise InvalidArgument(f"--tp: expected 1 with {others}; got {machine.tp}")
    job = Job(
        plan,
        names=[entry.name for entry in plan.providers],
        provider_paths=[str(path) for path in samplers.provider_path or []],
        device=device,
        indices=machine.indices(device, resume=output.resume is not None),
        timer=timer_name(machine.timer, device, several),
        l2=machine.l2,
        seconds=options.timeout,
        together=several,
        warmers=plan.num_warmers(options.warmers),
    )
    return job, name


def _require_runnable(plan: Plan) -> None:
    """Raise ProviderUnavailable if no sampler of a plan can run here: no folder is made then."""
    reasons: dict[str, str] = {}
    for entry in plan.providers:
        reason = entry.unavailable_reason(plan.problems[0].device)
        if not reason:
            return
        reasons.setdefault(entry.name, reason)
    text = "; ".join(f"{name}: {reason}" for name, reason in [*reasons.items()][:3])
    raise ProviderUnavailable(
        f"no sampler can run here: {text or 'the preset has none'}; see `fsbench list`"
    )


def _options_to_repeat(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that env.json records, for `options_of_folder`."""
    kept = repeatable(options)
    kept["provider_path"] = [str(path.resolve()) for path in kept["provider_path"] or []]
    return kept


def _measure(
    job: Job, options: dict[str, Any], output: Output, suffix: str, progress: Progress
) -> ExitCode:
    """Measure a job's plan, export and print; return the exit code. See `Session`."""
    from fsbench.machine.environment import environment
    from fsbench.measure.session import Session

    interrupts.raise_exceptions()
    device = f"cuda:{job.indices[0]}" if job.device == "cuda" else "cpu"
    facts = {**environment(device, sys.argv), "options": options}
    session = Session(job, facts, output.out, output.resume, suffix)
    try:
        with _advice(session):
            session.measure(progress)
        progress.stop()
        return _finish(session, options) if session.exports else ExitCode.OK
    finally:
        session.close()


@contextmanager
def _advice(session: Session) -> Iterator[None]:
    """Print how to continue the run if the body is interrupted."""
    from rich.console import Console

    try:
        yield
    except BaseException:
        if advice := session.advice():
            console = Console(stderr=True, highlight=False, markup=False)
            console.print(f"stopped; {advice}", soft_wrap=True)
        raise


def _finish(session: Session, options: dict[str, Any]) -> ExitCode:
    """Export and print what a run measured; return the exit code."""
    from fsbench.cli import run_output
    from fsbench.records.disk import write_into
    from fsbench.report import logits_store, scaling, tables

    folder = session.store.folder
    table, records, written = session.export()
    measured = tables.configurations(table)
    files = tables.files(measured) | scaling.files(measured) | logits_store.files(measured)
    write_into(folder, files)
    run_output.print_summary(table)
    if options["breakdown"]:
        run_output.print_breakdown(table, records)
    if options["energy"] is not None:
        run_output.print_energy(table)
    if options["sustained"] is not None:
        run_output.print_sustained(table)
    run_output.print_times(session.store.times)
    print(f"\nWrote {folder}/results.csv and {len(written) + len(files)} tables next to it.")
    run_output.print_conclusions(table)
    return _exit_code(table)


def _exit_code(table: pd.DataFrame) -> ExitCode:
    statuses = set(table["status"])
    if "check_failed" in statuses:
        return ExitCode.CHECK_FAILED
    failed = {"error", "oom", "timeout", "timer_unavailable"}
    if statuses & failed or not table["median_us"].notna().any():
        return ExitCode.INCOMPLETE
    return ExitCode.OK
