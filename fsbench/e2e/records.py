"""Results of `fsbench e2e`: an append-only file of raw samples.

A folder holds

    steps.jsonl    one line per decoding, profile or timed draft, per sampler that could not run,
                   and with vLLM per sampler's counters of tokens; of two lines of one run of a
                   case the later counts
    env.json       the machine (fsbench.machine.environment)
    e2e.csv        one row per model, batch size and sampler, derived (fsbench.e2e.summary)
    e2e.md         the same as tables
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from fsbench.e2e.models import PLAIN
from fsbench.errors import ResultsError
from fsbench.records.cell import STATUSES
from fsbench.records.lines import Line, Lines, read_lines
from fsbench.records.store import (
    perhaps_packed,
    read_environment,
    refuse_packed,
    resumed_environment,
    write_environment,
)
from fsbench.records.typed import fits, typed

STEPS = "steps.jsonl"
"""Name of the file with every sample; committed records have it packed (steps.jsonl.gz)."""


@dataclass(frozen=True)
class Case:
    """One sampler in one engine, on one model with B requests at a time.

    Attributes:
        b: requests at a time; 0 in a line that is about all batch sizes.
        label: the sampler's text in legends.
        fused: whether the logits never exist in memory.
        baseline: whether savings are relative to this sampler.
        gpu: the GPU's name, empty on a CPU.
        requests: their kind; plain in records without it.
        drafts: drafts per step, with every sampler.
    """

    engine: str
    model: str
    d: int
    v: int
    dtype: str
    tp: int
    b: int
    sampler: str
    label: str
    fused: bool
    baseline: bool
    device: str
    gpu: str
    requests: str = PLAIN
    drafts: int = 0


@dataclass(frozen=True)
class Decoded:
    """B requests decoded together, from their prompts to their last tokens, as the client sees it.

    Times but for ttft_us cover only the span in which all B requests decode: from the last
    request's first token to the first request's last.

    Attributes:
        prompt_tokens, output_tokens: of one request.
        ttft_us: from the start to the first token, median over requests.
        tpot_us: (time of the last token - time of the first) / (tokens - 1), median over requests.
        step_us: times between two deliveries of tokens.
        step_tokens: tokens of each delivery; None if each has B.
        accepted: mean number of drafts that a request accepts per step.
        same_pct: with drafts, percent of the tokens before the first that differs from plain
            decoding's.
    """

    prompt_tokens: int
    output_tokens: int
    ttft_us: float
    tpot_us: float
    step_us: list[float]
    step_tokens: list[int] | None = None
    accepted: float | None = None
    same_pct: float | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "tpot_us", "output_tokens")
        if not self.step_us or len(self.step_tokens or self.step_us) != len(self.step_us):
            raise ValueError("step_us: expected one or more times, with step_tokens as many tokens")
        tokens = self.step_tokens or [1]
        if min(tokens) < 0 or not any(tokens):
            raise ValueError("step_tokens: expected numbers of tokens, not all of them 0")


@dataclass(frozen=True)
class Profile:
    """Time of one decode step by part: means over the steps of a profile, in microseconds.

    Attributes:
        draw_us: LM head and sampling with this sampler.
        matmul_us: the LM head alone, by the engine's matmul; None if the sampler does not use it.
        rest_us: everything else.
        busy_us: time in which at least one kernel ran; on a CPU the whole step.
    """

    steps: int
    draw_us: float
    matmul_us: float | None
    rest_us: float
    busy_us: float
    kernels: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_positive(self, "steps", "busy_us")


@dataclass(frozen=True)
class Drafting:
    """Time of one draft in microseconds.

    Attributes:
        us: the whole draft.
        draw_us: its LM head and sampling; 0 for the n-gram drafter.
    """

    us: float
    draw_us: float

    def __post_init__(self) -> None:
        _require_positive(self, "us")


def _require_positive(sample: Any, *names: str) -> None:
    for name in names:
        if not getattr(sample, name) > 0:
            raise ValueError(f"{name}: expected a number above 0; got {getattr(sample, name)!r}")


class StepStore:
    """Append to steps.jsonl of a folder. Each line is on disk before the next is written.

    Args:
        resume: continue a folder that was measured on this kind of machine; without it, start one.

    Attributes:
        statuses: case -> why it has no (more) samples, one of records.cell.STATUSES.

    Raises:
        ResultsError: the folder has results already, lacks results to continue, or is not writable.
    """

    def __init__(self, folder: Path, environment: Mapping[str, Any], resume: bool = False):
        self.folder = folder
        self.statuses: dict[Case, str] = {}
        self._runs: set[tuple[Case, str, int]] = set()
        path = steps_file(folder)
        if resume:
            refuse_packed(folder, STEPS)
            environment = resumed_environment(folder, environment)
        elif path.exists():
            raise ResultsError(
                f"{folder}: expected a new folder; it has results already, which --resume continues"
            )
        else:
            write_environment(folder, environment)
        self._lines = Lines.open(path)
        if resume:
            try:
                for line in read(folder):
                    self._note(Case(**line.pop("case")), line)
                write_environment(folder, environment)
            except BaseException:
                self.close()
                raise

    def append(self, case: Case, **sample: Any) -> None:
        """Append a line of a case.

        Args:
            sample: decoded, profile or drafting, each with run; counts; or status, one of
                records.cell.STATUSES, with the reason why the case has no (more) samples.
        """
        fields = {name: vars(x) if is_dataclass(x) else x for name, x in sample.items()}
        self._lines.append({"case": vars(case), **fields})
        self._note(case, sample)

    def has(self, case: Case, sample: str, run: int) -> bool:
        """Return whether a sample (decoded, profile or drafting) of a run is stored."""
        return (case, sample, run) in self._runs

    def _note(self, case: Case, line: Mapping[str, Any]) -> None:
        if "status" in line:
            self.statuses[case] = line["status"]
        self._runs.update((case, name, line.get("run", 0)) for name in _SAMPLES if name in line)

    def close(self) -> None:
        self._lines.close()


def steps_file(folder: Path) -> Path:
    """Return the path of a folder's samples: steps.jsonl, or steps.jsonl.gz without one."""
    return perhaps_packed(folder, STEPS)


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a folder's samples as objects, without a last line that a kill cut off.

    Raises:
        ResultsError: no results, another schema, or a damaged line.
    """
    path = steps_file(folder)
    if not path.exists():
        raise ResultsError(f"{folder}: expected results of `fsbench e2e`; no steps.jsonl")
    read_environment(folder)
    return [_typed(path, line) for line in read_lines(path)]


_SAMPLES: dict[str, Any] = {"decoded": Decoded, "profile": Profile, "drafting": Drafting}
_OTHERS = {"run": int, "counts": dict[str, Any], "status": str, "reason": str}
"""Fields of a line, apart from its case, and their types."""


def _typed(path: Path, line: Line) -> dict[str, Any]:
    value = line.value
    try:
        typed(Case, value.get("case"))
        samples = [name for name in _SAMPLES if name in value]
        for name in samples:
            typed(_SAMPLES[name], value[name])
        for name in _OTHERS.keys() & value:
            if not fits(value[name], _OTHERS[name]):
                raise TypeError(f"{name}: expected {_OTHERS[name]}; got {value[name]!r:.40}")
        if samples and value["case"]["b"] < 1:  # 0 if one status holds for all batch sizes
            raise ValueError("b: expected at least one request with a measurement")
        if not samples and "counts" not in value and value.get("status") not in STATUSES:
            raise ValueError(f"status: expected one of {', '.join(STATUSES)}")
    except (ValueError, TypeError) as error:
        raise ResultsError(f"{path}: line {line.number} is damaged ({error})") from error
    return value
