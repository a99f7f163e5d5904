"""Serve requests of the model in a folder, on a number of GPUs, in another process.

    python serve_ranks.py FOLDER GPUS ANSWER.json

`differences` compares the answers of two such processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

ROWS, AT_ONCE = 24, 8
SEEDED = {"seed": 0}  # replaced by the request's number
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "seeded": {"temperature": 0.7, **SEEDED},
    "greedy": {"temperature": 0.0},
    "presence": {"temperature": 1.0, "presence_penalty": 0.5, **SEEDED},
    "bias": {"temperature": 1.0, "logit_bias": {5: 3.0, 20000: 4.0}, **SEEDED},
    "allowed": {"temperature": 1.0, "allowed_token_ids": [3, 10100, 20000], **SEEDED},
    "logprobs": {"temperature": 1.0, "logprobs": 0, **SEEDED},
    "greedy top logprobs": {"temperature": 0.0, "logprobs": 2},
    "top logprobs": {"temperature": 1.0, "logprobs": 2, **SEEDED},
    "filters": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, **SEEDED},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.2, **SEEDED},
    "tempered logprobs": {"temperature": 0.7, "logprobs": 0, **SEEDED},
}
"""Kind of request -> its sampling parameters."""
UNSERVED = {
    "filters": "top-k, top-p, min-p",
    "repetition": "repetition penalty",
    "tempered logprobs": "logprobs of another distribution",
}
"""Kinds that vLLM samples on several GPUs -> the reason in the counters."""
BATCHES = {"simple": ("plain", "seeded", "greedy"), "mixed": tuple(KINDS)}
"""Name of a call -> kinds of its requests. Draws without a bias are replayed as CUDA graphs."""

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
"""Variables that keep every library from making NVLink multicast objects, which belong to the
host."""

Answer = dict[str, Any]
"""tokens, cumulative, logprobs: {token: (log-probability, rank)} of each position, or None."""


class Server:
    """A process that serves all requests on some GPUs and ends."""

    def __init__(self, folder: Path, gpus: int, answers: Path):
        self._log, self._answers, self.gpus = answers.with_suffix(".log"), answers, gpus
        environment = {
            **os.environ,
            **NO_MULTICAST,
            "FSBENCH_VLLM": "flash_sample",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(folder), str(gpus), str(answers)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # so that the engine's processes can be killed with it
            )

    def result(self, seconds: float) -> dict[str, Any]:
        """Return {call: its answers}, and what each rank counted meanwhile as `counts`."""
        try:
            code: int | None = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        self.stop()
        if code != 0 or not self._answers.exists():
            log = self._log.read_text(errors="replace")[-6000:]
            raise AssertionError(f"{self.gpus} GPUs: exit code {code}\n{log}")
        result: dict[str, Any] = json.loads(self._answers.read_text())
        return result

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Kill the process and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def kind_of(call: str, row: int) -> str:
    return BATCHES[call][row % len(BATCHES[call])]


def length_of(row: int) -> int:
    """Return the number of tokens that a request decodes."""
    return 6 + row % 5


def settings_of(call: str, row: int) -> dict[str, Any]:
    """Return arguments of vLLM's SamplingParams."""
    settings = dict(KINDS[kind_of(call, row)])
    if "seed" in settings:
        settings["seed"] = row
    return settings | {"max_tokens": length_of(row), "ignore_eos": True, "detokenize": False}


def prompt_of(row: int, vocabulary: int) -> list[int]:
    return [(7919 * row + 4001 * i) % vocabulary for i in range(2 + row % 5)]


