"""`fsbench run`: the main job."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from fsbench.cli.devices import Timer, device_to_use, require_energy, require_gpus
from fsbench.cli.options import (
    LAW,
    NUMBERS,
    PATH,
    SEED,
    WORD,
    Batches,
    Device,
    DtypeOrDefault,
    HiddenSizes,
    Models,
    ProviderPath,
    ResultsFolder,
    VocabularySizes,
    Weights,
    as_before,
    grouped,
    integers,
    number,
    one_of,
    option,
    whole,
)
from fsbench.cli.parsing import filters, int_list, penalties_of, shapes
from fsbench.errors import InvalidArgument
from fsbench.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fsbench.discover import Found
    from fsbench.measure.plan import Plan
    from fsbench.measure.presets import Preset


def _presets() -> Iterable[str]:
    from fsbench.measure.presets import PRESETS

    return PRESETS


def _l2_states() -> Iterable[str]:
    from fsbench.timers import L2_STATES

    return L2_STATES


@dataclass(frozen=True)
class Samplers:
    """Which samplers."""

    preset: Annotated[
        str | None,
        option(
            "--preset",
            one_of(_presets),
            "paper, lean, tp, quick, truncated, score, smoke or cpu. Default: paper, tp or cpu.",
        ),
    ] = None
    provider: Annotated[
        list[str] | None,
        option("--provider", WORD, "A sampler; may be repeated. Default: those of the preset."),
    ] = None
    provider_path: ProviderPath = None

    def found(self, preset: str) -> list[Found]:
        """The samplers named, or else those of the preset and of the user's files.

        A broken plug-in belongs to no preset that anybody knows: it stays visible as a row.
        """
        from fsbench.discover import discover, select

        own_files = self.provider_path or []
        found = discover(own_files)
        if self.provider:
            return select(found, self.provider)
        own = {str(path) for path in own_files}
        return [
            entry
            for entry in found.values()
            if entry.provider is None or entry.source in own or preset in entry.provider.presets
        ]


@dataclass(frozen=True)
class Shapes:
    """On which shapes."""

    batch: Batches = None
    d: HiddenSizes = None
    v: VocabularySizes = None
    model: Models = None
    dtype: DtypeOrDefault = None

    def heads(self, preset: Preset) -> list[tuple[int, int]]:
        """(D, V)."""
        asked = [(D, V) for _, D, V in shapes(self.model or [], self.d, self.v)]
        return asked or list(preset.shapes)

    def batches(self, preset: Preset) -> Sequence[int]:
        """--batch."""
        return preset.batches if self.batch is None else int_list(self.batch, "--batch")


@dataclass(frozen=True)
class Law:
    """What is drawn."""

    temperature: Annotated[
        float, option("--temperature", number(0), "Temperature >= 0; 0 is greedy.")
    ] = 1.0
    top_k: Annotated[
        str | None,
        option("--top-k", integers(0), "Keep the k likeliest tokens, comma list; 0 is off."),
    ] = None
    top_p: Annotated[
        str | None,
        option("--top-p", NUMBERS, "Keep the likeliest of probability p, comma list; 1 is off."),
    ] = None
    min_p: Annotated[
        str | None,
        option("--min-p", NUMBERS, "Keep those of this part of the largest, comma list; 0 is off."),
    ] = None
    mixed: Annotated[bool, Option("--mixed", help="Rows take turns: all filters, some, none.")] = (
        False
    )
    repetition_penalty: Annotated[
        float,
        option(
            "--repetition-penalty",
            number(0, above=True),
            "Divide the logits > 0 of tokens seen, multiply the others; 1 is off.",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        option("--presence-penalty", number(), "Less for a token that is in the output; 0 is off."),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        option("--frequency-penalty", number(), "Less for each time that it is there; 0 is off."),
    ] = 0.0
    history: Annotated[
        int | None,
        option(
            "--history",
            whole(1, 10**6),
            "Tokens that a row has seen, made up; with penalties. Default: 1024.",
        ),
    ] = None
    logits: Annotated[
        str, option("--logits", LAW, "Law of the logits: normal:SIGMA, zipf:EXPONENT, peaked:GAP.")
    ] = "normal:1"
    weights: Weights = None

    def laws(self, preset: Preset) -> list[dict[str, Any]]:
        """What else the problems are, as arguments of Problem: one set for each filter."""
        fixed = penalties_of(
            self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.history
        )
        fixed |= {"temperature": self.temperature, "logits": self.logits}
        given = filters(self.top_k, self.top_p, self.min_p, self.mixed)
        return [{**one, **fixed, "weights": self.weights or ""} for one in given or preset.filters]


@dataclass(frozen=True)
class Machine:
    """On what."""

    tp: Annotated[
        str,
        option(
            "--tp",
            integers(1, 64),
            "Ranks that share the vocabulary (tensor parallel), comma list.",
        ),
    ] = "1"
    gpu: Annotated[
        str,
        option(
            "--gpu",
            integers(0, 255),
            "Local GPU indices, comma list; one after the other. With --tp: of the ranks.",
        ),
    ] = "0"
    device: Device = "auto"
    timer: Timer = "auto"
    l2: Annotated[
        str, option("--l2", one_of(_l2_states), "L2 before each step: cold, cold-write or warm.")
    ] = "cold"

    def degrees(self) -> list[int]:
        """--tp."""
        return int_list(self.tp, "--tp")

    def indices(self, device: str, resume: bool) -> list[int]:
        """Of the GPUs: of all ranks, if there are several; else one after the other."""
        given = int_list(self.gpu, "--gpu", minimum=0)
        ranks = max(self.degrees())
        if resume and len(given) > 1 and ranks == 1:
            raise InvalidArgument(f"--gpu: expected one index with --resume; got {self.gpu!r}")
        if ranks > 1:
            if given == [0]:
                given = list(range(ranks))
            if len(given) < ranks:
                raise InvalidArgument(
                    f"--gpu: expected an index for each of {ranks} ranks; got {self.gpu!r}"
                )
            given = given[:ranks]
        elif device == "cpu" and given != [0]:
            raise InvalidArgument(f"--gpu: expected none with --device cpu; got {self.gpu!r}")
        return given


@dataclass(frozen=True)
class Effort:
    """How."""

    graph: Annotated[bool, Option(help="Replay CUDA graphs, as engines do.")] = True
    warmup: Annotated[
        int | None, option("--warmup", whole(0, 10**9), "Untimed steps per cell.")
    ] = None
    iters: Annotated[
        int | None, option("--iters", whole(1, 10**9), "Timed steps per cell, in all rounds.")
    ] = None
    rounds: Annotated[int | None, option("--rounds", whole(1, 10**9), "Interleaved rounds.")] = None
    seed: Annotated[int, option("--seed", SEED, "Seed of inputs and noise.")] = 0
    check: Annotated[bool, Option(help="Verify each sampler before timing it.")] = True
    timeout: Annotated[
        float,
        option(
            "--timeout",
            number(0, 1e6, above=True),
            "Seconds without progress, compiling included, after which a cell ends.",
        ),
    ] = 600.0
    breakdown: Annotated[
        bool,
        Option(
            "--breakdown",
            help="Show the time of matmul, sampling and the rest; time fused kernels without "
            "sampling, too, to split them.",
        ),
    ] = False
    energy: Annotated[
        float | None,
        option(
            "--energy",
            number(0.5, 1e5),
            "After timing, repeat each cell this long and count the joules per token.",
        ),
    ] = None
    sustained: Annotated[
        float | None,
        option(
            "--sustained",
            number(0.5, 1e5),
            "After timing, run each cell's steps back to back this long: time and joules of one.",
        ),
    ] = None
    warmers: Annotated[
        int | None,
        option(
            "--warmers",
            whole(0, 64),
            "Processes that compile before anything is timed; none with a sampler that tunes. "
            "Default: on a GPU two less than cores, up to 12; on a CPU 0.",
        ),
    ] = None

    def plan(self, problems: list[Problem], providers: list[Found], preset: Preset) -> Plan:
        """The plan of these problems and providers."""
        from fsbench.measure.plan import Plan

        iters = preset.iters if self.iters is None else self.iters
        return Plan(
            problems,
            providers,
            graph=self.graph,
            warmup=preset.warmup if self.warmup is None else self.warmup,
            iters=iters,
            rounds=max(1, min(preset.rounds, iters)) if self.rounds is None else self.rounds,
            seed=self.seed,
            check=self.check,
            forms=self.breakdown,
            energy_s=self.energy,
            sustained_s=self.sustained,
        )


@dataclass(frozen=True)
class Results:
    """Where to."""

    out: ResultsFolder = None
    resume: Annotated[
        Path | None,
        option(
            "--resume",
            PATH,
            "Continue this results folder: measure what is missing, with its options.",
            callback=as_before,
            is_eager=True,
        ),
    ] = None
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the cells. --device cuda then needs no GPU.")
    ] = False


@grouped
def run(
    context: typer.Context,
    samplers: Samplers,
    sizes: Shapes,
    law: Law,
    machine: Machine,
    effort: Effort,
    results: Results,
) -> None:
    """Time samplers over batch sizes and LM heads; write CSV and Markdown tables.

    Without options: the paper's Tables 4 and 5 on this GPU, or the CPU samplers where there is
    none. A sampler that fails verification is not timed. What was measured survives any crash.
    """
    from fsbench.measure import server

    if results.out and results.resume:
        raise InvalidArgument("--out: expected without --resume, which names the folder already")
    several = max(degrees := machine.degrees()) > 1
    if not (results.dry_run or several):  # torchrun may have started the processes
        server.start()
    from fsbench.cli.measuring import measure
    from fsbench.discover import reasons
    from fsbench.measure.presets import preset as named_preset
    from fsbench.measure.worker import Job
    from fsbench.timers import timer_name

    device = device_to_use(machine.device, planned=results.dry_run)
    name = samplers.preset or ("cpu" if device == "cpu" else "tp" if several else "paper")
    preset = named_preset(name)
    dtype = preset.dtype if sizes.dtype is None else sizes.dtype
    problems = [
        Problem(B, D, V, dtype, device=device, tp=degree, **one)
        for degree in degrees
        for D, V in sizes.heads(preset)  # those that share a weight stand together
        for one in law.laws(preset)
        for B in sizes.batches(preset)
    ]
    plan = effort.plan(problems, samplers.found(name), preset)
    loops = (effort.energy, effort.sustained)
    if several and (effort.breakdown or loops != (None, None)):
        others = "--breakdown, --energy or --sustained"
        raise InvalidArgument(f"--tp: expected 1 with {others}; got {machine.tp}")
    indices = machine.indices(device, resume=results.resume is not None)
    timer = timer_name(machine.timer, device, several)
    if results.dry_run:
        from fsbench.cli.reporting import print_plan

        return print_plan(plan)
    if device == "cuda":
        require_gpus(indices)
    if effort.energy is not None:
        require_energy(device, indices)
    options = _to_repeat({**context.params, "device": device, "preset": name})
    names, paths = [one.name for one in plan.providers], map(str, samplers.provider_path or [])
    job = Job(
        plan, names, list(paths), reasons(plan.providers), device, indices, timer, machine.l2,
        effort.timeout, several, plan.helpers(effort.warmers),
    )  # fmt: skip
    exit_code = 0
    for index in [None] if several else indices:
        one, suffix = job, ""
        if index is not None:
            one, options["gpu"] = replace(job, indices=[index]), str(index)
            suffix = f"gpu{index}" if len(indices) > 1 else ""
        exit_code = max(exit_code, measure(one, options, results.out, results.resume, suffix))
    if exit_code:
        raise typer.Exit(exit_code)


def _to_repeat(options: dict[str, Any]) -> dict[str, Any]:
    """What env.json keeps of the options, for `as_before`."""
    kept = {
        name: value for name, value in options.items() if name not in ("out", "resume", "dry_run")
    }
    kept["provider_path"] = [str(path.resolve()) for path in kept["provider_path"] or []]
    return kept
