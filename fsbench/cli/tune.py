"""`fsbench tune`: time tile shapes on this GPU and write the fastest for FSBENCH_TILES."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsbench.cli.devices import Timer
from fsbench.cli.options import (
    WORD,
    Batches,
    HiddenSizes,
    Models,
    ProviderPath,
    ResultsFolder,
    VocabularySizes,
    option,
    whole,
)
from fsbench.cli.parsing import int_list, shapes
from fsbench.cli.tables import console, table
from fsbench.errors import (
    DeviceUnavailable,
    ExitCode,
    InvalidArgument,
    ProviderUnavailable,
    UnsupportedProblem,
    unknown_name,
)
from fsbench.measure.presets import PRESETS
from fsbench.problem import Problem
from fsbench.provider import Provider

if TYPE_CHECKING:
    from fsbench.measure.tuning import Timing

Rows = list[tuple[int, int | None, Any]]
"""(bucket of B, largest D or None for any D, config)"""


def tune(
    kernel: Annotated[
        list[str] | None,
        option("--kernel", WORD, "A kernel; may be repeated. Default: all that can run here."),
    ] = None,
    batch: Batches = None,
    d: HiddenSizes = None,
    v: VocabularySizes = None,
    model: Models = None,
    limit: Annotated[
        int | None, option("--limit", whole(), "Most configs to time per bucket.")
    ] = None,
    timer: Timer = "auto",
    out: ResultsFolder = None,
    provider_path: ProviderPath = None,
) -> None:
    """Time the tile shapes of the kernels on this GPU; write the fastest as a table.

    Without options: every kernel that can run here, all its buckets of B, the paper's two LM heads.

    Writes tiles.toml, whose path is the value of the variable FSBENCH_TILES, times.csv with the
    time of every config, and env.json. Tokens do not depend on tile shapes.
    """
    from fsbench.cli.progress import Progress
    from fsbench.machine import compilers
    from fsbench.machine.environment import environment
    from fsbench.measure import tuning
    from fsbench.records.store import new_folder
    from fsbench.timers import make_timer

    compilers.settle()
    device = _device()
    paths = provider_path or []
    providers = _providers(kernel or [], paths, device)
    heads = [(D, V) for _, D, V in shapes(model or [], d, v)] or list(PRESETS["paper"].shapes)
    todo = [(provider, _problems(provider, batch, heads, device)) for provider in providers]
    clock = make_timer(timer, device)
    facts = environment(device, sys.argv)
    folder = out or new_folder(facts, "tune")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "env.json").write_text(json.dumps(facts, indent=2) + "\n")
    tables, complete = [], True
    with open(folder / "times.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["kernel", "b", "d", "v", "config", "in_use", "median_us", "note"])
        for provider, problems in todo:
            tuning_table = tuning.tuning_of(provider)
            timings = []
            with Progress(console(stderr=True, soft_wrap=False)) as progress:
                for timed in tuning.measure(
                    provider, paths, problems, limit, clock, progress.report
                ):
                    writer.writerows(_lines(tuning_table.kernel, timed))
                    file.flush()
                    timings += timed
            rows = _choices(timings)
            _print_choices(tuning_table.kernel, timings, rows)
            complete &= {B for B, _, _ in rows} == {problem.B for problem in problems}
            tables.append(tuning_table.text(facts["gpu"], str(folder / "times.csv"), rows))
    (folder / "tiles.toml").write_text("\n".join(tables))
    print(
        f"\nWrote {folder}/times.csv and tiles.toml; to use it: FSBENCH_TILES={folder}/tiles.toml"
    )
    if not complete:
        raise typer.Exit(ExitCode.INCOMPLETE)


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        raise DeviceUnavailable("tune: torch sees no CUDA device; `fsbench doctor` says why")
    return "cuda"


def _providers(names: list[str], paths: list[Path], device: str) -> list[Provider]:
    """Return the samplers of the named kernels, or of all that can be tuned here."""
    from fsbench.discover import available, discover

    tunable = {
        entry.provider.tuning.kernel: entry
        for entry in discover(paths).values()
        if entry.provider and entry.provider.tuning
    }
    for name in names:
        if name not in tunable:
            raise unknown_name("--kernel", name, tunable)
    able = [name for name in tunable if not tunable[name].unavailable_reason(device)]
    if not names and not able:
        raise ProviderUnavailable("tune: no kernel can run here; `fsbench list` says why")
    return [available(tunable[name], device) for name in dict.fromkeys(names or able)]


def _problems(
    provider: Provider, batch: str | None, heads: list[tuple[int, int]], device: str
) -> list[Problem]:
    """Return a problem per requested bucket, at its largest B, and LM head."""
    from fsbench.measure.tuning import tuning_of

    kernel, buckets = tuning_of(provider).kernel, tuning_of(provider).buckets
    requested = int_list(batch, "--batch") if batch else buckets
    for B in requested:
        if B not in buckets:
            names = ", ".join(map(str, buckets))
            raise InvalidArgument(f"--batch: expected buckets of {kernel}: {names}; got {B}")
    problems = [Problem(B, D, V, device=device) for D, V in heads for B in requested]
    for problem in problems:
        if reason := provider.unsupported_reason(problem):
            raise UnsupportedProblem(f"{kernel}: {problem}: {reason}")
    return problems


def _lines(kernel: str, timings: list[Timing]) -> list[list[object]]:
    """Return rows of times.csv, the fastest first."""
    from fsbench.records.sheet import without_formula

    ordered = sorted(timings, key=lambda timing: timing.median_us or float("inf"))
    return [
        [
            *(kernel, timing.problem.B, timing.problem.D, timing.problem.V, timing.config),
            timing.in_use,
            "" if timing.median_us is None else f"{timing.median_us:.2f}",
            without_formula(timing.note),
        ]
        for timing in ordered
    ]


def _choices(timings: list[Timing]) -> Rows:
    from fsbench.measure.tuning import select

    return [
        (B, max_d, config)
        for B in sorted({timing.problem.B for timing in timings})
        for max_d, config in select([timing for timing in timings if timing.problem.B == B])
    ]


def _print_choices(kernel: str, timings: list[Timing], rows: Rows) -> None:
    """Print the chosen config and the one in use, for each problem."""
    columns = [
        *(("B", "{b}"), ("D", "{d}"), ("V", "{v}"), ("in use", "{in_use:<}"), ("us", "{us:.1f}")),
        *(("chosen", "{chosen:<}"), ("us", "{chosen_us:.1f}"), ("time", "{ratio:.3f}")),
    ]
    shown: list[dict[str, Any]] = []
    for problem in dict.fromkeys(timing.problem for timing in timings):
        of_problem = {timing.config: timing for timing in timings if timing.problem == problem}
        before = next(timing for timing in of_problem.values() if timing.in_use)
        fitting = [
            config
            for B, max_d, config in rows
            if B == problem.B and (max_d is None or max_d >= problem.D)
        ]
        after = of_problem.get(fitting[0]) if fitting else None
        us, chosen_us = (timing.median_us if timing else None for timing in (before, after))
        chosen = "the same" if after is before else str(after.config) if after else "none"
        ratio = chosen_us / us if us and chosen_us else None
        sizes = {"b": problem.B, "d": problem.D, "v": problem.V, "in_use": str(before.config)}
        shown.append({**sizes, "us": us, "chosen": chosen, "chosen_us": chosen_us, "ratio": ratio})
    console().print(table(columns, shown, kernel))
