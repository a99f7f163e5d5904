"""The measuring loop: verify, build, warm up, then time all samplers of a problem in rounds.

For each problem the samplers take turns (A B C, A B C, ...), so that drift of clocks and
temperature falls on all of them alike (docs/methodology.md). Every round of every cell is on disk
before the next starts; a resumed run measures only the rounds that are missing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fsbench import caches, energy, hardware
from fsbench.discover import Found
from fsbench.distributed import Team
from fsbench.errors import (
    DeviceUnavailable,
    InvalidArgument,
    ProviderUnavailable,
    TimerUnavailable,
    UnsupportedProblem,
    VerificationFailed,
    describe,
    is_out_of_memory,
    one_line,
)
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider
from fsbench.results import Cell, Round, Store
from fsbench.timers import Timer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """What to measure and how. Problems that share a weight should stand together.

    warmup: untimed steps per cell; iters: timed ones, in `rounds` interleaved rounds.
    graph: replay a CUDA graph where the sampler allows it. check: verify before timing.
    seed: of inputs and noise, an int64. forms: time results.FORMS of fused samplers, too.
    energy_s: seconds of a loop that measures each cell's energy, once it is timed; None: no loop.
    given_up: (name of a provider, problem) to leave out.
    """

    problems: list[Problem]
    providers: list[Found]
    graph: bool = True
    warmup: int = 25
    iters: int = 100
    rounds: int = 5
    seed: int = 0
    check: bool = True
    forms: bool = False
    energy_s: float | None = None
    given_up: frozenset[tuple[str, Problem]] = frozenset()

    def __post_init__(self) -> None:
        for name, least in (("warmup", 0), ("iters", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                raise InvalidArgument(
                    f"--{name}: expected an integer >= {least}; got {getattr(self, name)}"
                )
        if self.iters < self.rounds:
            raise InvalidArgument(
                f"--iters: expected at least one step for each of --rounds {self.rounds}; "
                f"got {self.iters}"
            )
        if self.energy_s is not None and not self.energy_s >= energy.SHORTEST_S:
            raise InvalidArgument(
                f"--energy: expected at least {energy.SHORTEST_S:g} seconds; got {self.energy_s:g}"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise InvalidArgument(f"--seed: expected an integer of 64 bits; got {self.seed}")

    def iterations(self, number: int) -> int:
        """Timed iterations of one round; the first rounds take the remainder."""
        return self.iters // self.rounds + (number < self.iters % self.rounds)


@dataclass(frozen=True)
class _Inputs:
    """What every launch of one problem reads."""

    problem: Problem
    weight: Tensor
    hidden: Tensor
    seed: Tensor
    offset: Tensor


@dataclass
class _Contender:
    """A sampler that is built and ready to be timed on the problem at hand.

    facts: of its preparation, fields of Round. forms: steps of its FORMS by name.
    """

    cell: Cell
    step: Callable[[], object]
    facts: dict[str, Any]
    forms: dict[str, Callable[[], object]]


@dataclass
class Runner:
    """Carries out a plan on the current CUDA device, or on the CPU.

    gpu_name and nvml_index are of that device ("" and None on a CPU). `report` is called with
    (cells done, cells in all, what is going on); a cell at work counts as a part of one. `begin` is
    called with each cell that is worked on, `troubled` with (status, reason) of a failure.

    team: of the ranks that carry out the plan together, each with a Runner of its own; its problems
    then have `tp` ranks. All runners take the same decisions: they agree on every failure. Rank 0's
    store is written to, the others' are replicas.
    """

    plan: Plan
    store: Store
    timer: Timer
    gpu_name: str = ""
    nvml_index: int | None = None
    report: Callable[[float, int, str], None] = lambda done, total, what: None
    begin: Callable[[Cell], None] = lambda cell: None
    troubled: Callable[[str, str], None] = lambda status, reason: None
    team: Team | None = None
    _gate: dict[tuple[object, ...], str] = field(default_factory=dict)
    _weight: tuple[tuple[object, ...], Tensor] | None = None
    _called: set[str] = field(default_factory=set)
    _idle_w: float | None = None

    def __post_init__(self) -> None:
        self._warm = caches.filled()

    def run(self) -> None:
        """Measure every cell of the plan that the store lacks.

        Raises:
            DeviceUnavailable: energy is asked for, and this device has no counter of it.
        """
        if self.plan.energy_s is not None and hardware.energy_mj(self.nvml_index) is None:
            raise DeviceUnavailable(
                "--energy: needs a GPU whose counter of energy NVML can read; see `fsbench doctor`"
            )
        each = len(self.plan.providers)
        total = each * len(self.plan.problems)
        for number, problem in enumerate(self.plan.problems):
            done: float = number * each
            for share, what in self._measure(problem):
                done += share
                self.report(done, total, what)
        self.report(total, total, "done")

    def cell(self, entry: Found, problem: Problem) -> Cell:
        """The cell of one sampler on one problem, as this run measures it."""
        provider = entry.provider
        graph = bool(
            self.plan.graph
            and problem.device == "cuda"
            and provider
            and provider.capabilities.graph_safe
        )
        return Cell(
            provider=entry.name,
            label=provider.label if provider else entry.name,
            kind=str(provider.kind_on(problem)) if provider else "",
            fused=bool(provider and provider.capabilities.fused),
            gpu=self.gpu_name,
            timer=self.timer.name,
            graph=graph,
            l2=self.timer.l2,
            **problem.fields(),  # type: ignore[arg-type]
        )

    def _measure(self, problem: Problem) -> Iterator[tuple[float, str]]:
        """All samplers on one problem. Yields (cells done since the last time, what comes next)."""
        pending = list(self._pending(problem))
        if not pending:
            return
        where = f"B={problem.B} D={problem.D} V={problem.V}"
        yield len(self.plan.providers) - len(pending), f"{where}: inputs"
        try:
            inputs = self._inputs_of(problem)
        except Exception as error:
            if self.team:
                raise  # the others are waiting; whoever started this rank ends them too
            for _, cell in pending:
                self._failed(cell, error)
            return
        # Of each cell, building counts as much as one round, and so does its energy.
        share = 1 / (self.plan.rounds + 1 + (self.plan.energy_s is not None))
        finished = 0.0
        contenders = []
        for provider, cell in pending:
            yield finished, f"{where}: {cell.label}"
            contender = self._prepare(provider, cell, inputs)
            if contender:
                contenders.append(contender)
            finished = share if contender else 1.0
        for cell, number in self._time(contenders, inputs.offset):
            yield finished, f"{where}: {cell.label}, round {number + 1} of {self.plan.rounds}"
            finished = share
        for cell in self._energies(contenders, inputs.offset):
            yield finished, f"{where}: {cell.label}, energy"
            finished = share

    def _pending(self, problem: Problem) -> Iterator[tuple[Provider, Cell]]:
        """Samplers with rounds to measure; records the reason for those that cannot be."""
        for entry in self.plan.providers:
            cell = self.cell(entry, problem)
            if (entry.name, problem) in self.plan.given_up:
                continue
            if entry.provider and self._complete(entry.provider, problem, cell):
                continue
            refusal = entry.refusal(problem)
            if refusal:
                self.store.append_status(cell, *refusal)
            elif entry.provider:
                yield entry.provider, cell

    def _complete(self, provider: Provider, problem: Problem, cell: Cell) -> bool:
        """Whether the store has all that the plan asks of a cell."""
        record = self.store.record(cell)
        numbers = set(range(self.plan.rounds))
        forms = self._form_builds(provider, problem)
        return (
            record.rounds.keys() >= numbers
            and all(record.forms.get(form, {}).keys() >= numbers for form in forms)
            and (self.plan.energy_s is None or record.energy is not None)
        )

    def _form_builds(
        self, provider: Provider, problem: Problem
    ) -> dict[str, Callable[[Tensor], Launch]]:
        """How to build the forms that the plan asks for, by name: weight -> launch."""
        able = provider.capabilities
        if not self.plan.forms or provider.kind is not Kind.EXACT or not able.fused:
            return {}
        found: dict[str, Callable[[Tensor], Launch]] = {}
        if provider.matmul_form:
            found["matmul"] = partial(provider.matmul_form, problem)
        if able.zero_temperature and problem.temperature > 0:
            found["greedy"] = partial(provider.build, replace(problem, temperature=0.0))
        return found

    def _inputs_of(self, problem: Problem) -> _Inputs:
        """The weight, kept for the next problem that shares it, and this problem's own inputs."""
        import torch

        from fsbench import inputs

        key = (problem.D, problem.V, problem.dtype, problem.logits, problem.device)
        if self._weight is None or self._weight[0] != key:
            self._weight = None  # free the old one before making the new
            self._weight = (key, inputs.make_weight(problem, self.plan.seed))
        torch.manual_seed(self.plan.seed)
        device = torch.device(problem.device)
        return _Inputs(
            problem,
            self._weight[1],
            inputs.make_hidden(problem, self.plan.seed),
            seed=torch.tensor([spread_seed(self.plan.seed)], dtype=torch.int64, device=device),
            offset=torch.zeros(1, dtype=torch.int64, device=device),
        )

    def _prepare(self, provider: Provider, cell: Cell, inputs: _Inputs) -> _Contender | None:
        """A contender, or None with the reason in the store."""
        self.begin(cell)
        contender, failure = None, None
        try:
            contender = self._contender(provider, cell, inputs)
        except Exception as error:
            failure = error
        if self._failed(cell, failure):
            contender = None
            _free_memory(cell.device)
        return contender

    def _contender(self, provider: Provider, cell: Cell, inputs: _Inputs) -> _Contender:
        """Verify, build, check on the problem, capture and warm up."""
        self._gate_check(provider, inputs.problem)
        launch, facts = self._build(provider, inputs)
        if self.plan.check and provider.kind is not Kind.LOWER_BOUND:
            from fsbench.verify.pathwise import check_on_problem

            check = check_on_problem(provider, inputs.problem, launch, inputs.hidden, inputs.weight)
            if not check.passed:
                raise VerificationFailed(f"{check.name}: {check.detail}")
            if self.team:
                tokens = launch(inputs.hidden, inputs.seed, inputs.offset).tolist()
                if any(theirs != tokens for theirs in self.team.gather(tokens)):
                    raise VerificationFailed("ranks: they return different tokens")
        facts["config"] = getattr(launch, "config", "")
        forms = {}
        for form, build in self._form_builds(provider, inputs.problem).items():
            try:
                forms[form] = self._ready(cell, build(inputs.weight), inputs)
            except Exception as error:
                self._record_lack(cell, form, error)
        return _Contender(cell, self._ready(cell, launch, inputs), facts, forms)

    def _ready(self, cell: Cell, launch: Launch, inputs: _Inputs) -> Callable[[], object]:
        """The step to be timed, captured if the cell says so, and warmed up."""
        step: Callable[[], object]
        if cell.graph:
            from fsbench.graphs import capture

            step = capture(launch, inputs.hidden, inputs.seed, inputs.offset)
        else:

            def step() -> object:
                return launch(inputs.hidden, inputs.seed, inputs.offset)

        for _ in range(self.plan.warmup):
            step()
        _synchronize(cell.device)
        return step

    def _gate_check(self, provider: Provider, problem: Problem) -> None:
        """Raise VerificationFailed unless it passes `verify` at this dtype and temperature."""
        if not self.plan.check or provider.kind is Kind.LOWER_BOUND:
            return
        # Verified with the same filters, whatever they are here.
        truncated = bool(problem.filters or problem.penalties)
        key = (provider.name, problem.device, problem.dtype, problem.temperature, truncated)
        if key not in self._gate:
            self._called.add(provider.name)
            from fsbench.verify import verify
            from fsbench.verify.check import Setting

            setting = Setting(problem.device, problem.dtype, problem.temperature, truncated)
            failed = [check for check in verify(provider, setting) if not check.passed]
            self._gate[key] = "; ".join(f"{check.name}: {check.detail}" for check in failed)
        if self._gate[key]:
            raise VerificationFailed(self._gate[key])

    def _build(self, provider: Provider, inputs: _Inputs) -> tuple[Launch, dict[str, Any]]:
        """The launch, and the facts of Round that only building shows.

        first_call_s, warm: of `build` and one step. peak_extra_bytes: on a GPU the peak of memory
        that building left and a step takes. Memory that several launches share was there before
        this build; a launch that has such memory says so in its attribute `shared_bytes`.
        """
        import torch

        problem = inputs.problem
        on_gpu = problem.device == "cuda"
        if on_gpu:
            _free_memory(problem.device)
            before = torch.cuda.memory_allocated()
        warm = [*self._warm, *(["process"] if provider.name in self._called else [])]
        self._called.add(provider.name)
        begin = time.perf_counter()
        if self.team is None or problem.tp == 1 or provider.build_sharded is None:
            launch = provider.build(problem, inputs.weight)
        else:
            torch.manual_seed(self.plan.seed)  # the verifying may have left it anywhere
            launch = provider.build_sharded(problem, self.team.shard(inputs.weight))
        launch(inputs.hidden, inputs.seed, inputs.offset)
        _synchronize(problem.device)
        facts: dict[str, Any] = {"first_call_s": time.perf_counter() - begin, "warm": warm}
        if on_gpu:
            _free_memory(problem.device)
            torch.cuda.reset_peak_memory_stats()
            launch(inputs.hidden, inputs.seed, inputs.offset)
            _synchronize(problem.device)
            peak = torch.cuda.max_memory_allocated() - before
            facts["peak_extra_bytes"] = max(peak, 0) + getattr(launch, "shared_bytes", 0)
        return launch, facts

    def _time(self, contenders: list[_Contender], offset: Tensor) -> Iterator[tuple[Cell, int]]:
        """The interleaved rounds; yields each cell and round just before it is measured.

        `offset` advances before every step: fresh noise each time. A contender that fails leaves
        the list.
        """

        def advance() -> None:
            offset.add_(1)

        for number in range(self.plan.rounds):
            for contender in list(contenders):
                cell = contender.cell
                record = self.store.record(cell)
                forms = [
                    form for form in contender.forms if number not in record.forms.get(form, {})
                ]
                if number in record.rounds and not forms:
                    continue
                yield cell, number
                if number not in record.rounds:
                    self.begin(cell)
                    timed, failure = None, None
                    try:
                        timed = self._round(contender.step, number, advance, contender.facts)
                    except Exception as error:
                        failure = error
                    if self._failed(cell, failure) or timed is None:
                        contenders.remove(contender)
                        continue
                    self.store.append_round(cell, number, self._slowest(timed))
                for form in forms:
                    try:
                        measured = self._round(contender.forms[form], number, advance, {})
                    except Exception as error:
                        self._record_lack(cell, form, error)
                        del contender.forms[form]
                        continue
                    self.store.append_form(cell, form, number, measured)

    def _round(
        self,
        step: Callable[[], object],
        number: int,
        advance: Callable[[], None],
        facts: dict[str, Any],
    ) -> Round:
        """One round of a step, with the state of the GPU around it."""
        before = hardware.clocks(self.nvml_index)
        measured = self.timer.measure(step, self.plan.iterations(number), advance)
        clocks = _combined(before, hardware.clocks(self.nvml_index))
        return Round(**asdict(measured), clocks=clocks, **facts)

    def _energies(self, contenders: list[_Contender], offset: Tensor) -> Iterator[Cell]:
        """The energy of every cell, after all timing of the problem; yields it just before."""
        if self.plan.energy_s is None:
            return
        counter = partial(hardware.energy_mj, self.nvml_index)
        for contender in contenders:
            if self.store.record(contender.cell).energy is not None:
                continue
            yield contender.cell
            try:
                if self._idle_w is None:
                    _synchronize(contender.cell.device)
                    self._idle_w = energy.idle_watts(counter)
                queue = partial(_queue, contender.step, offset)
                found = energy.energy(queue, counter, self.plan.energy_s, self._idle_w)
            except Exception as error:
                self._record_lack(contender.cell, "energy", error)
                continue
            self.store.append_energy(contender.cell, found)

    def _record_lack(self, cell: Cell, what: str, error: Exception) -> None:
        """Note what could not be measured of a cell beside its time; as `_failed`."""
        self.store.append_lack(cell, what, describe(error))
        _require_live_device(cell.device, error)

    def _failed(self, cell: Cell, error: Exception | None) -> bool:
        """Whether this or another rank failed at a cell, which then gets a status."""
        failures = [_status(error) if error else None]
        if failures[0]:
            self.troubled(*failures[0])  # before the others are asked: they may be waiting for us
        if self.team:
            failures = self.team.gather(failures[0])
        for rank, failure in enumerate(failures):
            if failure:
                status, reason = failure
                where = f"rank {rank}: " if self.team else ""
                self.store.append_status(cell, status, where + reason)
                break
        if error:
            _require_live_device(cell.device, error)
        return any(failures)

    def _slowest(self, measured: Round) -> Round:
        """Of each step the time of the rank that took longest; the rest is this rank's."""
        if self.team is None:
            return measured
        spans = self.team.gather(measured.span_us)
        return replace(measured, span_us=[max(times) for times in zip(*spans, strict=True)])


