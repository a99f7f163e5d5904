"""Output of `fsbench run`: the plan, and at the end tables, warnings and a conclusion."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.markup import escape

from fsbench.cli.progress import duration
from fsbench.cli.tables import console, plain_table, print_table, split
from fsbench.machine import hardware
from fsbench.provider import Kind
from fsbench.records.breakdown import Part, kernel_rows
from fsbench.report.measurement_warnings import measurement_warnings
from fsbench.report.tables import Configuration, configurations

if TYPE_CHECKING:
    from rich.table import Table

    from fsbench.measure.plan import Plan
    from fsbench.problem import Problem
    from fsbench.records.cell import CellRecord


def print_plan(plan: Plan) -> None:
    """Print what would be measured, grouped by samplers, and what is left out."""
    print(
        f"{len(plan.problems)} problems x {len(plan.providers)} providers, "
        f"{plan.warmup} warm-up and {plan.iters} timed steps in {plan.rounds} rounds"
    )

    can_run = plan.problems[0].device == "cpu" or bool(hardware.gpus())
    if not can_run:
        print("this machine has no GPU; planned for compute capability 9.0, all packages")
    alike: dict[str, list[Problem]] = {}
    left_out: dict[str, None] = {}
    for problem in plan.problems:
        refusals = {entry.name: entry.refusal(problem, can_run) for entry in plan.providers}
        able = [name for name, refusal in refusals.items() if not refusal]
        alike.setdefault(", ".join(able) or "nothing", []).append(problem)
        for name, refusal in refusals.items():
            if refusal:
                left_out[f"not {name}: {': '.join(refusal)}"] = None
    for names, problems in alike.items():
        print(_filled(f"{names}:"))
        for problem in problems:
            print(f"  {problem}")
    for line in left_out:
        print(_filled(line))


def _filled(text: str) -> str:
    """Wrap text at the terminal's width, or 80 columns without a terminal."""
    return textwrap.fill(
        text, get_terminal_size().columns, subsequent_indent="  ", break_on_hyphens=False
    )


def print_times(times: Sequence[Mapping[str, Any]]) -> None:
    """Print how long each phase took, summed over the measuring processes."""
    totals: dict[str, dict[str, float]] = {}
    for process in times:
        for group, phases in process.items():
            total = totals.setdefault(group, {})
            for name, seconds in phases.items():
                total[name] = total.get(name, 0.0) + seconds
    if totals:
        print()
    titles = {"phases": "Time", "compiling": "of which compiling", "ahead": "Compiled ahead"}
    for group, title in titles.items():
        phases = {name: s for name, s in totals.get(group, {}).items() if s >= 0.05}
        if phases:
            parts = ", ".join(f"{name} {duration(s)}" for name, s in phases.items())
            line = f"{title} {duration(sum(phases.values()))}: {parts}"
            print(textwrap.fill(line, 80, subsequent_indent="  "))


def print_summary(table: pd.DataFrame) -> None:
    """Print the times of every configuration, what was not measured and why, and warnings."""
    screen = console(markup=True)
    for configuration in configurations(table):
        screen.print(f"\n[bold]Median time, us[/]: {escape(configuration.title)}")
        screen.print(f"{configuration.conditions}\n", markup=False)
        screen.print(_times(configuration))
    for (provider, status, reason), group in table[table["status"] != "ok"].groupby(
        ["provider", "status", "reason"]
    ):
        total = int((table["provider"] == provider).sum())
        cells = f"all {total} cells" if len(group) == total else f"{len(group)} of {total} cells"
        screen.print(f"{provider}: {status} ({cells}): {reason}", markup=False)
    for (provider, lacks), group in table[table["lacks"].fillna("") != ""].groupby(
        ["provider", "lacks"]
    ):
        screen.print(f"{provider}: not measured ({len(group)} cells): {lacks}", markup=False)
    for warning in measurement_warnings(table):
        screen.print(f"warning: {warning}", markup=False)


def print_breakdown(table: pd.DataFrame, records: Iterable[CellRecord]) -> None:
    """Print the kernel time of matmul, sampling and other by sampler and B; unclassed kernels."""
    screen = console(markup=True, width=200)
    for configuration in configurations(table):
        screen.print(f"\n[bold]Time in kernels, us[/]: {escape(configuration.title)}")
        measured = configuration.measured
        shown = measured[measured["matmul_us"].notna()]
        whole = shown["matmul_us"] + shown["sampling_us"] + shown["other_us"]
        share = shown["sampling_us"] / whole
        shown = shown.assign(share=100 * share, split_by=shown["split_by"].map(split))
        columns = [
            *(("sampler", "{label:<}"), ("B", "{b}"), ("matmul", "{matmul_us:.1f}")),
            *(("sampling", "{sampling_us:.1f}"), ("other", "{other_us:.1f}")),
            *(("sampling, %", "{share:.1f}"), ("split by", "{split_by:<}")),
        ]
        print_table(columns, shown.to_dict("records"))
        unsplit = measured[measured["matmul_us"].isna()]["label"].unique()
        if len(unsplit):
            screen.print(f"not split: {', '.join(unsplit)}", markup=False)
    kernels = kernel_rows(records)
    for (provider, kernel), rows in kernels[kernels["part"] == Part.UNKNOWN].groupby(
        ["provider", "kernel"]
    ):
        screen.print(
            f"not classed: {kernel} of {provider}, up to {rows['share'].max():.1%} of its time",
            markup=False,
        )


def print_energy(table: pd.DataFrame) -> None:
    """Print the energy per token by sampler and B, for configurations that have any."""
    measured = table[table["j_per_token"].notna()]
    if len(measured):
        idle = f"of the whole GPU, which draws {measured['idle_w'].median():.0f} W when idle"
        measured = measured.assign(value=measured["j_per_token"] * 1e3)
        _print_by_batch(measured, "Energy, mJ per token", idle)


