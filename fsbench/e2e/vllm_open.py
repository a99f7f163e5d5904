"""vLLM's asynchronous engine, to which requests come by themselves. Imports vLLM, which prints."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from fsbench.e2e.arrivals import arrival_times, open_loop
from fsbench.e2e.records import Served
from fsbench.e2e.requests import parameters


class Opened:
    """An engine that is up, as an API server has it. settings: of AsyncEngineArgs."""

    def __init__(
        self,
        settings: dict[str, Any],
        vocabulary: int,
        prompt_tokens: int,
        output_tokens: int,
        seed: int,
    ):
        self._vocabulary, self._seed = vocabulary, seed
        self._prompt_tokens, self._output_tokens = prompt_tokens, output_tokens
        self._sent = 0
        self._loop = asyncio.new_event_loop()  # the engine keeps a task in it
        self._engine = self._loop.run_until_complete(self._start(settings))

    async def _start(self, settings: dict[str, Any]) -> Any:
        # It takes no dict for a profiler's settings, as LLM does, and logs where LLM does not.
        kept = {name: value for name, value in settings.items() if name != "profiler_config"}
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**kept, disable_log_stats=True))

    def arrive(self, rate: float, number: int, run_seed: int, requests: str) -> Served:
        """See Arriving.arrive. run_seed decides when they arrive; prompts are always the same."""
        words = random.Random(self._seed)
        prompts = [
            [words.randrange(self._vocabulary) for _ in range(self._prompt_tokens)]
            for _ in range(number)
        ]

        async def ask(row: int) -> AsyncIterator[int]:
            self._sent += 1
            given = SamplingParams(
                **parameters(requests, row, self._seed),
                max_tokens=self._output_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = {"prompt_token_ids": prompts[row]}
            async for output in self._engine.generate(prompt, given, str(self._sent)):
                yield len(output.outputs[0].token_ids)

        times = arrival_times(rate, number, run_seed)
        return self._loop.run_until_complete(open_loop(ask, times, self._output_tokens))

    def counts(self) -> dict[str, Any]:
        """Of the first rank."""
        found: dict[str, Any] = self._loop.run_until_complete(
            self._engine.collective_rpc("fsbench_counts")
        )[0]
        return found
