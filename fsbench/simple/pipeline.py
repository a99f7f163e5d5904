"""Where sampling stands in a pipeline: the steady state of decoding with TP x PP.

A microbatch of B rows passes the stages one after the other, is sampled, and begins again at the
first stage: the token is the next step's input. A stage, the bus and the CPU samplers each serve
one microbatch at a time, first come, first served. TP is inside a stage's time.

So the time from one microbatch to the next is that of the slowest service, or that of the loop
through all services over the m microbatches in flight (equation 4, and Little's law). With p stages
of T us, and sampling that takes s on the last stage, or c beside it:

    on the last stage   cycle = max(T + s, (p T + s) / m)
    on CPUs             cycle = max(T, c, (p T + c) / m)

A decision plane hides all of its time only if more microbatches than stages are in flight; with
m = p the pipeline has no slack, and c / p of every cycle stays exposed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsbench.errors import InvalidArgument


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


@dataclass(frozen=True)
class Outcome:
    """Of a pipeline in steady state.

    cycle_us: between two microbatches that leave. step_us: from a token to the next one of the same
    row (TPOT). bubbles: of each stage, the share of time in which it has nothing to do.
    enough_in_flight: microbatches with which the loop is not what limits the cycle.
    """

    cycle_us: float
    step_us: float
    tokens_per_s: float
    bubbles: tuple[float, ...]
    enough_in_flight: int

    @property
    def bubble(self) -> float:
        """The mean over stages."""
        return sum(self.bubbles) / len(self.bubbles)


def steady_state(pipeline: Pipeline, sampling: Sampling) -> Outcome:
    """What the pipeline settles to, with this sampling."""
    stages = [*pipeline.stage_us]
    stages[-1] += sampling.on_stage_us
    if stages[-1] < 0:
        raise InvalidArgument(f"on_stage_us: expected at least -{pipeline.stage_us[-1]}")
    services = [*stages, *sampling.beside_us]
    slowest, loop = max(services), sum(services)
    cycle = max(slowest, loop / pipeline.microbatches)
    return Outcome(
        cycle_us=cycle,
        step_us=cycle * pipeline.microbatches,
        tokens_per_s=pipeline.batch * 1e6 / cycle,
        bubbles=tuple(1 - stage / cycle for stage in stages),
        enough_in_flight=math.ceil(loop / slowest - 1e-9),
    )
