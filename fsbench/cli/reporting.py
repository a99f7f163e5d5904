"""What `fsbench run` shows: the plan, the progress, and the summary at the end."""

from __future__ import annotations

import textwrap
from shutil import get_terminal_size
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    import pandas as pd
    from rich.console import Console
    from rich.table import Table

    from fsbench.measure.ledger import Left
    from fsbench.measure.plan import Plan
    from fsbench.problem import Problem
    from fsbench.records.cell import CellRecord
    from fsbench.report.tables import Configuration


def print_plan(plan: Plan) -> None:
    """What would be measured, problems with the same samplers together, and what is left out."""
    print(
        f"{len(plan.problems)} problems x {len(plan.providers)} providers, "
        f"{plan.warmup} warm-up and {plan.iters} timed steps in {plan.rounds} rounds"
    )
    from fsbench.machine import hardware

    here = plan.problems[0].device == "cpu" or bool(hardware.gpus())
    if not here:
        print("this machine has no GPU; planned for compute capability 9.0, all packages")
    alike: dict[str, list[Problem]] = {}
    left_out: dict[str, None] = {}
    for problem in plan.problems:
        refusals = {entry.name: entry.refusal(problem, here) for entry in plan.providers}
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
    """In lines that fit the terminal, or 80 letters where there is none."""
    return textwrap.fill(
        text, get_terminal_size().columns, subsequent_indent="  ", break_on_hyphens=False
    )


def duration(seconds: float) -> str:
    """8.1 s, 42 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 99.5:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def print_times(times: Sequence[Mapping[str, Any]]) -> None:
    """Where the time went, of all processes that measured, in a line or two."""
    totals: dict[str, dict[str, float]] = {}
    for each in times:
        for kind, spent in each.items():
            total = totals.setdefault(kind, {})
            for name, seconds in spent.items():
                total[name] = total.get(name, 0.0) + seconds
    if totals:
        print()
    titles = {"phases": "Time", "compiling": "Of it compiling", "ahead": "Compiled ahead"}
    for kind, title in titles.items():
        spent = {name: s for name, s in totals.get(kind, {}).items() if s >= 0.05}
        if spent:
            parts = ", ".join(f"{name} {duration(s)}" for name, s in spent.items())
            line = f"{title} {duration(sum(spent.values()))}: {parts}"
            print(textwrap.fill(line, 80, subsequent_indent="  "))


class Progress:
    """A line for each cell that is finished, and on a terminal a bar with what is going on."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        what = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._bar = Bar(
            TextColumn("{task.fields[cells]}/{task.total:.0f} cells"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}", markup=False, table_column=what),
            console=console,
            expand=True,
            transient=True,
            disable=not console.is_terminal,
        )
        self._console = console
        self._task = self._bar.add_task("", total=1, cells=0, left="")
        self._told = ("", "")  # how far, and how long it will take

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar.live.is_started:
            self._bar.stop()

    def report(self, done: float, total: int, what: str, rest: Left | None = None) -> None:
        """See `Outcomes.report`; the bar appears when there is something to report."""
        left = ""
        if rest:
            left = f"{'perhaps ' if rest.open else ''}{duration(rest.seconds)} left"
        self._told = f"{round(done)}/{total}", left
        self._bar.start()
        self._bar.update(
            self._task, completed=done, total=total, description=what, cells=int(done), left=left
        )

    def finished(self, record: CellRecord, seconds: float) -> None:
        """A line: the cell, its median or status, what it took, and what the rest will take."""
        from fsbench.records.summary import row

        problem = record.cell.problem
        median = row(record)["median_us"]
        found = record.status if record.status != "ok" or median is None else f"{median:.1f} us"
        cell = f"B={problem.B} D={problem.D} V={problem.V} {record.cell.provider}: {found}"
        how_far, left = self._told
        facts = ", ".join(filter(None, (f"took {duration(seconds)}", left)))
        self._console.print(f"[{how_far}] {cell}; {facts}", soft_wrap=True)


def print_summary(table: pd.DataFrame) -> None:
    """Median times of every configuration, what was not measured and why, and what to doubt."""
    from rich.console import Console
    from rich.markup import escape

    from fsbench.report.doubts import doubts
    from fsbench.report.tables import configurations

    console = Console(highlight=False, soft_wrap=True)
    for configuration in configurations(table):
        console.print(f"\n[bold]Median time, us[/]: {escape(configuration.title)}")
        console.print(f"{configuration.conditions}\n", markup=False)
        console.print(_times(configuration))
    for (provider, status, reason), group in table[table["status"] != "ok"].groupby(
        ["provider", "status", "reason"]
    ):
        of = int((table["provider"] == provider).sum())
        cells = f"all {of} cells" if len(group) == of else f"{len(group)} of {of} cells"
        console.print(f"{provider}: {status} ({cells}): {reason}", markup=False)
    for (provider, lacks), group in table[table["lacks"].fillna("") != ""].groupby(
        ["provider", "lacks"]
    ):
        console.print(f"{provider}: not measured ({len(group)} cells): {lacks}", markup=False)
    for doubt in doubts(table):
        console.print(f"warning: {doubt.text}", markup=False)


