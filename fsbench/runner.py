"""The measuring loop: verify, build, warm up, then time all samplers of a problem in rounds.

For each problem the samplers take turns (A B C, A B C, ...), so that drift of clocks and
temperature falls on all of them alike (docs/methodology.md). Every round of every cell is on disk
before the next starts; a resumed run measures only the rounds that are missing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from fsbench import hardware
from fsbench.discover import Found
from fsbench.errors import DeviceUnavailable, ProviderUnavailable, UnsupportedProblem
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
    """

    problems: list[Problem]
    providers: list[Found]
    graph: bool = True
    warmup: int = 25
    iters: int = 100
    rounds: int = 5
    seed: int = 0
    check: bool = True

    def iterations(self, number: int) -> int:
        """Timed iterations of one round; the first rounds take the remainder."""
        return self.iters // self.rounds + (number < self.iters % self.rounds)


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
    (cells done, cells in all, what is going on).
    """

    plan: Plan
    store: Store
    timer: Timer
    gpu_name: str = ""
    nvml_index: int | None = None
    report: Callable[[int, int, str], None] = lambda done, total, what: None
    _gate: dict[tuple[object, ...], str] = field(default_factory=dict)
    _weight: tuple[tuple[object, ...], Tensor] | None = None

    def run(self) -> None:
        """Measure every cell of the plan that the store lacks."""
        total = len(self.plan.problems) * len(self.plan.providers)
        for number, problem in enumerate(self.plan.problems):
            done = number * len(self.plan.providers)
            pending = list(self._pending(problem))
            if not pending:
                continue
            self.report(done, total, f"{problem}: inputs")
            weight = self._weight_of(problem)
            inputs = self._inputs_of(problem)
            contenders = []
            for entry, cell in pending:
                self.report(done, total, f"{problem}: {cell.label}")
                contender = self._prepare(entry, cell, problem, weight, *inputs)
                if contender:
                    contenders.append(contender)
                else:
                    done += 1
            self._time(contenders, inputs[2], lambda what, d=done: self.report(d, total, what))
            del contenders
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

    def _pending(self, problem: Problem) -> Iterator[tuple[Provider, Cell]]:
        """Samplers with rounds to measure; records the reason for those that cannot be."""
        for entry in self.plan.providers:
            cell = self.cell(entry, problem)
            record = self.store.record(cell)
            if len(record.rounds) >= self.plan.rounds:
                continue
            reason = entry.unavailable_reason(problem.device)
            status = "unavailable"
            if not reason and entry.provider:
                reason = entry.provider.unsupported_reason(problem)
                status = "unsupported"
            if reason:
                if (record.status, record.reason) != (status, reason):
                    self.store.append_status(cell, status, reason)
            elif entry.provider:
                yield entry.provider, cell

    def _weight_of(self, problem: Problem) -> Tensor:
        """The weight of a problem, kept for the next one that shares it."""
        from fsbench import inputs

        key = (problem.D, problem.V, problem.dtype, problem.logits, problem.device)
        if self._weight is None or self._weight[0] != key:
            self._weight = None  # free the old one before making the new
            self._weight = (key, inputs.make_weight(problem, self.plan.seed))
        return self._weight[1]

    def _inputs_of(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
        """hidden, and the seed and offset that every launch of this problem reads."""
        import torch

        from fsbench import inputs

        torch.manual_seed(self.plan.seed)
        device = torch.device(problem.device)
        seed = torch.tensor([spread_seed(self.plan.seed)], dtype=torch.int64, device=device)
        offset = torch.zeros(1, dtype=torch.int64, device=device)
        return inputs.make_hidden(problem, self.plan.seed), seed, offset

    def _prepare(
        self,
        provider: Provider,
        cell: Cell,
        problem: Problem,
        weight: Tensor,
        hidden: Tensor,
        seed: Tensor,
        offset: Tensor,
    ) -> _Contender | None:
        """Verify, build, check on the problem, capture and warm up; None if any of it failed."""
        import torch

        try:
            reason = self._gate_reason(provider, problem)
            if reason:
                self.store.append_status(cell, "check_failed", reason)
                return None
            launch, memory = self._build(provider, problem, weight, hidden, seed, offset)
            if self.plan.check and provider.kind is not Kind.LOWER_BOUND:
                from fsbench.verify.checks import check_on_problem

                check = check_on_problem(provider, problem, launch, hidden, weight)
                if not check.passed:
                    self.store.append_status(cell, "check_failed", f"{check.name}: {check.detail}")
                    return None
            step: Callable[[], object]
            if cell.graph:
                from fsbench.graphs import capture

                step = capture(launch, hidden, seed, offset)
            else:

                def step() -> object:
                    return launch(hidden, seed, offset)

            for _ in range(self.plan.warmup):
                step()
            _synchronize(problem.device)
            return _Contender(cell, step, getattr(launch, "config", ""), memory)
        except UnsupportedProblem as error:
            self.store.append_status(cell, "unsupported", str(error))
        except ProviderUnavailable as error:
            self.store.append_status(cell, "unavailable", str(error))
        except (torch.OutOfMemoryError, MemoryError) as error:
            self.store.append_status(cell, "oom", _one_line(error))
        except Exception as error:
            self.store.append_status(cell, "error", f"{type(error).__name__}: {_one_line(error)}")
            _require_live_device(problem.device, error)
        _free_memory(problem.device)
        return None

    def _gate_reason(self, provider: Provider, problem: Problem) -> str:
        """"" if the sampler passed `verify` at this dtype and temperature, else what failed."""
        if not self.plan.check or provider.kind is Kind.LOWER_BOUND:
            return ""
        key = (provider.name, problem.device, problem.dtype, problem.temperature)
        if key not in self._gate:
            from fsbench.verify import verify
            from fsbench.verify.checks import Setting

            setting = Setting(problem.device, problem.dtype, problem.temperature)
            failed = [check for check in verify(provider, setting) if not check.passed]
            self._gate[key] = "; ".join(f"{check.name}: {check.detail}" for check in failed)
        return self._gate[key]

    def _build(
        self,
        provider: Provider,
        problem: Problem,
        weight: Tensor,
        hidden: Tensor,
        seed: Tensor,
        offset: Tensor,
    ) -> tuple[Launch, int | None]:
        """The launch, and on a GPU the peak of memory that building left and a step takes, bytes.

        Memory that several launches share was there before this build; a launch that has such
        memory says so in its attribute `shared_bytes`.
        """
        import torch

        if problem.device != "cuda":
            launch = provider.build(problem, weight)
            launch(hidden, seed, offset)
            return launch, None
        _free_memory(problem.device)
        before = torch.cuda.memory_allocated()
        launch = provider.build(problem, weight)
        launch(hidden, seed, offset)
        _free_memory(problem.device)
        torch.cuda.reset_peak_memory_stats()
        launch(hidden, seed, offset)
        _synchronize(problem.device)
        peak = torch.cuda.max_memory_allocated() - before
        return launch, max(peak, 0) + getattr(launch, "shared_bytes", 0)

    def _time(
        self, contenders: list[_Contender], offset: Tensor, report: Callable[[str], None]
    ) -> None:
        """The interleaved rounds. `offset` advances before every step: fresh noise each time."""

        def advance() -> None:
            offset.add_(1)

        alive = list(contenders)
        for number in range(self.plan.rounds):
            for contender in list(alive):
                if number in self.store.record(contender.cell).rounds:
                    continue
                report(f"{contender.cell.label}: round {number + 1} of {self.plan.rounds}")
                before = hardware.clocks(self.nvml_index)
                try:
                    measured = self.timer.measure(
                        contender.step, self.plan.iterations(number), advance
                    )
                except Exception as error:
                    reason = f"{type(error).__name__}: {_one_line(error)}"
                    self.store.append_status(contender.cell, "error", reason)
                    _require_live_device(contender.cell.device, error)
                    alive.remove(contender)
                    continue
                measured_round = Round(
                    **asdict(measured),
                    clocks=_combined(before, hardware.clocks(self.nvml_index)),
                    config=contender.config,
                    peak_extra_bytes=contender.peak_extra_bytes,
                )
                self.store.append_round(contender.cell, number, measured_round)


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
    """A kernel that faulted leaves the CUDA context unusable: stop instead of failing every cell."""
    try:
        _synchronize(device)
    except Exception as error:
        raise DeviceUnavailable(
            f"the GPU cannot be used any more in this process after: {_one_line(cause)}; "
            "what was measured is kept: continue with --resume, without that sampler"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
