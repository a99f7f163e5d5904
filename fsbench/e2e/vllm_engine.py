"""vLLM as an engine of `fsbench e2e`: one process per sampler, all started at once.

Each process (fsbench.e2e.vllm_served) has an engine with the same model, because a vLLM process has
one sampler. They share the GPUs' memory. While one decodes, the others wait for requests and leave
the GPUs idle. They start together in about a minute; then samplers take turns as in one process.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch

from fsbench.e2e.measure import DecodePlan
from fsbench.e2e.models import Decoder, request_kinds
from fsbench.e2e.records import Decoded, Profile
from fsbench.errors import EngineFailed, EngineUnavailable, unknown_name
from fsbench.integrations.draw import sampler_label, unavailable_reason
from fsbench.integrations.vllm import DRAFTS, MARKS, SUPPORTED, SWITCH, check_version
from fsbench.machine.packages import package_version
from fsbench.records.disk import write_into

WITH_FLASHINFER = "vllm-flashinfer"
VLLM_SAMPLERS = {"vllm": "vLLM's own sampler", WITH_FLASHINFER: "vLLM's own, FlashInfer's filters"}
"""Names of vLLM's own sampler -> labels: by default or as the environment sets it; and with
FlashInfer's filters in any environment."""

_START_S, _ANSWER_S = 540.0, 300.0


class Vllm:
    """The Engine of `--engine vllm`.

    Args:
        logs: folder for the engines' output, one file per sampler.
        memory: fraction of a GPU's memory for all engines together.

    Raises:
        EngineUnavailable: vLLM is not installed, or device is not cuda.
        EngineMismatch: another version is installed.
    """

    name = "vllm"

    def __init__(self, device: str, logs: Path, memory: float = 0.9):
        version = package_version("vllm")
        if version is None:
            raise EngineUnavailable(
                f"--engine vllm: expected vLLM {SUPPORTED}; it is not installed. "
                f"pip install vllm=={SUPPORTED}"
            )
        check_version(version)
        if device != "cuda":
            raise EngineUnavailable("--engine vllm: expected a GPU; got --device cpu")

        self.device = device
        self.gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        self._logs, self._memory = logs, memory

    def check(self, plan: DecodePlan) -> None:
        for sampler in plan.samplers:
            self.label(sampler)
        for kind in plan.requests:
            if kind not in request_kinds():
                raise unknown_name("requests", kind, request_kinds())

    def label(self, sampler: str) -> tuple[str, bool]:
        if sampler in VLLM_SAMPLERS:
            return VLLM_SAMPLERS[sampler], False
        return sampler_label(sampler)

    def unavailable_reason(self, sampler: str) -> str | None:
        if sampler == WITH_FLASHINFER and package_version("flashinfer-python") is None:
            return "package flashinfer is not installed"
        return None if sampler in VLLM_SAMPLERS else unavailable_reason(sampler, self.device)

    def open(self, plan: DecodePlan, decoder: Decoder, tp: int, samplers: Sequence[str]) -> Engines:
        return Engines(plan, decoder, tp, samplers, self._logs, self._memory)


class Engines:
    """A Session with one process per sampler. One that does not start fails when it is used."""

    def __init__(
        self,
        plan: DecodePlan,
        decoder: Decoder,
        tp: int,
        samplers: Sequence[str],
        logs: Path,
        memory: float,
    ):
        self._processes: dict[str, EngineProcess] = {}
        self._failed: dict[str, EngineFailed] = {}
        try:
            for name in samplers:  # start all first: they load and compile at the same time
                log = logs / f"vllm-{decoder.name}-tp{tp}-{name}.log"
                self._start(name, plan, decoder, tp, log, round(memory / len(samplers), 3))
            for name, process in self._processes.items():
                try:
                    process.receive(_START_S)
                    process.pin()
                except EngineFailed as error:
                    self._failed[name] = error
                    process.stop(seconds=5)
        except BaseException:
            self.close()
            raise

    def _start(
        self, name: str, plan: DecodePlan, decoder: Decoder, tp: int, log: Path, memory: float
    ) -> None:
        """Start a sampler's process; it answers when its engine is ready."""
        positions = plan.prompt_tokens + plan.output_tokens + plan.drafts
        folder = _write_config(name, decoder.config(plan.dtype, positions))
        drafts = None
        if plan.drafts:
            drafter = _write_config(name, decoder.drafter_config(plan.dtype, positions))
            drafts = {
                "method": "eagle",
                "model": str(drafter),
                "num_speculative_tokens": plan.drafts,
            }
        environment = engine_environment(name, plan.drafts > 0)
        process = self._processes[name] = EngineProcess(environment, log)
        process.send(
            "start",
            folder=folder,
            tp=tp,
            batches=list(plan.batches),
            prompt_tokens=plan.prompt_tokens,
            output_tokens=plan.output_tokens,
            dtype=plan.dtype,
            seed=plan.seed,
            kv_bytes=cache_bytes(plan, decoder, tp),
            memory=memory,
            vocabulary=decoder.V,
            drafts=drafts,
        )

    def prepare(self, sampler: str, B: int, requests: str) -> None:
        self.decode(sampler, B, requests)

    def decode(self, sampler: str, B: int, requests: str) -> Decoded:
        decoded: Decoded = self._request(sampler, "decode", b=B, requests=requests)
        return decoded

    def profile(self, sampler: str, B: int, requests: str) -> Profile:
        profile: Profile = self._request(sampler, "profile", b=B, requests=requests)
        return profile

    def counts(self, sampler: str) -> dict[str, Any] | None:
        counts: dict[str, Any] | None = self._request(sampler, "counts")
        return counts

    def close(self) -> None:
        for name, process in self._processes.items():
            if name not in self._failed:
                process.stop()

    def _request(self, sampler: str, action: str, **arguments: Any) -> Any:
        if sampler in self._failed:
            raise self._failed[sampler]
        process = self._processes[sampler]
        process.send(action, **arguments)
        return process.receive(_ANSWER_S)