def _status(error: Exception) -> tuple[str, str]:
    """(status of a cell, reason) of what went wrong."""
    for expected, status in _STATUS_OF.items():
        if isinstance(error, expected):
            return status, one_line(error)
    return "oom" if is_out_of_memory(error) else "error", describe(error)


_STATUS_OF: dict[type[Exception], str] = {
    VerificationFailed: "check_failed",
    UnsupportedProblem: "unsupported",
    ProviderUnavailable: "unavailable",
    TimerUnavailable: "timer_unavailable",
}


def spread_seed(seed: int) -> int:
    """An int64 far from those of neighbouring seeds (the finaliser of splitmix64).

    Some samplers use neighbouring seeds as neighbouring positions of one stream.
    """
    mask = 2**64 - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


def _queue(step: Callable[[], object], offset: Tensor, steps: int) -> energy.Queued:
    """Give the GPU some steps; the event that follows them."""
    import torch

    for _ in range(steps):
        offset.add_(1)
        step()
    done = torch.cuda.Event()
    done.record()
    return done


def _combined(before: dict[str, object], after: dict[str, object]) -> dict[str, object]:
    """Clocks after the round (the GPU is warm then), throttle reasons of either end."""
    throttle = {*before.get("throttle", []), *after.get("throttle", [])}  # type: ignore[misc]
    return {**after, "throttle": sorted(throttle)} if after else {}


def _synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _free_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _require_live_device(device: str, cause: Exception) -> None:
    """A kernel that faulted leaves the CUDA context unusable: stop, or every cell would fail."""
    try:
        _synchronize(device)
    except Exception as error:
        raise DeviceUnavailable(
            f"the GPU cannot be used any more in this process after {describe(cause)}; "
            "what was measured is kept: continue with --resume, without that sampler"
        ) from error
