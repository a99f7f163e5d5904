"""Requests that arrive one by one, whether or not earlier ones are done, and what they wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from random import Random

import numpy as np

from fsbench.e2e.records import Served
from fsbench.errors import EngineFailed

Ask = Callable[[int], AsyncIterator[int]]
"""Sends request number i; gives the number of new tokens whenever some arrive."""


def arrival_times(rate: float, number: int, seed: int) -> list[float]:
    """Seconds from the start at which requests of a Poisson process arrive, ascending.

    rate: requests per second, on average.
    """
    random = Random(seed)
    times, now = [], 0.0
    for _ in range(number):
        now += random.expovariate(rate)
        times.append(now)
    return times


async def open_loop(ask: Ask, times: Sequence[float], output_tokens: int) -> Served:
    """Send request i at times[i] seconds, and wait until all have their tokens.

    Raises:
        EngineFailed: a request did not get `output_tokens` tokens.
    """
    begin = time.perf_counter()

    async def one(number: int) -> tuple[float, list[float]]:
        await asyncio.sleep(begin + times[number] - time.perf_counter())
        sent, arrived = time.perf_counter() - begin, []
        async for tokens in ask(number):
            arrived += [time.perf_counter() - begin] * tokens
        return sent, arrived

    return served(times, await asyncio.gather(*map(one, range(len(times)))), output_tokens)


def served(
    due: Sequence[float], requests: Sequence[tuple[float, list[float]]], output_tokens: int
) -> Served:
    """The record of requests: (when it was sent, when each of its tokens came), all in seconds.

    A request's times count from when it was due: a client that is late adds to what it waits for.
    """
    lengths = {len(arrived) for _, arrived in requests}
    if lengths != {output_tokens} or output_tokens < 2:
        raise EngineFailed(
            f"expected {output_tokens} tokens, 2 or more, of each request; got {sorted(lengths)}"
        )
    first = np.array([arrived[0] for _, arrived in requests])
    last = np.array([arrived[-1] for _, arrived in requests])
    at = np.array(due)
    sent = np.array([each for each, _ in requests])

    def us(seconds: np.ndarray) -> list[float]:
        return [round(float(each) * 1e6, 1) for each in seconds]

    return Served(
        late_us=us(sent - at),
        ttft_us=us(first - at),
        tpot_us=us((last - first) / (output_tokens - 1)),
        latency_us=us(last - at),
        seconds=float(last.max()),
        output_tokens=output_tokens,
    )