def _write_config(sampler: str, config: dict[str, Any]) -> Path:
    """Write the config.json of a model for the engine of a sampler; return its folder.

    A model has the same folder in each call, because vLLM's cache of torch.compile depends on it.
    Engines that start together have separate folders, so that each fills a separate cache.
    """
    text = json.dumps(config, indent=2)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "fsbench" / "models" / f"{sampler}-{digest}"
    write_into(folder, {"config.json": text})
    return folder


def cache_bytes(plan: DecodePlan, decoder: Decoder, tp: int) -> int:
    """Return bytes of keys and values on one GPU, for 1.5 times the tokens that are needed."""
    tokens = max(plan.batches) * (plan.prompt_tokens + plan.output_tokens + plan.drafts)
    size = 4 if plan.dtype == "float32" else 2
    layers = decoder.layers + (plan.drafts > 0)
    per_token = 2 * layers * max(1, decoder.kv_heads // tp) * decoder.head_dim * size
    return per_token * tokens * 3 // 2 + (64 << 20)


def engine_environment(sampler: str, drafts: bool = False) -> dict[str, str]:
    """Return the variables of an engine's process, which differ in the sampler only."""
    return {
        **{name: value for name, value in os.environ.items() if name != SWITCH},
        **({} if sampler in VLLM_SAMPLERS else {SWITCH: sampler}),
        **({"VLLM_USE_FLASHINFER_SAMPLER": "1"} if sampler == WITH_FLASHINFER else {}),
        MARKS: "1",
        DRAFTS: str(int(drafts)),
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


class EngineProcess:
    """A worker that answers requests (fsbench.e2e.vllm_served). Its output goes to `log`."""

    def __init__(self, environment: dict[str, str], log: Path):
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._pipe, end = Pipe()
        with end, log.open("a", encoding="utf-8") as file:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "fsbench.e2e.vllm_served", str(end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                pass_fds=[end.fileno()],
                start_new_session=True,  # so that the engine's processes can be killed with it
            )

    def send(self, action: str, **arguments: Any) -> None:
        """Send a request; raise EngineFailed if the child has ended."""
        try:
            self._pipe.send((action, arguments))
        except OSError as error:
            raise self._error("the process has ended") from error

    def receive(self, seconds: float) -> Any:
        """Return the answer; raise EngineFailed for an error, the child's end, or a timeout."""
        try:
            if not self._pipe.poll(seconds):
                self._kill()  # a late answer would be taken for the next request's
                raise self._error(f"no answer in {seconds:g} s")
            error, answer = self._pipe.recv()
        except (EOFError, OSError) as ended:
            raise self._error("the process has ended") from ended
        if error:
            raise self._error(error)
        return answer

    def pin(self) -> None:
        """Pin the engine's processes to cores, and log which."""
        cores = pin(self._child.pid)
        with self._log.open("a", encoding="utf-8") as file:
            file.write(f"fsbench: cores {cores or 'not pinned: fewer than processes'}\n")

    def stop(self, seconds: float = 30.0) -> None:
        """Let the child end; kill it if it does not."""
        self._pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(seconds)
        self._kill()

    def _kill(self) -> None:
        """Kill the child and the processes that it started, if it still runs."""
        if self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()

    def _error(self, reason: str) -> EngineFailed:
        try:
            last = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
        except OSError:
            last = []
        text = f"{reason}; {self._log}: {' / '.join(last)}"
        return EngineFailed("vllm: " + " ".join(text.split())[:600])


def descendants(pid: int) -> list[int]:
    """Return a process and its living descendants, in the order of their ids."""
    processes = [pid]
    for process in processes:
        for task in Path(f"/proc/{process}/task").glob("*"):
            with suppress(OSError):  # it has ended
                processes += map(int, (task / "children").read_text().split())
    return [pid, *sorted(processes[1:])]


def pin(pid: int) -> list[list[int]]:
    """Pin each descendant of a process, with all its threads, to separate cores.

    Returns:
        Neighboring cores for each process in the order of `descendants`, out of those that this
        process may use; [] if there are too few.
    """
    processes, cores = descendants(pid), sorted(os.sched_getaffinity(0))
    size = len(cores) // len(processes)
    shares = [cores[i * size : (i + 1) * size] for i in range(len(processes))] if size else []
    for process, share in zip(processes, shares, strict=False):
        for task in Path(f"/proc/{process}/task").glob("*"):
            with suppress(ProcessLookupError):  # a thread that has ended
                os.sched_setaffinity(int(task.name), share)
    return shares
