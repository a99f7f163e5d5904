"""The measuring loop: verify, build, warm up, then time all samplers of a problem in rounds.

For each problem the samplers take turns (A B C, A B C, ...), so that drift of clocks and
temperature falls on all of them alike (docs/methodology.md). Every round of every cell is on disk
before the next starts; a resumed run measures only the rounds that are missing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from fsbench import hardware
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
from fsbench.timers import Measurement, Timer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """What to measure and how. Problems that share a weight should stand together.

    warmup: untimed steps per cell; iters: timed ones, in `rounds` interleaved rounds.
    graph: replay a CUDA graph where the sampler allows it. check: verify before timing.
    seed: of inputs and noise, an int64. given_up: (name of a provider, problem) to leave out.
    """

    problems: list[Problem]
    providers: list[Found]
    graph: bool = True
    warmup: int = 25
    iters: int = 100
    rounds: int = 5
    seed: int = 0
    check: bool = True
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
    """A sampler that is built and ready to be timed on the problem at hand."""

    cell: Cell
    step: Callable[[], object]
    config: str
    peak_extra_bytes: int | None


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

    def run(self) -> None:
        """Measure every cell of the plan that the store lacks."""
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
            kind=str(provider.kind) if provider else "",
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
        # Of each cell, building counts as much as one round.
        share = 1 / (self.plan.rounds + 1)
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

    def _pending(self, problem: Problem) -> Iterator[tuple[Provider, Cell]]:
        """Samplers with rounds to measure; records the reason for those that cannot be."""
        for entry in self.plan.providers:
            cell = self.cell(entry, problem)
            if (entry.name, problem) in self.plan.given_up:
                continue
            if self.store.record(cell).rounds.keys() >= set(range(self.plan.rounds)):
                continue
            refusal = entry.refusal(problem)
            if refusal:
                self.store.append_status(cell, *refusal)
            elif entry.provider:
                yield entry.provider, cell

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
        launch, memory = self._build(provider, inputs)
        if self.plan.check and provider.kind is not Kind.LOWER_BOUND:
            from fsbench.verify.pathwise import check_on_problem

            check = check_on_problem(provider, inputs.problem, launch, inputs.hidden, inputs.weight)
            if not check.passed:
                raise VerificationFailed(f"{check.name}: {check.detail}")
            if self.team:
                tokens = launch(inputs.hidden, inputs.seed, inputs.offset).tolist()
                if any(theirs != tokens for theirs in self.team.gather(tokens)):
                    raise VerificationFailed("ranks: they return different tokens")
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
        return _Contender(cell, step, getattr(launch, "config", ""), memory)

    def _gate_check(self, provider: Provider, problem: Problem) -> None:
        """Raise VerificationFailed unless it passes `verify` at this dtype and temperature."""
        if not self.plan.check or provider.kind is Kind.LOWER_BOUND:
            return
        key = (provider.name, problem.device, problem.dtype, problem.temperature)
        if key not in self._gate:
            from fsbench.verify import verify
            from fsbench.verify.check import Setting

            setting = Setting(problem.device, problem.dtype, problem.temperature)
            failed = [check for check in verify(provider, setting) if not check.passed]
            self._gate[key] = "; ".join(f"{check.name}: {check.detail}" for check in failed)
        if self._gate[key]:
            raise VerificationFailed(self._gate[key])

    def _build(self, provider: Provider, inputs: _Inputs) -> tuple[Launch, int | None]:
        """The launch, and on a GPU the peak of memory that building left and a step takes, bytes.

        Memory that several launches share was there before this build; a launch that has such
        memory says so in its attribute `shared_bytes`.
        """
        import torch

        problem = inputs.problem
        on_gpu = problem.device == "cuda"
        if on_gpu:
            _free_memory(problem.device)
            before = torch.cuda.memory_allocated()
        if self.team is None or problem.tp == 1 or provider.build_sharded is None:
            launch = provider.build(problem, inputs.weight)
        else:
            torch.manual_seed(self.plan.seed)  # the verifying may have left it anywhere
            launch = provider.build_sharded(problem, self.team.shard(inputs.weight))
        launch(inputs.hidden, inputs.seed, inputs.offset)
        if not on_gpu:
            return launch, None
        _free_memory(problem.device)
        torch.cuda.reset_peak_memory_stats()
        launch(inputs.hidden, inputs.seed, inputs.offset)
        _synchronize(problem.device)
        peak = torch.cuda.max_memory_allocated() - before
        return launch, max(peak, 0) + getattr(launch, "shared_bytes", 0)

    def _time(self, contenders: list[_Contender], offset: Tensor) -> Iterator[tuple[Cell, int]]:
        """The interleaved rounds; yields each cell and round just before it is measured.

        `offset` advances before every step: fresh noise each time.
        """

        def advance() -> None:
            offset.add_(1)

        alive = list(contenders)
        for number in range(self.plan.rounds):
            for contender in list(alive):
                if number in self.store.record(contender.cell).rounds:
                    continue
                yield contender.cell, number
                self.begin(contender.cell)
                before = hardware.clocks(self.nvml_index)
                measured, failure = None, None
                try:
                    measured = self.timer.measure(
                        contender.step, self.plan.iterations(number), advance
                    )
                except Exception as error:
                    failure = error
                if self._failed(contender.cell, failure) or measured is None:
                    alive.remove(contender)
                    continue
                measured_round = Round(
                    **asdict(self._slowest(measured)),
                    clocks=_combined(before, hardware.clocks(self.nvml_index)),
                    config=contender.config,
                    peak_extra_bytes=contender.peak_extra_bytes,
                )
                self.store.append_round(contender.cell, number, measured_round)

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

    def _slowest(self, measured: Measurement) -> Measurement:
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
