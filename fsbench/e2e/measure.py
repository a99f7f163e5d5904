"""Measure a plan of `fsbench e2e`: decode with each sampler in turn, and store the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Protocol

from fsbench.e2e.models import PLAIN, Decoder
from fsbench.e2e.records import Case, Decoded, Drafting, Profile, StepStore
from fsbench.errors import EngineFailed, describe, is_out_of_memory


@dataclass(frozen=True)
class DecodePlan:
    """Models, samplers and batches to measure.

    Attributes:
        samplers: names, the baseline first.
        runs: recorded decodings of each sampler and batch size.
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
    equally. A sampler that cannot run here is recorded as unavailable. One that fails is recorded
    with its error, and the others continue.

    Raises:
        InvalidArgument: an unknown sampler. Errors of loading a model are raised, too.
    """
    return sum(
        _measure_model(plan, engine, store, say, decoder, tp)
        for decoder in plan.models
        for tp in plan.tp
    )


def _measure_model(
    plan: DecodePlan,
    engine: Engine,
    store: StepStore,
    say: Callable[[str], None],
    decoder: Decoder,
    tp: int,
) -> int:
    cases = {name: _case(plan, engine, decoder, tp, name) for name in plan.samplers}
    available = []
    for name in plan.samplers:
        reason = engine.unavailable_reason(name)
        if reason:
            store.append(cases[name], status="unavailable", reason=reason)
            say(f"{name}: {reason}")
        else:
            available.append(name)
    if not available:
        return 0
    say(f"{decoder.name}, tp {tp}: loading")
    session = engine.open(plan, decoder, tp, available)
    failed = 0
    try:
        for requests, B in product(plan.requests, plan.batches):
            batch = {name: replace(cases[name], b=B, requests=requests) for name in available}
            failed += _measure_batch(plan, session, batch, store, say)
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
    return failed


def _measure_batch(
    plan: DecodePlan,
    session: Session,
    cases: dict[str, Case],
    store: StepStore,
    say: Callable[[str], None],
) -> int:
    """Measure a batch size; return the number of samplers that failed."""
    first_case = next(iter(cases.values()))
    B, requests = first_case.b, first_case.requests
    broken: set[str] = set()

    def run(name: str, number: int) -> None:
        store.append(cases[name], run=number, decoded=session.decode(name, B, requests))

    def profile(name: str, number: int) -> None:
        sample = session.profile(name, B, requests)
        if isinstance(sample, Drafting):
            store.append(cases[name], run=number, drafting=sample)
        elif sample is not None:
            store.append(cases[name], run=number, profile=sample)

    names = list(cases)
    actions: list[tuple[str, Callable[[], None]]] = [
        (name, partial(session.prepare, name, B, requests)) for name in names
    ]
    actions += _in_turn(names, plan.runs, run) + _in_turn(names, plan.profiles, profile)
    for name, action in actions:
        if name in broken:
            continue
        try:
            action()
        except Exception as error:  # an engine's error may be of any class
            status = "oom" if is_out_of_memory(error) else "error"
            store.append(cases[name], status=status, reason=describe(error))
            say(f"{name}, B={B}: {describe(error)}")
            broken.add(name)
    say(f"{first_case.model}, {requests}, B={B}: measured")
    return len(broken)


def _in_turn(
    names: list[str], runs: int, action: Callable[[str, int], None]
) -> list[tuple[str, Callable[[], None]]]:
    """Return each sampler's action for each run; every run begins with another sampler."""
    return [
        (name, partial(action, name, number))
        for number in range(runs)
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
