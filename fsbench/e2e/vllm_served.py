"""A process with one vLLM engine and one sampler: `python -m fsbench.e2e.vllm_served PIPE`.

It receives (action, arguments) from the pipe and answers each with ("", result) or (error, None):
`start` makes a ServingEngine, other actions are its methods. It ends with the pipe. The environment
chooses the sampler (fsbench.integrations.vllm) before vLLM is imported.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from fsbench.e2e.models import sampling_parameters
from fsbench.e2e.records import Decoded, Profile
from fsbench.e2e.trace import read_profile
from fsbench.errors import EngineFailed, describe

_FIRST_PROFILED, _PROFILED = 4, 24  # the first step of a profile, and the number of its steps


class ServingEngine:
    """A running engine, whose core is another process, as in serving.

    Args:
        folder: contains config.json.
        tp: number of GPUs.
        batches: batch sizes to decode; CUDA graphs are captured for them.
        kv_bytes: size of the KV cache on each GPU. Set so that engines can start at the same time:
            vLLM would size it by the free memory that it sees.
        memory: fraction of each GPU's memory that has to be free at the start.
        drafts: vLLM's speculative_config, or None.
    """

    def __init__(
        self,
        folder: Path,
        tp: int,
        batches: list[int],
        prompt_tokens: int,
        output_tokens: int,
        dtype: str,
        seed: int,
        kv_bytes: int,
        memory: float,
        vocabulary: int,
        drafts: dict[str, Any] | None = None,
    ):
        self._traces = tempfile.TemporaryDirectory(prefix="fsbench-traces-")
        self._prompt_tokens, self._output_tokens = prompt_tokens, output_tokens
        self._seed, self._vocabulary = seed, vocabulary
        self._requests = 0
        self._drafts = drafts["num_speculative_tokens"] if drafts else 0
        sizes = sorted({*batches, *(b * (1 + self._drafts) for b in batches)})
        settings: dict[str, Any] = dict(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=dtype,
            tensor_parallel_size=tp,
            max_num_seqs=max(batches),
            max_model_len=prompt_tokens + output_tokens + self._drafts,
            gpu_memory_utilization=memory,
            kv_cache_memory_bytes=kv_bytes,
            enable_prefix_caching=False,
            enable_flashinfer_autotune=False,  # its kernels are not used on a dense bf16 model
            seed=seed,
            compilation_config={"cudagraph_capture_sizes": sizes},
            profiler_config={
                "profiler": "torch",
                "torch_profiler_dir": self._traces.name,
                "torch_profiler_with_stack": False,
                "torch_profiler_use_gzip": False,
                "torch_profiler_dump_cuda_time_total": False,
            },
        )
        if drafts:
            settings["speculative_config"] = drafts
        self._llm = LLM(**settings)
        # As vLLM's server does: a collection of all modules takes tenths of a second.
        gc.collect()
        gc.freeze()

    def decode(self, b: int, requests: str) -> Decoded:
        """Decode B requests of a kind, from sending them to the arrival of the last token."""
        begin = time.perf_counter()
        self._send(b, requests, self._output_tokens)
        arrived: dict[str, list[float]] = {}
        deliveries = []
        while self._llm.llm_engine.has_unfinished_requests():
            when, tokens = self._step(arrived)
            if tokens:
                deliveries.append((when, tokens))
        return self._decoded(b, begin, arrived, deliveries)

    def profile(self, b: int, requests: str) -> Profile:
        """Decode and profile a few steps in the middle, on the first rank."""
        traces = Path(self._traces.name)
        before = set(traces.glob("*.pt.trace.json"))
        self._send(b, requests, min(self._output_tokens, 3 * _PROFILED))
        arrived: dict[str, list[float]] = {}
        self._until(arrived, b, _FIRST_PROFILED)
        self._llm.start_profile()
        self._until(arrived, b, _FIRST_PROFILED + _PROFILED)
        self._llm.stop_profile()
        while self._llm.llm_engine.has_unfinished_requests():
            self._step(arrived)
        paths = sorted(set(traces.glob("*.pt.trace.json")) - before)
        if not paths:
            raise EngineFailed(f"vllm: expected a trace of torch.profiler in {traces}; got none")
        profile = read_profile(paths[0])
        for path in paths:  # about 10 MB each
            path.unlink()
        return profile

    def counts(self) -> dict[str, Any] | None:
        """Return the first rank's counters; None if vLLM draws."""
        if not os.environ.get("FSBENCH_VLLM"):
            return None
        counts: dict[str, Any] = self._llm.collective_rpc("fsbench_counts")[0]
        return counts

    def _send(self, b: int, requests: str, output_tokens: int) -> None:
        sizes = self._vocabulary, self._prompt_tokens, output_tokens
        for prompt, parameters in request_batch(requests, b, self._seed, *sizes):
            self._requests += 1
            self._llm.llm_engine.add_request(str(self._requests), prompt, parameters)

    def _step(self, arrived: dict[str, list[float]]) -> tuple[float, int]:
        """Wait for the next delivery, note its time, and return (time, number of tokens)."""
        outputs = self._llm.llm_engine.step()
        now, tokens = time.perf_counter(), 0
        for output in outputs:
            new = len(output.outputs[0].token_ids)
            arrived.setdefault(output.request_id, []).extend([now] * new)
            tokens += new
        return now, tokens

    def _until(self, arrived: dict[str, list[float]], b: int, tokens: int) -> None:
        """Decode until every request has this many tokens, or all are finished."""
        while self._llm.llm_engine.has_unfinished_requests() and (
            len(arrived) < b or min(map(len, arrived.values())) < tokens
        ):
            self._step(arrived)

    def _decoded(
        self,
        b: int,
        begin: float,
        arrived: dict[str, list[float]],
        deliveries: list[tuple[float, int]],
    ) -> Decoded:
        lengths = {len(times) for times in arrived.values()}
        if len(arrived) != b or lengths != {self._output_tokens}:
            raise EngineFailed(
                f"vllm: expected {b} requests of {self._output_tokens} tokens; got "
                f"{len(arrived)} of {sorted(lengths)}"
            )
        # Requests are sent one by one, and the engine begins with the first. All B decode together
        # only between the last one's first token and the first one's last.
        started = max(times[0] for times in arrived.values())
        ended = min(times[-1] for times in arrived.values())
        together = [
            [when for when in times if started <= when <= ended] for times in arrived.values()
        ]
        if min(map(len, together)) < 2:
            raise EngineFailed(
                f"vllm: expected {b} requests to decode together for a while; they did not. "
                "Decode more tokens"
            )
        during = [each for each in deliveries if started < each[0] <= ended]
        times = [started, *(when for when, _ in during)]
        tokens = [count for _, count in during]
        return Decoded(
            self._prompt_tokens,
            self._output_tokens,
            ttft_us=median((times[0] - begin) * 1e6 for times in arrived.values()),
            tpot_us=median((t[-1] - t[0]) * 1e6 / (len(t) - 1) for t in together),
            step_us=[round((b - a) * 1e6, 2) for a, b in pairwise(times)],
            step_tokens=None if set(tokens) <= {b} else tokens,
            accepted=sum(tokens) / (b * len(tokens)) - 1 if self._drafts else None,
        )


def request_batch(
    kind: str, number: int, seed: int, vocabulary: int, prompt_tokens: int, output_tokens: int
) -> list[tuple[dict[str, list[int]], SamplingParams]]:
    """Return (prompt, parameters) of requests of a kind; the prompts follow from the seed alone."""
    words, batch = random.Random(seed), []
    for row in range(number):
        prompt = [words.randrange(vocabulary) for _ in range(prompt_tokens)]
        sampling = SamplingParams(
            **sampling_parameters(kind, row, seed),
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        batch.append(({"prompt_token_ids": prompt}, sampling))
    return batch


def main() -> None:
    """Answer requests until the pipe is closed."""
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    engine: ServingEngine | None = None
    while True:
        try:
            action, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if action == "start":
                engine, result = ServingEngine(**arguments), None
            else:
                result = getattr(engine, action)(**arguments)
            answer = "", result
        except Exception as error:  # the parent process handles it
            answer = describe(error), None
        pipe.send(answer)


if __name__ == "__main__":
    main()