def differences(one: list[Answer], other: list[Answer], call: str) -> list[str]:
    """Compare the answers of two engines, but for kinds that vLLM samples on several GPUs.

    Log-probabilities of sampled tokens are those of the plug-in in both engines. Those of further
    tokens are vLLM's on several GPUs, from logits that are rounded to bf16.
    """
    mismatches = []
    for row, (a, b) in enumerate(zip(one, other, strict=True)):
        kind = kind_of(call, row)
        if kind in UNSERVED:
            continue
        where = f"{call} {row} ({kind})"
        if a["tokens"] != b["tokens"]:
            mismatches.append(f"{where}: tokens {a['tokens']} and {b['tokens']}")
            continue
        if (a["logprobs"] is None) != (b["logprobs"] is None):
            mismatches.append(f"{where}: log-probabilities in one answer")
        if a["logprobs"] is None or b["logprobs"] is None:
            continue
        if abs(a["cumulative"] - b["cumulative"]) > 1e-3:
            mismatches.append(f"{where}: sums {a['cumulative']} and {b['cumulative']}")
        n = max(1, KINDS[kind]["logprobs"])
        for position, (x, y) in enumerate(zip(a["logprobs"], b["logprobs"], strict=True)):
            # A tie in bf16 may exchange which tokens are listed, but hardly changes the values.
            largest = [sorted(v for v, _ in each.values())[-n:] for each in (x, y)]
            pairs = list(zip(*largest, strict=False))
            if len(pairs) < n or any(abs(v - w) > 0.05 for v, w in pairs):
                mismatches.append(f"{where}, position {position}: {x} and {y}")
    return mismatches


def main() -> None:
    """Serve all requests and write the answers."""
    folder, gpus, path = sys.argv[1:]
    from vllm import LLM

    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        tensor_parallel_size=int(gpus),
        max_num_seqs=AT_ONCE,
        max_model_len=128,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=False,
        enable_flashinfer_autotune=False,
        # Without torch.compile the norm is the same kernel with one GPU and with several.
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8],
        },
    )
    wait_for_kernels(llm)
    before = llm.collective_rpc("fsbench_counts")
    result: dict[str, Any] = {}
    for call in BATCHES:
        result[call] = [answer(output.outputs[0]) for output in serve(llm, call)]
    after = llm.collective_rpc("fsbench_counts")
    result["counts"] = list(map(difference, before, after))
    Path(path).write_text(json.dumps(result))


def serve(llm: Any, call: str, **more: Any) -> list[Any]:
    """Return vLLM's outputs for the requests of a call. more: settings for all of them."""
    from vllm import SamplingParams

    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    outputs: list[Any] = llm.generate(
        [{"prompt_token_ids": prompt_of(row, vocabulary)} for row in range(ROWS)],
        [SamplingParams(**{**settings_of(call, row), **more}) for row in range(ROWS)],
        use_tqdm=False,
    )
    return outputs


def wait_for_kernels(llm: Any) -> None:
    """Serve requests until none is left to vLLM because its kernels are being compiled.

    They have seeds: the seeds of requests without one depend on how many such requests came before.
    """
    from fsbench.integrations.vllm_batch import NOT_COMPILED

    passes = 0
    for _ in range(40):
        before = llm.collective_rpc("fsbench_counts")
        for call in BATCHES:
            serve(llm, call, seed=0)
        after = llm.collective_rpc("fsbench_counts")
        waiting = any(
            NOT_COMPILED in difference(*pair)["left"] for pair in zip(before, after, strict=True)
        )
        passes = 0 if waiting else passes + 1
        if passes == 2:  # the batches of two passes may differ
            return
        time.sleep(2 if waiting else 0)


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the rows that were counted between two readings of a rank's counters."""
    unserved = Counter(after["left"])
    unserved.subtract(before["left"])
    return {
        "served": after["served"] - before["served"],
        "left": {reason: number for reason, number in unserved.items() if number},
    }


def answer(completion: Any) -> Answer:
    """Return the parts of vLLM's CompletionOutput that are compared."""
    logprobs = completion.logprobs
    return {
        "tokens": list(completion.token_ids),
        "cumulative": completion.cumulative_logprob,
        "logprobs": None
        if logprobs is None
        else [
            {str(token): (each.logprob, each.rank) for token, each in position.items()}
            for position in logprobs
        ],
    }


if __name__ == "__main__":
    main()
