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
            _measure_batch(plan, session, batch, store, say)
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


def _measure_batch(
    plan: DecodePlan,
    session: Session,
    cases: dict[str, Case],
    store: StepStore,
    say: Callable[[str], None],
) -> None:
    first_case = next(iter(cases.values()))
    B, requests = first_case.b, first_case.requests
    about = f"{first_case.model}, {requests}, B={B}"
    names = list(cases)
    tpot_us: dict[str, dict[int, float]] = {name: {} for name in names}

    again: list[tuple[Case, int, Decoded]] = []

    def decode(name: str, number: int) -> Decoded:
        decoded = session.decode(name, B, requests)
        tpot_us[name][number] = decoded.tpot_us
        return decoded

    def run(name: str, number: int) -> None:
        store.append(cases[name], run=number, decoded=decode(name, number))

    def run_again(name: str, number: int) -> None:
        again.append((cases[name], number, decode(name, number)))

    def profile(name: str, number: int) -> None:
        sample = session.profile(name, B, requests)
        if isinstance(sample, Drafting):
            store.append(cases[name], run=number, drafting=sample)
        elif sample is not None:
            store.append(cases[name], run=number, profile=sample)

    def carry_out(actions: list[tuple[str, Callable[[], None]]]) -> None:
        for name, action in actions:
            if cases[name] in store.statuses:
                continue
            try:
                action()
            except Exception as error:  # an engine's error may be of any class
                status = "oom" if is_out_of_memory(error) else "error"
                store.append(cases[name], status=status, reason=describe(error))
                say(f"{name}, B={B}: {describe(error)}")

    runs, profiles = _missing(plan, cases, store)
    carry_out([(name, partial(session.prepare, name, B, requests)) for name in names])
    carry_out(_in_turn(names, runs, run))
    repeats = plan.attempts - 1 if len(runs) == plan.runs else 0  # others are of an earlier call
    for _ in range(repeats):
        noisy = _noisy(cases, tpot_us)
        if noisy is None:
            break
        say(f"{about}: what {noisy} saves differs by more than {NOISY:g} points; measured again")
        again.clear()
        carry_out(_in_turn(names, runs, run_again))
        for case, number, decoded in again:  # now, so that a call that is killed mixes no attempts
            store.append(case, run=number, decoded=decoded)
    carry_out(_in_turn(names, profiles, profile))
    say(f"{about}: measured")


def _noisy(cases: dict[str, Case], tpot_us: dict[str, dict[int, float]]) -> str | None:
    """Return a sampler whose percent saved differs too much between runs, or None."""
    baseline = next((name for name, case in cases.items() if case.baseline), None)
    for name, times in tpot_us.items():
        if baseline and saved("", times, tpot_us[baseline]).get("_sd_pct", 0.0) > NOISY:
            return name
    return None


def _in_turn(
    names: list[str], runs: list[int], action: Callable[[str, int], None]
) -> list[tuple[str, Callable[[], None]]]:
    """Return each sampler's action for each run; every run begins with another sampler."""
    return [
        (name, partial(action, name, number))
        for number in runs
        for name in names[number % len(names) :] + names[: number % len(names)]
    ]


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