def print_breakdown(table: pd.DataFrame, records: Iterable[CellRecord]) -> None:
    """Time of matmul, sampling and the rest by sampler and B, and which kernels nobody knows."""
    from rich.console import Console
    from rich.markup import escape

    from fsbench.cli.tables import print_table, split
    from fsbench.records.breakdown import Part, kernel_rows
    from fsbench.report.tables import configurations

    console = Console(highlight=False, soft_wrap=True, width=200)
    for configuration in configurations(table):
        console.print(f"\n[bold]Time in kernels, us[/]: {escape(configuration.title)}")
        measured = configuration.measured
        rows = []
        for row in measured[measured["matmul_us"].notna()].itertuples():
            parts = (row.matmul_us, row.sampling_us, row.other_us)
            share = f"{100 * row.sampling_us / sum(parts):.1f}"
            times = (f"{part:.1f}" for part in parts)
            rows.append((row.label, str(row.b), *times, share, split(row.split_by)))
        headings = ("sampler", "B", "matmul", "sampling", "other", "sampling, %", "split by")
        print_table(headings, rows)
        unsplit = measured[measured["matmul_us"].isna()]["label"].unique()
        if len(unsplit):
            console.print(f"not split: {', '.join(unsplit)}", markup=False)
    kernels = kernel_rows(records)
    for (provider, kernel), rows in kernels[kernels["part"] == Part.UNKNOWN].groupby(
        ["provider", "kernel"]
    ):
        console.print(
            f"not classed: {kernel} of {provider}, up to {rows['share'].max():.1%} of its time",
            markup=False,
        )


def print_energy(table: pd.DataFrame) -> None:
    """Energy of a token by sampler and B, of every configuration that has any."""
    measured = table[table["j_per_token"].notna()]
    if len(measured):
        idle = f"of the whole GPU, which draws {measured['idle_w'].median():.0f} W when idle"
        measured = measured.assign(value=measured["j_per_token"] * 1e3)
        _print_by_batch(measured, "Energy, mJ per token", idle)


def print_sustained(table: pd.DataFrame) -> None:
    """Time of a step of many, back to back, by sampler and B."""
    measured = table[table["sustained_us"].notna()]
    _print_by_batch(measured.assign(value=measured["sustained_us"]), "Back to back, us per step")


def _print_by_batch(table: pd.DataFrame, title: str, note: str = "") -> None:
    """Print the column `value` of every configuration of a table."""
    from rich.console import Console
    from rich.markup import escape

    from fsbench.report.tables import configurations

    console = Console(highlight=False, soft_wrap=True)
    for configuration in configurations(table):
        console.print(f"\n[bold]{title}[/]: {escape(configuration.title)}")
        console.print(f"{note}\n" if note else "", markup=False)
        console.print(_by_batch(configuration, configuration.measured["value"]))


def _times(configuration: Configuration) -> Table:
    """One line per sampler, one column per B; the fastest exact sampler of each B in bold."""
    return _by_batch(configuration, configuration.measured["median_us"])


def _by_batch(configuration: Configuration, values: pd.Series) -> Table:
    """Values of the measured rows by sampler and B; the least of those that draw in bold."""
    from rich.markup import escape

    from fsbench.cli.tables import plain_table
    from fsbench.provider import Kind

    shown = plain_table(padding=(0, 1, 0, 0))
    measured = configuration.measured.assign(value=values)
    drawn = measured[measured["kind"] == configuration.drawn]
    by_b = drawn.groupby("b")["value"]
    least = by_b.min()[by_b.size() > 1]  # the only one measured is not the fastest
    batches = sorted(measured["b"].unique())
    shown.add_column("B")
    for b in batches:
        shown.add_column(str(b), justify="right", no_wrap=True)
    for provider in configuration.providers():
        rows = measured[measured["provider"] == provider].set_index("b")
        kind = rows["kind"].iloc[0]
        cells = []
        for b in batches:
            value = rows["value"].get(b)
            best = value == least.get(b) and kind == configuration.drawn
            text = "-" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
            cells.append(f"[bold]{text}[/]" if best else text)
        note = " (lower bound)" if kind == Kind.LOWER_BOUND else ""
        shown.add_row(escape(configuration.label(provider)) + note, *cells)
    return shown
