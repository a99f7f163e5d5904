"""Steady state of a decoding pipeline (TP x PP) with sampling in one of three places.

A microbatch of B rows passes the stages one after the other, is sampled, and starts again at the
first stage: the token is the next step's input. A stage, the bus and the CPU samplers each serve
one microbatch at a time, first come, first served. The time of a stage includes TP.

So the time from one microbatch to the next is that of the slowest service, or that of the loop
through all services over the m microbatches in flight (equation 4, and Little's law). With p stages
of T us, and sampling that takes s on the last stage, or c in parallel to it:

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
    """Time that sampling adds after the last stage's layers and LM head.

    Attributes:
        on_stage_us: Time for which it occupies that stage; negative if a fused kernel is faster
            than the matmul that it replaces.
        beside_us: Times of services, one after the other, during which the stage is free, such as
            the bus and the CPU samplers.
    """

    name: str
    on_stage_us: float = 0.0
    beside_us: tuple[float, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """A pipeline in steady state.

    Attributes:
        cycle_us: Time between two microbatches that leave.
        step_us: Time from a token to the next one of the same row (TPOT).
        bubble: Mean share of time in which a stage is idle.
        enough_in_flight: Microbatches with which the loop does not limit the cycle.
    """

    cycle_us: float
    step_us: float
    tokens_per_s: float
    bubble: float
    enough_in_flight: int


def steady_state(
    stages: int, stage_us: float, microbatches: int, batch: int, sampling: Sampling
) -> Outcome:
    """Return the steady state of a pipeline with this sampling.

    Args:
        stage_us: Time of each stage for a microbatch, LM head included.
        microbatches: Microbatches in flight.
        batch: Rows of a microbatch.

    Raises:
        InvalidArgument: sampling takes more off the last stage than its time.
    """
    if stage_us + sampling.on_stage_us < 0:
        raise InvalidArgument(f"on_stage_us: expected at least -{stage_us}")
    times = [stage_us] * (stages - 1) + [stage_us + sampling.on_stage_us]
    services = [*times, *sampling.beside_us]
    slowest, loop = max(services), sum(services)
    cycle = max(slowest, loop / microbatches)
    return Outcome(
        cycle_us=cycle,
        step_us=cycle * microbatches,
        tokens_per_s=batch * 1e6 / cycle,
        bubble=1 - sum(times) / (stages * cycle),
        enough_in_flight=math.ceil(loop / slowest - 1e-9),
    )
