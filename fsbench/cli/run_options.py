"""Options of `fsbench run`, in groups that the command takes as arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from fsbench.cli.devices import Timer
from fsbench.cli.options import (
    DISTRIBUTION,
    NUMBERS,
    SEED,
    WORD,
    Batches,
    Device,
    DtypeOrDefault,
    HiddenSizes,
    Models,
    ProviderPath,
    ResultsFolder,
    ResumedFolder,
    VocabularySizes,
    Weights,
    integers,
    number,
    one_of,
    option,
    whole,
)
from fsbench.cli.parsing import filters, int_list, penalties_of, shapes
from fsbench.errors import InvalidArgument, unknown_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fsbench.discover import Found
    from fsbench.measure.plan import Plan
    from fsbench.measure.presets import Preset
    from fsbench.problem import Problem


def _presets() -> Iterable[str]:
    from fsbench.measure.presets import PRESETS

    return PRESETS


def _l2_states() -> Iterable[str]:
    from fsbench.timers import L2_STATES

    return L2_STATES


@dataclass(frozen=True)
class Samplers:
    """Samplers to measure, by name or preset."""

    preset: Annotated[
        str | None,
        option(
            "--preset",
            one_of(_presets),
            "paper, lean, tp, quick, truncated, score, smoke or cpu. Default: paper, tp or smoke.",
        ),
    ] = None
    provider: Annotated[
        list[str] | None,
        option("--provider", WORD, "A sampler; may be repeated. Default: those of the preset."),
    ] = None
    provider_path: ProviderPath = None

    def entries(self, preset: str) -> list[Found]:
        """Return the samplers named, or else those of the preset and of the user's files.

        The presets of a broken plug-in are unknown: it is a row of every result.
        """
        from fsbench.discover import discover, select

        files = self.provider_path or []
        samplers = discover(files)
        if self.provider:
            return select(samplers, self.provider)
        paths = {str(path) for path in files}
        return [
            entry
            for entry in samplers.values()
            if entry.provider is None or entry.source in paths or preset in entry.provider.presets
        ]

    def require_known(self) -> None:
        """Raise InvalidArgument for a name that no file or entry point has; imports no sampler."""
        from fsbench.discover import names

        if not self.provider_path:  # such a file may have samplers of any name
            samplers = names()
            for name in self.provider or []:
                if name not in samplers:
                    raise unknown_name("--provider", name, samplers, "fsbench list")


@dataclass(frozen=True)
class Shapes:
    """Batch sizes, LM heads and their dtype."""

    batch: Batches = None
    d: HiddenSizes = None
    v: VocabularySizes = None
    model: Models = None
    dtype: DtypeOrDefault = None

    def heads(self, preset: Preset) -> list[tuple[int, int]]:
        """Return (D, V) of each LM head; by default those of the preset."""
        heads = [(D, V) for _, D, V in shapes(self.model or [], self.d, self.v)]
        return heads or list(preset.shapes)

    def batches(self, preset: Preset) -> Sequence[int]:
        """Return the batch sizes; by default those of the preset."""
        return preset.batches if self.batch is None else int_list(self.batch, "--batch")


@dataclass(frozen=True)
class Distribution:
    """The distribution to draw from: temperature, filters, penalties and inputs."""

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
        option(
            "--min-p",
            NUMBERS,
            "Keep tokens of at least this part of the largest probability, list; 0 is off.",
        ),
    ] = None
    mixed: Annotated[
        bool, Option("--mixed", help="Alternate rows with all, some and no filters.")
    ] = False
    repetition_penalty: Annotated[
        float,
        option(
            "--repetition-penalty",
            number(0, above=True),
            "Divide positive logits of seen tokens by this, multiply negative ones; 1 is off.",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        option(
            "--presence-penalty",
            number(),
            "Subtract this from the logit of a token in the output; 0 is off.",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        option(
            "--frequency-penalty", number(), "Subtract this once per earlier occurrence; 0 is off."
        ),
    ] = 0.0
    history: Annotated[
        int | None,
        option(
            "--history",
            whole(1, 10**6),
            "Synthetic tokens that each row has seen; with penalties. Default: 1024.",
        ),
    ] = None
    logits: Annotated[
        str,
        option(
            "--logits",
            DISTRIBUTION,
            "Distribution of the logits: normal:SIGMA, zipf:EXPONENT, peaked:GAP.",
        ),
    ] = "normal:1"
    weights: Weights = None

    def arguments(self, preset: Preset) -> list[dict[str, Any]]:
        """Return further arguments of Problem, one set per combination of filters."""
        fixed = penalties_of(
            self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.history
        )
        fixed |= {"temperature": self.temperature, "logits": self.logits}
        combinations = filters(self.top_k, self.top_p, self.min_p, self.mixed) or preset.filters
        return [{**each, **fixed, "weights": self.weights or ""} for each in combinations]


@dataclass(frozen=True)
class Machine:
    """GPUs, timer and cache state to measure with."""

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
            "Local GPU indices, comma list: measured in turn, or with --tp one per rank.",
        ),
    ] = "0"
    device: Device = "auto"
    timer: Timer = "auto"
    l2: Annotated[
        str, option("--l2", one_of(_l2_states), "L2 before each step: cold, cold-write or warm.")
    ] = "cold"

    def degrees(self) -> list[int]:
        """Return the numbers of ranks that share a vocabulary."""
        return int_list(self.tp, "--tp")

    def indices(self, device: str, resume: bool) -> list[int]:
        """Return GPU indices: one per rank, or the GPUs to measure in turn."""
        indices = int_list(self.gpu, "--gpu", minimum=0)
        ranks = max(self.degrees())
        if resume and len(indices) > 1 and ranks == 1:
            raise InvalidArgument(f"--gpu: expected one index with --resume; got {self.gpu!r}")
        if ranks > 1:
            if indices == [0]:
                indices = list(range(ranks))
            if len(indices) < ranks:
                raise InvalidArgument(
                    f"--gpu: expected an index for each of {ranks} ranks; got {self.gpu!r}"
                )
            indices = indices[:ranks]
        elif device == "cpu" and indices != [0]:
            raise InvalidArgument(f"--gpu: expected none with --device cpu; got {self.gpu!r}")
        return indices


@dataclass(frozen=True)
class RunOptions:
    """Warm-up, iterations, rounds and what else to measure."""

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
            "End a cell after this many seconds without progress, compiling included.",
        ),
    ] = 600.0
    breakdown: Annotated[
        bool,
        Option(
            "--breakdown",
            help="Split kernel time into matmul, sampling and other; also time fused kernels "
            "without sampling.",
        ),
    ] = False
    energy: Annotated[
        float | None,
        option(
            "--energy",
            number(0.5, 1e5),
            "After timing, repeat each cell for this many seconds and record joules per token.",
        ),
    ] = None
    sustained: Annotated[
        float | None,
        option(
            "--sustained",
            number(0.5, 1e5),
            "After timing, run each cell's steps back to back for this many seconds.",
        ),
    ] = None
    warmers: Annotated[
        int | None,
        option(
            "--warmers",
            whole(0, 64),
            "Background compile processes, ended before timing; none if a sampler autotunes. "
            "Default: on a GPU two less than cores, up to 12; on a CPU 0.",
        ),
    ] = None

    def plan(self, problems: list[Problem], providers: list[Found], preset: Preset) -> Plan:
        """Return the plan of these problems and samplers."""
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
class Output:
    """Results folder, new or to be continued."""

    out: ResultsFolder = None
    resume: ResumedFolder = None
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the cells and exit; --device cuda needs no GPU.")
    ] = False
