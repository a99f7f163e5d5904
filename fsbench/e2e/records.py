"""Results of `fsbench e2e`: an append-only file of raw samples. docs/guide/vllm.md has its fields.

A folder holds

    steps.jsonl    the truth: one line per decoding, per profile, or per sampler that could not run
    env.json       what it was measured on (fsbench.machine.environment)
    e2e.csv        one row per model, batch and sampler, derived (fsbench.e2e.summary)
    e2e.md         the same as tables
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsbench.e2e.models import PLAIN
from fsbench.errors import ResultsError
from fsbench.records.cell import STATUSES
from fsbench.records.lines import Line, Lines, read_lines
from fsbench.records.store import read_environment, write_environment
from fsbench.records.typed import fits, typed

STEPS = "steps.jsonl"
"""The file of a folder that has every sample."""


@dataclass(frozen=True)
class Case:
    """One sampler in one engine, on one model with B requests at a time.

    label is the sampler's text in legends; fused: the logits never exist in memory; baseline: gains
    are counted from it. gpu is the GPU's name, empty on a CPU. requests: their
    kind; records that do not say have plain ones. drafts: of a step, in all samplers' engines.
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
    """B requests decoded together, from their prompts to their last tokens; times are the client's.

    ttft_us: from the start to the first token, the median over requests. All else is of the time in
    which B requests decode, from the last one's first token to the first one's last. tpot_us: of
    each request, (time of its last token - time of its first) / (its tokens - 1), the median over
    requests. step_us: times between one delivery of tokens and the next; step_tokens: tokens
    delivered by each, if it was not B each time. prompt_tokens, output_tokens: of one request.
    accepted: drafts that a request accepts per step, the mean. same_pct: of a decoding with drafts,
    percent of the tokens that stand before the first that is not plain decoding's.
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
    """Where the time of one decode step goes, means over the steps of a profile, microseconds.

    draw_us: LM head and sampling as this sampler does them. matmul_us: the LM head alone, by the
    engine's own matmul; None where the sampler has none. rest_us: everything else. busy_us: when at
    least one kernel ran; on a CPU, all of the step.
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
    """Of one draft, microseconds. us: all of it. draw_us: LM head and draw, 0 if it has none."""

    us: float
    draw_us: float

    def __post_init__(self) -> None:
        _require_positive(self, "us")


def _require_positive(sample: Any, *names: str) -> None:
    for name in names:
        if not getattr(sample, name) > 0:
            raise ValueError(f"{name}: expected a number above 0; got {getattr(sample, name)!r}")


class StepStore:
    """The file steps.jsonl of a folder, for appending. Each line is on disk before the next.

    Raises:
        ResultsError: the folder has results already, or cannot be written.
    """

    def __init__(self, folder: Path, environment: Mapping[str, Any]):
        self.folder = folder
        path = folder / STEPS
        if path.exists():
            raise ResultsError(f"{folder}: expected a new folder; it has results already")
        write_environment(folder, environment)
        self._lines = Lines.open(path)

    def append_run(self, case: Case, run: int, decoded: Decoded) -> None:
        self._append(case, run=run, decoded=asdict(decoded))

    def append_profile(self, case: Case, profile: Profile, run: int = 0) -> None:
        self._append(case, run=run, profile=asdict(profile))

    def append_drafting(self, case: Case, run: int, drafting: Drafting) -> None:
        self._append(case, run=run, drafting=asdict(drafting))

    def append_counts(self, case: Case, counts: Mapping[str, Any]) -> None:
        """Which tokens the sampler served and which it left to the engine, at the end."""
        self._append(case, counts=dict(counts))

    def append_status(self, case: Case, status: str, reason: str) -> None:
        """Why a case has no (more) samples; status is one of fsbench.records.store.STATUSES."""
        self._append(case, status=status, reason=reason)

    def _append(self, case: Case, **what: Any) -> None:
        self._lines.append({"case": asdict(case), **what})

    def close(self) -> None:
        self._lines.close()


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of steps.jsonl as objects; a last line that a kill cut off is left out.

    Raises:
        ResultsError: no such file, another version, or a damaged line.
    """
    path = folder / STEPS
    if not path.exists():
        raise ResultsError(f"{folder}: expected results of `fsbench e2e`; no steps.jsonl")
    read_environment(folder)
    return [_typed(path, line) for line in read_lines(path)]


_SAMPLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "decoded": (Decoded, {"run": int}),
    "profile": (Profile, {}),
    "drafting": (Drafting, {"run": int}),
}
"""Field that says what a line is -> its type, and the fields beside it."""


def _typed(path: Path, line: Line) -> dict[str, Any]:
    value = line.value
    try:
        typed(Case, value.get("case"))
        kind = next((name for name in _SAMPLES if name in value), None)
        beside: dict[str, Any] = {"status": str, "reason": str}
        if kind:
            sample, beside = _SAMPLES[kind]
            typed(sample, value[kind])
            if value["case"]["b"] < 1:  # 0 where all batch sizes have one status
                raise ValueError("b: expected at least one request with a measurement")
        elif "counts" in value:
            beside = {"counts": dict[str, Any]}
        elif value.get("status") not in STATUSES:
            raise ValueError(f"status: expected one of {', '.join(STATUSES)}")
        for name, hint in beside.items():
            if not fits(value.get(name), hint):
                raise TypeError(f"{name}: expected {hint}; got {value.get(name)!r:.40}")
        if not fits(value.get("run", 0), int):
            raise TypeError(f"run: expected an integer; got {value['run']!r:.40}")
    except (ValueError, TypeError) as error:
        raise ResultsError(f"{path}: line {line.number} is damaged ({error})") from error
    return value
