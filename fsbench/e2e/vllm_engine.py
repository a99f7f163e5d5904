"""vLLM as an engine of `fsbench e2e`: one process per sampler, all up at once, decoding in turn.

Each process (fsbench.e2e.vllm_worker) has an engine of its own with the same model, because which
sampler draws is decided when vLLM starts. All share the GPUs' memory; while one decodes, the others
wait for requests and leave the GPUs alone. Starting takes a minute or so for all together; then
samplers can be interleaved as finely as in one process.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from fsbench.e2e.measure import DecodePlan
from fsbench.e2e.models import Decoder, check_kind
from fsbench.e2e.records import Decoded, Profile
from fsbench.errors import EngineFailed, EngineUnavailable
from fsbench.integrations.draw import check_sampler, sampler_labels, unavailable_reason
from fsbench.integrations.vllm import DRAFTS, MARKS, SUPPORTED, SWITCH, check_version
from fsbench.machine.packages import package_version

WITH_FLASHINFER = "vllm-flashinfer"
VLLM_SAMPLERS = {"vllm": "vLLM's own sampler", WITH_FLASHINFER: "vLLM's own, FlashInfer's filters"}
"""Names of vLLM's own sampler -> labels: as it is by default or as the environment has it, and with
FlashInfer's filters, whatever the environment says of them."""

_START_S, _ANSWER_S = 540.0, 300.0


