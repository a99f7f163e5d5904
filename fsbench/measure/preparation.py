"""Prepare samplers for timing: verify, build, check on the problem, capture and warm up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsbench import inputs
from fsbench.errors import InvalidType, VerificationFailed, as_text, describe
from fsbench.graphs import capture
from fsbench.inputs import fingerprint
from fsbench.machine import caches
from fsbench.machine.device_state import free_memory, synchronize
from fsbench.measure.gate import failed_checks, setting_of
from fsbench.measure.plan import Plan
from fsbench.measure.process_state import ProcessState, SpoiledProcess
from fsbench.measure.recorder import Recorder
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, QuantizedWeight
from fsbench.records.cell import Cell, CellRecord
from fsbench.verify.pathwise import check_on_problem


@dataclass(frozen=True)
class Inputs:
    """Tensors that every launch of a problem reads.

    head: the quantized head; None if the weight is not quantized.
    layout: shape, strides, dtype and address of every tensor, by name, when it was made.
    """

    problem: Problem
    weight: Tensor
    head: QuantizedWeight | None
    hidden: Tensor
    seed: Tensor
    offset: Tensor
    layout: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout.update(self._layout())

    def _layout(self) -> dict[str, tuple[object, ...]]:
        named = {**self.tensors(), "offset": self.offset}
        return {
            name: (tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr())
            for name, tensor in named.items()
        }

    def resized(self) -> list[str]:
        """Return the names of tensors whose shape, strides, dtype or address changed."""
        current = self._layout()
        return [name for name, original in self.layout.items() if current[name] != original]

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor but `offset`, which advances, by name."""
        named = {name: getattr(self, name) for name in ("weight", "hidden", "seed")}
        parts = vars(self.head) if self.head else {}
        return named | {f"head.{name}": part for name, part in parts.items()}

    def fingerprints(self) -> dict[str, int]:
        """Return the fingerprint of each of `tensors`, by name."""
        return {name: fingerprint(tensor) for name, tensor in self.tensors().items()}

    def served_to(self, provider: Provider) -> Any:
        """Return the weight, or for a sampler of quantized heads the head."""
        takes = self.problem.weights in provider.capabilities.quantized
        return self.head if takes else self.weight


@dataclass
class Contender:
    """A sampler that is built and ready to be timed on a problem.

    eager: the step without a graph. facts: fields of Round that its preparation shows.
    forms: steps of its FORMS by name. lacks: why some forms could not be prepared.
    require_intact: Preparation.require_intact for its inputs.
    """

    cell: Cell
    step: Callable[[], object]
    eager: Callable[[], object]
    facts: dict[str, Any]
    forms: dict[str, Callable[[], object]]
    lacks: dict[str, str]
    require_intact: Callable[[int], None]


class Batch(NamedTuple):
    """Samplers that are measured together on one problem, each with its cell."""

    problem: Problem
    samplers: list[tuple[Provider, Cell]]


class Ready(NamedTuple):
    """Samplers of a batch that can be timed, and the offset that all their steps read."""

    contenders: list[Contender]
    offset: Tensor


def work_list(plan: Plan, recorder: Recorder, gpu: str, timer: str, l2: str) -> list[Batch]:
    """Return the batches of a plan that the results lack; record why a cell cannot be measured.

    gpu, timer, l2: see Plan.cell.
    """
    store = recorder.store
    batches: list[Batch] = []
    last: list[Batch] = []
    for problem in plan.problems:
        samplers = []
        for entry in plan.providers:
            cell = plan.cell(entry, problem, gpu, timer, l2)
            if cell in plan.given_up:
                continue
            if entry.provider and _complete(plan, entry.provider, store.record(cell)):
                continue
            recorder.begin(cell)  # `refusal` runs code of the sampler
            if refusal := entry.refusal(problem):
                store.append_status(cell, *refusal)
            elif cell == plan.last and entry.provider:
                last.append(Batch(problem, [(entry.provider, cell)]))
            elif entry.provider:
                samplers.append((entry.provider, cell))
        if samplers:
            batches.append(Batch(problem, samplers))
    return batches + last


def _complete(plan: Plan, provider: Provider, record: CellRecord) -> bool:
    """Return whether a record has all measurements that the plan asks for."""
    required = [record.rounds]
    for form in form_builds(plan, provider, record.cell.problem):
        required.append(record.forms.get(form, {}))
    return (
        all(rounds.keys() >= set(range(plan.rounds)) for rounds in required)
        and (plan.energy_s is None or record.energy is not None)
        and (plan.sustained_s is None or record.sustained is not None)
    )


