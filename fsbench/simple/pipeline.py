"""Where sampling stands in a pipeline: a discrete-event simulation of decoding with TP x PP.

A microbatch of B rows passes the stages one after the other, is sampled, and begins again at the
first stage: the token is the next step's input. A stage, the bus and the CPU samplers each serve
one microbatch at a time, first come, first served. TP is inside a stage's time.

With p stages of T us and m microbatches, and sampling that takes s on the last stage, or c beside
it, theory says (equation 4, and Little's law for the loop):

    on the last stage   cycle = max(T + s, (p T + s) / m)
    on CPUs             cycle = max(T, c, (p T + c) / m)

So a decision plane hides all of its time only if more microbatches than stages are in flight; with
m = p the pipeline has no slack, and c / p of every cycle stays exposed.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from fsbench.errors import InvalidArgument

MOST = 2**15
"""Microbatches times stages that are simulated: seconds."""


@dataclass(frozen=True)
class Sampling:
    """What sampling adds after the last stage's layers and LM head.

    on_stage_us: while that stage is busy with it; less than 0 where a fused kernel is faster than
        the matmul that it replaces. beside_us: of services one after the other, such as the bus and
        the CPU samplers, during which the stage is free.
    """

    name: str
    on_stage_us: float = 0.0
    beside_us: tuple[float, ...] = ()


@dataclass(frozen=True)
class Pipeline:
    """stage_us: time of each stage for a microbatch, LM head included. batch: rows of one."""

    stage_us: tuple[float, ...]
    microbatches: int
    batch: int = 1

    def __post_init__(self) -> None:
        if not self.stage_us or min(self.stage_us) <= 0:
            raise InvalidArgument(f"stage_us: expected times above 0; got {self.stage_us}")
        for name in ("microbatches", "batch"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name}: expected >= 1; got {getattr(self, name)}")
        if len(self.stage_us) * self.microbatches > MOST:
            raise InvalidArgument(
                f"microbatches: expected at most {MOST} times stages; got {self.microbatches} in "
                f"{len(self.stage_us)} stages"
            )


@dataclass(frozen=True)
class Outcome:
    """Of a pipeline in steady state.

    cycle_us: between two microbatches that leave. step_us: from a token to the next one of the same
    row (TPOT). bubbles: of each stage, the share of time in which it has nothing to do.
    """

    cycle_us: float
    step_us: float
    tokens_per_s: float
    bubbles: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The mean over stages."""
        return sum(self.bubbles) / len(self.bubbles)


def simulate(pipeline: Pipeline, sampling: Sampling, steps: int = 200) -> Outcome:
    """Let every microbatch make so many steps, and measure the second half of the time."""
    stages = list(pipeline.stage_us)
    stages[-1] += sampling.on_stage_us
    if stages[-1] < 0:
        raise InvalidArgument(f"on_stage_us: expected at least -{pipeline.stage_us[-1]}")
    services = [*stages, *sampling.beside_us]
    free = [0.0] * len(services)
    waiting = [(0.0, number, 0, number) for number in range(pipeline.microbatches)]
    order = pipeline.microbatches  # of arrival, between equal times
    finished: list[float] = []
    intervals: list[tuple[int, float, float]] = []
    done = [0] * pipeline.microbatches
    while waiting:
        ready, _, service, batch = heapq.heappop(waiting)
        begin = max(ready, free[service])
        end = free[service] = begin + services[service]
        intervals.append((service, begin, end))
        following = service + 1
        if following == len(services):
            finished.append(end)
            done[batch] += 1
            if done[batch] == steps:
                continue
            following = 0
        heapq.heappush(waiting, (end, order, following, batch))
        order += 1
    # Away from the beginning, and from the end, where microbatches are missing.
    finished.sort()
    m = pipeline.microbatches
    first, last = len(finished) // 2 // m * m, len(finished) - 1 - m
    last -= (last - first) % m  # whole turns of all microbatches
    start, stop = finished[first], finished[last]
    cycle = (stop - start) / (last - first)
    busy = [0.0] * len(stages)
    for service, begin, end in intervals:
        if service < len(stages):
            busy[service] += max(0.0, min(end, stop) - max(begin, start))
    return Outcome(
        cycle_us=cycle,
        step_us=cycle * m,
        tokens_per_s=pipeline.batch * 1e6 / cycle,
        bubbles=tuple(max(0.0, 1 - each / (stop - start)) for each in busy),
    )


def cycle_us(pipeline: Pipeline, sampling: Sampling) -> float:
    """The cycle in steady state by theory: the slowest service, or the loop shared by all."""
    stages = list(pipeline.stage_us)
    stages[-1] += sampling.on_stage_us
    services = [*stages, *sampling.beside_us]
    return max(*services, sum(services) / pipeline.microbatches)


def enough_microbatches(pipeline: Pipeline, sampling: Sampling) -> int:
    """How many are needed so that the loop is not what limits the cycle."""
    stages = list(pipeline.stage_us)
    stages[-1] += sampling.on_stage_us
    services = [*stages, *sampling.beside_us]
    return math.ceil(sum(services) / max(services) - 1e-9)
