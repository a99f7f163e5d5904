"""Measure a plan of `fsbench e2e`: decode with each sampler in turn, and store the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Protocol

from fsbench.e2e.models import PLAIN, Decoder
from fsbench.e2e.records import Case, Decoded, Drafting, Profile, StepStore
from fsbench.e2e.summary import saved
from fsbench.errors import EngineFailed, describe, is_out_of_memory

NOISY = 2.0
"""Standard deviation of the percent saved, above which the runs of a batch size are made again."""


@dataclass(frozen=True)
class DecodePlan:
    """Models, samplers and batches to measure.

    Attributes:
        samplers: names, the baseline first.
        runs: recorded decodings of each sampler and batch size.
        attempts: most times that all runs of a batch size are made, while the percent saved differs
            between them by a standard deviation of more than NOISY. The last ones count.
        dtype: bfloat16, float16 or float32.
        requests: kinds of requests.
        profiles: number of profiles of each sampler and batch size.
        speculate: drafts per step; samplers are then those of models.with_drafts.
        drafts: drafts per step with every sampler, from an EAGLE drafter with random weights.
    """

    models: tuple[Decoder, ...]
    batches: tuple[int, ...]
    samplers: tuple[str, ...]
    tp: tuple[int, ...] = (1,)
    runs: int = 5
    attempts: int = 1
    prompt_tokens: int = 128
    output_tokens: int = 128
    dtype: str = "bfloat16"
    seed: int = 0
    requests: tuple[str, ...] = (PLAIN,)
    profiles: int = 1
    speculate: int = 0
    drafts: int = 0


class Session(Protocol):
    """A model that is loaded in an engine with several samplers."""

    def prepare(self, sampler: str, B: int, requests: str) -> None:
        """Do the untimed work before the first decoding of B requests of this kind."""

    def decode(self, sampler: str, B: int, requests: str) -> Decoded:
        """Decode B requests from their prompts to their last tokens."""

    def profile(self, sampler: str, B: int, requests: str) -> Profile | Drafting | None:
        """Profile a few steps of such a decoding; with plan.speculate time a draft."""

    def counts(self, sampler: str) -> dict[str, Any] | None:
        """Return the counters of served and unserved tokens, or None."""

    def close(self) -> None:
        """Free the model and its memory."""


class Engine(Protocol):
    """An engine. name: as --engine takes it; device and gpu: as in Case."""

    name: str
    device: str
    gpu: str

    def check(self, plan: DecodePlan) -> None:
        """Raise InvalidArgument for a plan that the engine cannot run, such as several GPUs."""

    def label(self, sampler: str) -> tuple[str, bool]:
        """Return (text for legends, whether logits stay on chip); raise for an unknown sampler."""

    def unavailable_reason(self, sampler: str) -> str | None:
        """Return why this sampler cannot run here, or None."""

    def open(self, plan: DecodePlan, decoder: Decoder, tp: int, samplers: Sequence[str]) -> Session:
        """Load a model with these samplers."""


def measure(
    plan: DecodePlan,
    engine: Engine,
    store: StepStore,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Measure the plan; return the number of cases that failed.

    For each model, kind of requests and batch size the samplers decode in turn, run after run. Each
    run begins with another sampler, so that drift (clocks, other processes) affects all samplers
    equally. Runs whose results differ too much are made again (plan.attempts). A sampler that
    cannot run here is recorded as unavailable. One that fails is recorded with its error, and the
    others continue. Runs that the store has of all samplers are left out; one that was stopped is
    repeated with all samplers, since they are compared within a run.

    Raises:
        InvalidArgument: an unknown sampler. Errors of loading a model are raised, too.
    """
    for decoder, tp in product(plan.models, plan.tp):
        _measure_model(plan, engine, store, say, decoder, tp)
    return sum(status != "unavailable" for status in store.statuses.values())


def _measure_model(
    plan: DecodePlan,
    engine: Engine,
    store: StepStore,
    say: Callable[[str], None],
    decoder: Decoder,
    tp: int,
) -> None:
    cases = {name: _case(plan, engine, decoder, tp, name) for name in plan.samplers}
    for name, case in cases.items():
        reason = engine.unavailable_reason(name)
        if reason and case not in store.statuses:
            store.append(case, status="unavailable", reason=reason)
            say(f"{name}: {reason}")
    available = [name for name, case in cases.items() if case not in store.statuses]
    batches = [
        {name: replace(cases[name], b=B, requests=requests) for name in available}
        for requests, B in product(plan.requests, plan.batches)
    ]
    batches = [batch for batch in batches if any(_missing(plan, batch, store))]
    if not batches:
        return
    say(f"{decoder.name}, tp {tp}: loading")
    session = engine.open(plan, decoder, tp, available)
    try:
        for batch in batches:
            _Batch(plan, session, batch, store, say).measure()
        for name in available:
            try:
                counts = session.counts(name)
            except EngineFailed as error:  # its cases have failed before
                say(f"{name}: {error}")
                continue
            if counts is not None:
                store.append(cases[name], counts=counts)
    finally:
        session.close()