def form_builds(
    plan: Plan, provider: Provider, problem: Problem
) -> dict[str, Callable[[Tensor], Launch]]:
    """Return functions weight -> launch that build the forms of the plan, by name."""
    able = provider.capabilities
    if not plan.forms or provider.kind is not Kind.EXACT or not able.fused:
        return {}
    builds: dict[str, Callable[[Tensor], Launch]] = {}
    if provider.matmul_form and problem.weights not in able.quantized:
        builds["matmul"] = partial(provider.matmul_form, problem)
    if able.zero_temperature and problem.temperature > 0:
        builds["greedy"] = partial(provider.build, replace(problem, temperature=0.0))
    return builds


@dataclass
class Preparation:
    """Makes the inputs and contenders of a plan; keeps what several of them share.

    first_call_s: seconds of first calls in compile processes, by sampler and problem.
    """

    plan: Plan
    recorder: Recorder
    first_call_s: Mapping[tuple[str, Problem], float] = field(default_factory=dict)
    _weight: tuple[tuple[object, ...], Tensor, QuantizedWeight | None] | None = None
    _called: set[str] = field(default_factory=set)
    _marks: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._warm = caches.filled()
        self._process = ProcessState()
        self._shipped = {
            entry.name for entry in self.plan.providers if entry.source.startswith("fsbench.")
        }

    def ready(self, batch: Batch) -> Ready:
        """Make the inputs of a batch and prepare its samplers; record those that fail."""
        recorder = self.recorder
        # If making the inputs ends this process, the first cell is given up, then the second.
        recorder.enter_together(batch.samplers[0][1], ", inputs", "inputs")
        try:
            inputs = self.inputs_of(batch.problem)
        except Exception as error:
            recorder.fail_inputs([cell for _, cell in batch.samplers], error)
            return Ready([], torch.empty(0))
        ready: list[Contender] = []
        for provider, cell in batch.samplers:
            work = partial(self.intact_contender, provider, cell, inputs)
            contender = recorder.part(cell, "", "first call", work)
            if contender is None:
                free_memory(batch.problem.device)
                continue
            for form, why in contender.lacks.items():
                recorder.store.append_lack(cell, form, why)
            ready.append(contender)
        return Ready(ready, inputs.offset)

    def inputs_of(self, problem: Problem) -> Inputs:
        """Make the inputs of a problem; the weight is kept for the next problem with the same."""
        form = problem.weights
        key = (problem.D, problem.V, problem.dtype, problem.logits, problem.device, form)
        if self._weight is None or self._weight[0] != key:
            self._weight = None  # free the old one before making the new
            weight = inputs.make_weight(problem, self.plan.seed)
            self._weight = (key, weight, inputs.quantized(weight, form) if form else None)
        torch.manual_seed(self.plan.seed)
        device = torch.device(problem.device)
        made = Inputs(
            problem,
            *self._weight[1:],
            inputs.make_hidden(problem, self.plan.seed),
            seed=torch.tensor([spread_seed(self.plan.seed)], dtype=torch.int64, device=device),
            offset=torch.zeros(1, dtype=torch.int64, device=device),
        )
        self._marks = made.fingerprints()
        return made

    def intact_contender(self, provider: Provider, cell: Cell, inputs: Inputs) -> Contender:
        """Return `contender`; call `require_intact` even if it fails."""
        try:
            return self.contender(provider, cell, inputs)
        finally:
            self.require_intact(inputs, provider.name, 0)

    def require_intact(self, inputs: Inputs, name: str, offset: int) -> None:
        """Undo a sampler's changes of its process and of the shared inputs.

        Args:
            name: of the sampler; one that is not shipped must not leave threads running either.
            offset: steps that the harness has counted so far.

        Raises:
            VerificationFailed: something was changed; the message names it.
            SpoiledProcess: the change cannot be undone.
        """
        changed = self._process.restore()
        if resized := inputs.resized():
            raise SpoiledProcess(f"it resizes {', '.join(resized)}")
        if name not in self._shipped:
            self._process.require_idle()
        current = inputs.fingerprints()
        written = [name for name, mark in self._marks.items() if current[name] != mark]
        if written:
            kept, self._weight = self._weight, None
            fresh, held = self.inputs_of(inputs.problem).tensors(), inputs.tensors()
            for name in written:  # in place: samplers that are built hold these tensors
                held[name].copy_(fresh[name])
            self._weight = kept
        if int(inputs.offset) != offset:
            inputs.offset.fill_(offset)
            written.append("offset")
        if written:
            raise VerificationFailed(f"it writes into {', '.join(written)}")
        if changed:
            raise VerificationFailed(f"it changes {', '.join(changed)}")

    def contender(self, provider: Provider, cell: Cell, inputs: Inputs) -> Contender:
        """Verify, build, check on the problem, capture and warm up."""
        times = self.recorder.times
        times.enter("gate")
        self._gate_check(provider, cell)
        times.enter("first call")
        launch, facts = self._build(provider, inputs)
        times.enter("check")
        if self.plan.check and provider.kind is not Kind.LOWER_BOUND:
            check = check_on_problem(provider, inputs.problem, launch, inputs.hidden, inputs.weight)
            if not check.passed:
                raise VerificationFailed(f"{check.name}: {check.detail}")
            if team := self.recorder.team:
                tokens = launch(inputs.hidden, inputs.seed, inputs.offset).tolist()
                if any(other != tokens for other in team.gather(tokens)):
                    raise VerificationFailed("ranks: they return different tokens")
        times.enter("capture")
        facts["config"] = _config(launch)
        forms: dict[str, Callable[[], object]] = {}
        lacks: dict[str, str] = {}
        for form, build in form_builds(self.plan, provider, inputs.problem).items():
            try:
                forms[form] = self._ready(cell, build(inputs.served_to(provider)), inputs)
            except Exception as error:
                lacks[form] = describe(error)
        step = self._ready(cell, launch, inputs)
        eager = partial(launch, inputs.hidden, inputs.seed, inputs.offset)
        intact = partial(self.require_intact, inputs, provider.name)
        return Contender(cell, step, eager, facts, forms, lacks, intact)

    def _ready(self, cell: Cell, launch: Launch, inputs: Inputs) -> Callable[[], object]:
        """Return the step to be timed, captured if the cell says so, and warmed up."""
        prepare = capture if cell.conditions.graph else partial
        step: Callable[[], object] = prepare(launch, inputs.hidden, inputs.seed, inputs.offset)
        for _ in range(self.plan.warmup):
            step()
        synchronize(cell.problem.device)
        return step

    def _gate_check(self, provider: Provider, cell: Cell) -> None:
        """Raise VerificationFailed unless the sampler passes `verify` in this setting."""
        if not self.plan.check or provider.kind is Kind.LOWER_BOUND:
            return
        key = (provider.name, setting_of(cell.problem))
        verdicts = self.recorder.gate
        if key not in verdicts:
            self._called.add(provider.name)
            verdicts[key] = failed_checks(
                provider,
                cell.problem,
                lambda name: self.recorder.enter(cell, f", checking {name}", "gate"),
            )
            self.recorder.verified(key, verdicts[key])
        if verdicts[key]:
            raise VerificationFailed(verdicts[key])

    def _build(self, provider: Provider, inputs: Inputs) -> tuple[Launch, dict[str, Any]]:
        """Build a sampler; return its launch and the fields of Round that only building shows.

        first_call_s and warm are about `build` and one step. peak_extra_bytes is, on a GPU, the
        peak of the memory that building left and a step takes. A launch that shares memory with
        others, allocated before this build, gives its size in its attribute `shared_bytes`.
        """
        problem = inputs.problem
        ahead_s = self.first_call_s.get((provider.name, problem))
        on_gpu = problem.device == "cuda"
        if on_gpu:
            free_memory(problem.device)
            before = torch.cuda.memory_allocated()
        warm = [*self._warm, *(["process"] if provider.name in self._called else [])]
        warm += [] if ahead_s is None else ["ahead"]
        self._called.add(provider.name)
        begin = time.perf_counter()
        team = self.recorder.team
        if team is None or problem.tp == 1 or provider.build_sharded is None:
            launch = provider.build(problem, inputs.served_to(provider))
        else:
            torch.manual_seed(self.plan.seed)  # `verify` drew from it
            launch = provider.build_sharded(problem, team.shard(inputs.weight))
        launch(inputs.hidden, inputs.seed, inputs.offset)
        synchronize(problem.device)
        first_call_s = time.perf_counter() - begin
        facts: dict[str, Any] = {"first_call_s": first_call_s, "warm": warm, "ahead_s": ahead_s}
        if on_gpu:
            free_memory(problem.device, generation=1)  # what building left is young
            torch.cuda.reset_peak_memory_stats()
            launch(inputs.hidden, inputs.seed, inputs.offset)
            synchronize(problem.device)
            peak = torch.cuda.max_memory_allocated() - before
            facts["peak_extra_bytes"] = max(peak, 0) + getattr(launch, "shared_bytes", 0)
        return launch, facts


def _config(launch: Launch) -> str:
    config = getattr(launch, "config", "")
    if not isinstance(config, str):
        raise InvalidType(f"launch.config: expected a string; got {as_text(repr(config))}")
    return as_text(config)


def spread_seed(seed: int) -> int:
    """Return an int64 far from those of neighboring seeds (the finalizer of splitmix64).

    Some samplers use neighboring seeds as neighboring positions of one stream.
    """
    mask = 2**64 - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z
