"""The measuring of `fsbench e2e`: which decodings, in which order, and what is kept of them."""

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
    """What to measure. samplers: names, the baseline first. requests: kinds of requests.

    runs: recorded decodings of each sampler and batch. dtype: bfloat16, float16 or float32.
    profiles: of each sampler and batch. speculate: drafts of a step; then samplers are
    flash_sample, without drafts, and DRAFTER-k for each drafter. drafts: of a step in all
    engines alike, by an EAGLE drafter of random weights.
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
    """One model that is loaded, in an engine, with several samplers to choose from."""

    def prepare(self, sampler: str, B: int, requests: str) -> None:
        """Untimed: what the first decoding of B requests of this kind has to do."""

    def decode(self, sampler: str, B: int, requests: str) -> Decoded:
        """B requests from their prompts to their last tokens, as DecodePlan says."""

    def profile(self, sampler: str, B: int, requests: str) -> Profile | Drafting | None:
        """Profile a few steps of such a decoding; with plan.speculate, time a draft."""

    def counts(self, sampler: str) -> dict[str, Any] | None:
        """Tokens since the start that the sampler served or left to the engine; None: all its."""

    def close(self) -> None:
        """Free the model."""


class Engine(Protocol):
    """An engine. name, as --engine has it; device and gpu as in Case."""

    name: str
    device: str
    gpu: str

    def check(self, plan: DecodePlan) -> None:
        """Raises InvalidArgument for what it can never do: an unknown sampler, several GPUs."""

    def label(self, sampler: str) -> tuple[str, bool]:
        """(text for legends, whether the logits stay on chip); raises for an unknown sampler."""

    def missing(self, sampler: str) -> str | None:
        """None if this sampler can run here, else why not."""

    def open(self, plan: DecodePlan, decoder: Decoder, tp: int, samplers: Sequence[str]) -> Session:
        """Load a model."""


def measure(
    plan: DecodePlan,
    engine: Engine,
    store: StepStore,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Measure the plan; returns the number of cases that failed.

    For each model, kind of requests and batch size the samplers decode in turn, run after run, each
    run beginning with another sampler, so that what drifts (clocks, other processes) meets all of
    them alike. A sampler that cannot run here is recorded as unavailable; one that fails is
    recorded with its error, and the others go on.

    Raises:
        InvalidArgument: a sampler that nobody knows; and what the engine raises on loading a model.
    """
    of = plan, engine, store, say
    return sum(_measure_model(*of, decoder, tp) for decoder in plan.models for tp in plan.tp)


def _measure_model(
    plan: DecodePlan,
    engine: Engine,
    store: StepStore,
    say: Callable[[str], None],
    decoder: Decoder,
    tp: int,
) -> int:
    cases = {name: _case(plan, engine, decoder, tp, name) for name in plan.samplers}
    able = []
    for name in plan.samplers:
        reason = engine.missing(name)
        if reason:
            store.append_status(cases[name], "unavailable", reason)
            say(f"{name}: {reason}")
        else:
            able.append(name)
    failed = 0
    if not able:
        return failed
    say(f"{decoder.name}, tp {tp}: loading")
    session = engine.open(plan, decoder, tp, able)
    try:
        for requests, B in product(plan.requests, plan.batches):
            here = {name: replace(cases[name], b=B, requests=requests) for name in able}
            broken = _measure_batch(plan, session, here, store, say)
            failed += len(broken)
        for name in able:
            try:
                counts = session.counts(name)
            except EngineFailed as error:  # its cases have failed before
                say(f"{name}: {error}")
                continue
            if counts is not None:
                store.append_counts(cases[name], counts)
    finally:
        session.close()
    return failed


def _measure_batch(
    plan: DecodePlan,
    session: Session,
    cases: dict[str, Case],
    store: StepStore,
    say: Callable[[str], None],
) -> set[str]:
    """Returns the samplers that failed."""
    first_case = next(iter(cases.values()))
    B, requests = first_case.b, first_case.requests
    broken: set[str] = set()

    def run(name: str, number: int) -> None:
        store.append_run(cases[name], number, session.decode(name, B, requests))

    def profile(name: str, number: int) -> None:
        found = session.profile(name, B, requests)
        if isinstance(found, Drafting):
            store.append_drafting(cases[name], number, found)
        elif found is not None:
            store.append_profile(cases[name], found, number)

    names = list(cases)
    todo: list[tuple[str, Callable[[], None]]] = [
        (name, partial(session.prepare, name, B, requests)) for name in names
    ]
    todo += _in_turn(names, plan.runs, run) + _in_turn(names, plan.profiles, profile)
    for name, action in todo:
        if name in broken:
            continue
        try:
            action()
        except Exception as error:  # an engine's error may be of any class
            status = "oom" if is_out_of_memory(error) else "error"
            store.append_status(cases[name], status, describe(error))
            say(f"{name}, B={B}: {describe(error)}")
            broken.add(name)
    say(f"{first_case.model}, {requests}, B={B}: measured")
    return broken


def _in_turn(
    names: list[str], runs: int, action: Callable[[str, int], None]
) -> list[tuple[str, Callable[[], None]]]:
    """Each sampler's action with the number of each run; a run begins with another sampler."""
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