class Vllm:
    """See Engine.

    Args:
        logs: the folder for what the engines print, one file per sampler.
        memory: part of a GPU's memory for all engines together.

    Raises:
        EngineUnavailable: vLLM is not installed; EngineMismatch: it is of another version.
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
            check_kind(kind)

    def label(self, sampler: str) -> tuple[str, bool]:
        if sampler in VLLM_SAMPLERS:
            return VLLM_SAMPLERS[sampler], False
        check_sampler(sampler)
        return sampler_labels()[sampler]

    def missing(self, sampler: str) -> str | None:
        if sampler == WITH_FLASHINFER and package_version("flashinfer-python") is None:
            return "package flashinfer is not installed"
        return None if sampler in VLLM_SAMPLERS else unavailable_reason(sampler, self.device)

    def open(self, plan: DecodePlan, decoder: Decoder, tp: int, samplers: Sequence[str]) -> Engines:
        return Engines(plan, decoder, tp, samplers, self._logs, self._memory)


class Engines:
    """See Session: one process per sampler. One that does not come up fails when it is asked."""

    def __init__(
        self,
        plan: DecodePlan,
        decoder: Decoder,
        tp: int,
        samplers: Sequence[str],
        logs: Path,
        memory: float,
    ):
        self._folder = tempfile.TemporaryDirectory(prefix="fsbench-e2e-")
        self._processes: dict[str, EngineProcess] = {}
        self._lost: dict[str, EngineFailed] = {}
        positions = plan.prompt_tokens + plan.output_tokens + plan.drafts
        try:
            for name in samplers:  # all at once: they load and compile at the same time
                folder = Path(self._folder.name) / name
                folder.mkdir()
                config = json.dumps(decoder.config(plan.dtype, positions), indent=2)
                (folder / "config.json").write_text(config, encoding="utf-8")
                log = logs / f"vllm-{decoder.name}-tp{tp}-{name}.log"
                drafts = None
                if plan.drafts:
                    (folder / "drafter").mkdir()
                    config = json.dumps(decoder.drafter_config(plan.dtype, positions), indent=2)
                    (folder / "drafter" / "config.json").write_text(config, encoding="utf-8")
                    of_drafter = {"method": "eagle", "model": str(folder / "drafter")}
                    drafts = {**of_drafter, "num_speculative_tokens": plan.drafts}
                environment = engine_environment(name, plan.drafts > 0)
                process = self._processes[name] = EngineProcess(environment, log)
                process.send(
                    {
                        "do": "start",
                        "folder": str(folder),
                        "tp": tp,
                        "batches": list(plan.batches),
                        "prompt_tokens": plan.prompt_tokens,
                        "output_tokens": plan.output_tokens,
                        "dtype": plan.dtype,
                        "seed": plan.seed,
                        "kv_bytes": cache_bytes(plan, decoder, tp),
                        "memory": round(memory / len(samplers), 3),
                        "vocabulary": decoder.V,
                        "drafts": drafts,
                    }
                )
            for name, process in self._processes.items():
                try:
                    process.receive(_START_S)
                    process.pin()
                except EngineFailed as error:
                    self._lost[name] = error
                    process.stop(seconds=5)
        except BaseException:
            self.close()
            raise

    def prepare(self, sampler: str, B: int, requests: str) -> None:
        self.decode(sampler, B, requests)

    def decode(self, sampler: str, B: int, requests: str) -> Decoded:
        return Decoded(**self._ask(sampler, do="decode", b=B, requests=requests))

    def profile(self, sampler: str, B: int, requests: str) -> Profile:
        return Profile(**self._ask(sampler, do="profile", b=B, requests=requests))

    def counts(self, sampler: str) -> dict[str, Any] | None:
        if sampler in self._lost:
            return None
        found: dict[str, Any] | None = self._ask(sampler, do="counts")
        return found

    def close(self) -> None:
        for name, process in self._processes.items():
            if name not in self._lost:
                process.stop()
        self._folder.cleanup()

    def _ask(self, sampler: str, **request: Any) -> Any:
        if sampler in self._lost:
            raise self._lost[sampler]
        process = self._processes[sampler]
        process.send(request)
        return process.receive(_ANSWER_S)


def cache_bytes(plan: DecodePlan, decoder: Decoder, tp: int) -> int:
    """Of keys and values on one GPU, with room for half as many tokens again as are needed."""
    tokens = max(plan.batches) * (plan.prompt_tokens + plan.output_tokens + plan.drafts)
    size = 4 if plan.dtype == "float32" else 2
    layers = decoder.layers + (plan.drafts > 0)
    one = 2 * layers * max(1, decoder.kv_heads // tp) * decoder.head_dim * size
    return one * tokens * 3 // 2 + (64 << 20)


def engine_environment(sampler: str, drafts: bool = False) -> dict[str, str]:
    """Variables of an engine's process: the same for all samplers, but for which one draws."""
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
    """A child that answers lines of JSON. What it prints besides goes to the file `log`."""

    def __init__(
        self,
        environment: dict[str, str],
        log: Path,
        command: Sequence[str] = (sys.executable, "-m", "fsbench.e2e.vllm_worker"),
    ):
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            self._child = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
                env=environment,
                start_new_session=True,  # so that the engine's own processes can be ended with it
            )
        self._left = b""

    def send(self, request: dict[str, Any]) -> None:
        """Raises EngineFailed if the child is gone."""
        pipe: IO[bytes] | None = self._child.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise self._failed("it has ended") from error

    def receive(self, seconds: float) -> Any:
        """What the child answers. Raises EngineFailed: an error, the end, or nothing in time."""
        answer = json.loads(self._line(time.monotonic() + seconds, seconds))
        if "error" in answer:
            raise self._failed(answer["error"])
        return answer["ok"]

    def pin(self) -> None:
        """Give the engine's processes their cores, and say in the log which."""
        cores = pin(self._child.pid)
        with self._log.open("a", encoding="utf-8") as file:
            file.write(f"fsbench: cores {cores or 'not pinned: fewer than processes'}\n")

    def stop(self, seconds: float = 30.0) -> None:
        """Let the child end; kill it if it does not."""
        try:
            self.send({"do": "stop"})
            self.receive(seconds)
            self._child.wait(seconds)
        except (EngineFailed, subprocess.TimeoutExpired):
            pass
        finally:
            self._kill()
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()

    def _line(self, until: float, seconds: float) -> bytes:
        pipe = self._child.stdout
        assert pipe is not None
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._left:
                if not selector.select(max(0.0, until - time.monotonic())):
                    self._kill()  # its answer, if it came, would be taken for another's
                    raise self._failed(f"no answer in {seconds:g} s")
                part = os.read(pipe.fileno(), 65536)
                if not part:
                    raise self._failed("it has ended")
                self._left += part
        line, _, self._left = self._left.partition(b"\n")
        return line

    def _kill(self) -> None:
        """End the child and all that it started, if it still runs."""
        if self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()

    def _failed(self, what: str) -> EngineFailed:
        try:
            last = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
        except OSError:
            last = []
        text = f"{what}; {self._log}: {' / '.join(last)}"
        return EngineFailed("vllm: " + " ".join(text.split())[:600])


def family(pid: int) -> list[int]:
    """A process and all that it started, as far as they live, in the order of their ids."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*"):
            try:
                found += map(int, (task / "children").read_text().split())
            except OSError:  # it has ended
                continue
    return [pid, *sorted(found[1:])]


def shares(cores: Sequence[int], processes: int) -> list[list[int]]:
    """Cores of each process: as many for each, neighbors. [] if there is less than one each."""
    each = len(cores) // processes
    if not each:
        return []
    return [list(cores[i * each : (i + 1) * each]) for i in range(processes)]


def pin(pid: int) -> list[list[int]]:
    """Give each process of a family cores of its own, of those that this process may use.

    All threads of a process get them. Returns the cores, in the order of `family`; [] if there are
    too few, or none can be given.
    """
    if not hasattr(os, "sched_setaffinity"):
        return []
    processes = family(pid)
    given = shares(sorted(os.sched_getaffinity(0)), len(processes))
    for process, cores in zip(processes, given, strict=False):
        for task in Path(f"/proc/{process}/task").glob("*"):
            try:
                os.sched_setaffinity(int(task.name), cores)
            except ProcessLookupError:  # a thread that has ended
                continue
    return given