def print_sustained(table: pd.DataFrame) -> None:
    """Print the time per step of steps that ran back to back, by sampler and B."""
    measured = table[table["sustained_us"].notna()]
    _print_by_batch(measured.assign(value=measured["sustained_us"]), "Back to back, us per step")


def _print_by_batch(table: pd.DataFrame, title: str, note: str = "") -> None:
    """Print the column `value` of every configuration of a table."""
    screen = console(markup=True)
    for configuration in configurations(table):
        screen.print(f"\n[bold]{title}[/]: {escape(configuration.title)}")
        screen.print(f"{note}\n" if note else "", markup=False)
        screen.print(_by_batch(configuration, configuration.measured["value"]))


def _times(configuration: Configuration) -> Table:
    """Return median times with their noise: the widest 95 % interval of a row, in percent."""
    measured = configuration.measured
    noise = (measured.ci_hi_us - measured.ci_lo_us) / 2 / measured.median_us
    widest = noise.groupby(measured["provider"]).max()
    return _by_batch(configuration, measured["median_us"], {"±%": 100 * widest})


def _by_batch(
    configuration: Configuration,
    values: pd.Series,
    more: Mapping[str, pd.Series] | None = None,
) -> Table:
    """Return values by sampler and B, the lowest rows first; the best that draw are bold.

    more: further columns by heading, each by sampler.
    """

    shown = plain_table(padding=(0, 1, 0, 0))
    measured = configuration.measured.assign(value=values)
    drawn = measured[measured["kind"] == configuration.drawn]
    by_b = drawn.groupby("b")["value"]
    least = by_b.min()[by_b.size() > 1]  # a single sampler is not marked as the fastest
    batches = sorted(measured["b"].unique())
    shown.add_column("B")
    for heading in (*map(str, batches), *(more or ())):
        shown.add_column(heading, justify="right", no_wrap=True)
    for provider in _by_speed(measured):
        rows = measured[measured["provider"] == provider].set_index("b")
        kind = rows["kind"].iloc[0]
        cells = []
        for b in batches:
            value = rows["value"].get(b)
            best = value == least.get(b) and kind == configuration.drawn
            text = "-" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
            cells.append(f"[bold]{text}[/]" if best else text)
        cells += [f"{column[provider]:.1f}" for column in (more or {}).values()]
        note = " (lower bound)" if kind == Kind.LOWER_BOUND else ""
        shown.add_row(escape(configuration.label(provider)) + note, *cells)
    return shown


def _by_speed(measured: pd.DataFrame) -> list[str]:
    """Return the samplers by their values relative to the smallest at each B, lowest first."""
    relative = measured["value"] / measured.groupby("b")["value"].transform("min")
    return list(relative.groupby(measured["provider"]).mean().sort_values(kind="stable").index)


def print_conclusions(table: pd.DataFrame) -> None:
    """Print one sentence per configuration: the fastest sampler, and by how much it is faster."""
    shown = configurations(table)
    for configuration in shown:
        if sentence := conclusion(configuration):
            text = f"{configuration.title}: {sentence}" if len(shown) > 1 else sentence
            print(textwrap.fill(text, 80, break_on_hyphens=False))


def conclusion(configuration: Configuration) -> str:
    """Return a sentence that compares the fastest sampler with the best alternative.

    The alternative of a fused sampler is the fastest that stores logits, if one was measured, and
    vice versa. Ratios are geometric means over the batch sizes that both have. "" without any.
    """
    measured = configuration.measured.assign(value=configuration.measured["median_us"])
    drawn = measured[measured["kind"] == configuration.drawn]
    if drawn.empty:
        return ""
    best, *others = _by_speed(drawn)
    is_fused = dict(zip(drawn["provider"], drawn["fused"], strict=True))
    others.sort(key=lambda name: is_fused[name] == is_fused[best])
    name, clauses = configuration.label(best), []
    if others and (ratio := _mean_ratio(configuration, others[0], best)):
        value, noise, batches = ratio
        rival = configuration.label(others[0])
        if abs(value - 1) <= noise:
            clauses.append(
                f"{name} and {rival} differ by less than the noise "
                f"({value:.2f} ± {noise:.2f} times)"
            )
        else:
            clauses.append(f"{name} is {value:.2f} ± {noise:.2f} times as fast as {rival}")
    bounds = measured[measured["kind"] == Kind.LOWER_BOUND]
    if not bounds.empty and (ratio := _mean_ratio(configuration, best, _by_speed(bounds)[-1])):
        value, noise, batches = ratio
        bound = configuration.label(_by_speed(bounds)[-1])
        subject = "" if clauses else f"{name} takes "
        clauses.append(f"{subject}{value:.2f} ± {noise:.2f} of the time of {bound}")
    if not clauses:
        return ""
    span = f"B = {batches[0]}" + (f" to {batches[-1]}" if len(batches) > 1 else "")
    return f"{', '.join(clauses)} ({span})."


def _mean_ratio(
    configuration: Configuration, numerator: str, denominator: str
) -> tuple[float, float, list[int]] | None:
    """Return the geometric mean of a ratio of times over B, its noise, and the batch sizes."""
    ratios = configuration.ratio(numerator, denominator)
    if ratios.empty or not (ratios["lo"] > 0).all():
        return None
    value, lo, hi = (prod(ratios[name]) ** (1 / len(ratios)) for name in ("value", "lo", "hi"))
    return value, (hi - lo) / 2, [int(b) for b in ratios.index]