def _missing(
    plan: DecodePlan, cases: dict[str, Case], store: StepStore
) -> tuple[list[int], list[int]]:
    """Return the numbers of the runs and of the profiles that the store lacks of a sampler."""
    working = [case for case in cases.values() if case not in store.statuses]
    sample = "drafting" if plan.speculate else "profile"
    # The baseline of drafts has no draft to time.
    profiled = [case for case in working if not (plan.speculate and case.baseline)]
    return (
        [n for n in range(plan.runs) if not all(store.has(c, "decoded", n) for c in working)],
        [n for n in range(plan.profiles) if not all(store.has(c, sample, n) for c in profiled)],
    )


@dataclass
class _Batch:
    """B requests of a kind, which each sampler decodes in turn.

    cases: by sampler. tpot_us: of the last attempt, by sampler and run.
    """

    plan: DecodePlan
    session: Session
    cases: dict[str, Case]
    store: StepStore
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        case = next(iter(self.cases.values()))
        self.B, self.requests = case.b, case.requests
        self.about = f"{case.model}, {case.requests}, B={case.b}"
        self.tpot_us: dict[str, dict[int, float]] = {name: {} for name in self.cases}

    def measure(self) -> None:
        """Do the runs and the profiles that the store lacks, and noisy runs again."""
        runs, profiles = _missing(self.plan, self.cases, self.store)
        for name in self.cases:
            self._attempt(name, partial(self.session.prepare, name, self.B, self.requests))
        self._in_turn(runs, self._run)
        if len(runs) == self.plan.runs:  # others are of an earlier call
            self._repeat_noisy(runs)
        self._in_turn(profiles, self._profile)
        self.say(f"{self.about}: measured")

    def _repeat_noisy(self, runs: list[int]) -> None:
        for _ in range(self.plan.attempts - 1):
            noisy = _noisy(self.cases, self.tpot_us)
            if noisy is None:
                return
            differs = f"what {noisy} saves differs by more than {NOISY:g} points"
            self.say(f"{self.about}: {differs}; measured again")
            attempt: list[tuple[str, int, Decoded]] = []
            self._in_turn(runs, partial(self._run_again, attempt))
            for name, number, decoded in attempt:  # now: a call that is killed mixes no attempts
                self.store.append(self.cases[name], run=number, decoded=decoded)

    def _decode(self, name: str, number: int) -> Decoded:
        decoded = self.session.decode(name, self.B, self.requests)
        self.tpot_us[name][number] = decoded.tpot_us
        return decoded

    def _run(self, name: str, number: int) -> None:
        self.store.append(self.cases[name], run=number, decoded=self._decode(name, number))

    def _run_again(self, attempt: list[tuple[str, int, Decoded]], name: str, number: int) -> None:
        attempt.append((name, number, self._decode(name, number)))

    def _profile(self, name: str, number: int) -> None:
        sample = self.session.profile(name, self.B, self.requests)
        if isinstance(sample, Drafting):
            self.store.append(self.cases[name], run=number, drafting=sample)
        elif sample is not None:
            self.store.append(self.cases[name], run=number, profile=sample)

    def _in_turn(self, runs: list[int], action: Callable[[str, int], None]) -> None:
        """Call action(sampler, run) for each run; every run begins with another sampler."""
        names = list(self.cases)
        for number in runs:
            first = number % len(names)
            for name in names[first:] + names[:first]:
                self._attempt(name, partial(action, name, number))

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        """Call an action of a sampler that has not failed, and store its error if it does."""
        if self.cases[name] in self.store.statuses:
            return
        try:
            action()
        except Exception as error:  # an engine's error may be of any class
            status = "oom" if is_out_of_memory(error) else "error"
            self.store.append(self.cases[name], status=status, reason=describe(error))
            self.say(f"{name}, B={self.B}: {describe(error)}")


def _noisy(cases: dict[str, Case], tpot_us: dict[str, dict[int, float]]) -> str | None:
    """Return a sampler whose percent saved differs too much between runs, or None."""
    baseline = next((name for name, case in cases.items() if case.baseline), None)
    for name, times in tpot_us.items():
        if baseline and saved("", times, tpot_us[baseline]).get("_sd_pct", 0.0) > NOISY:
            return name
    return None


def _case(plan: DecodePlan, engine: Engine, decoder: Decoder, tp: int, name: str) -> Case:
    label, fused = engine.label(name)
    return Case(
        engine=engine.name,
        model=decoder.name,
        d=decoder.D,
        v=decoder.V,
        dtype=plan.dtype,
        tp=tp,
        b=0,
        sampler=name,
        label=label,
        fused=fused,
        baseline=name == plan.samplers[0],
        device=engine.device,
        gpu=engine.gpu,
        drafts=plan.drafts,
    )
