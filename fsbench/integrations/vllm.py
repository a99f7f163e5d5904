"""flash_sample inside vLLM: a plug-in (entry point `vllm.general_plugins`).

    FSBENCH_VLLM=flash_sample vllm serve ...       (or screened)

It hooks into vLLM's model runner V2, the default for Qwen3 and with VLLM_USE_V2_MODEL_RUNNER=1 for
others:

    load_model                 starts to compile in other processes (compile_ahead); then finds the
                               LM head, and tests whether the model's logits are hidden @ weight.T
                               (with a soft cap) and nothing else (vllm_head)
    _dummy_sampler_run         waits for the kernels, loads them, and captures graphs of the draw,
                               before vLLM measures the memory that remains
    sample                     draws the supported rows (routing, vllm_batch); vLLM draws the others
    compile_or_warm_up_model   resets the counters after warm-up
    shutdown                   logs how many tokens were served, and how many were not, by reason
    reload_weights, load_weights, finish_weight_update, wake_up
                               checks the head before the next draw, and makes copies again, in
                               place if the weight has not moved

A request's noise depends only on its seed and the position of the token that was fed. vllm_0_26
reads and fills vLLM's fields. `LLM.collective_rpc("fsbench_counts")` returns each worker's
counters.

FSBENCH_VLLM_DRAFTS=1 also serves engines with greedy drafts: rows are drawn at every draft and
compared with it (vllm_parts), and the drafter's head and argmax become one launch.

FSBENCH_VLLM_MARKS=1 marks the LM head and the drawing in torch profiles for `fsbench e2e`, also
when vLLM draws.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from fsbench.errors import EngineMismatch, InvalidArgument
from fsbench.integrations import vllm_0_26 as adapter
from fsbench.integrations.draw import DRAW_MARK, MATMUL_MARK, SERVING, sampler_labels
from fsbench.integrations.vllm_0_26 import RUNNER, RUNNER_V1, WORKER
from fsbench.integrations.vllm_batch import Counts
from fsbench.integrations.vllm_expected import check_source, find
from fsbench.integrations.vllm_runner import DRAFTS, RunnerPlugin, call_before, start_compiling
from fsbench.machine.packages import package_version

SWITCH, MARKS = "FSBENCH_VLLM", "FSBENCH_VLLM_MARKS"
"""Environment variables that switch the plug-in on."""
SUPPORTED = adapter.EXPECTED.version
"""The version of vLLM that the plug-in runs in."""

_RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


def register() -> None:
    """Install the hooks that the environment asks for; entry calls this in each process of vLLM.

    Raises:
        InvalidArgument: FSBENCH_VLLM names no sampler.
        EngineMismatch: another version of vLLM, or its source differs from what is expected.
    """
    name = os.environ.get(SWITCH, "")
    marked = os.environ.get(MARKS, "") == "1"
    if name not in ("", *SERVING) and name not in sampler_labels():
        raise InvalidArgument(
            f"{SWITCH}: expected {', '.join(SERVING)} or an exact sampler of `fsbench list`; got "
            f"{name!r}"
        )
    check_version(package_version("vllm"))
    if hasattr(find(RUNNER), "_fsbench"):
        return
    check_source(adapter.EXPECTED)
    copy_variables_to_ray()
    _install(name, marked)


def check_version(version: str | None) -> None:
    """Raise EngineMismatch unless this is the supported version of vLLM."""
    if (version or "").split("+")[0] != SUPPORTED:
        raise EngineMismatch(
            f"vllm: expected version {SUPPORTED}, which the plug-in supports; got {version}. "
            f"pip install vllm=={SUPPORTED}, or unset {SWITCH} and {MARKS} to run without it"
        )


def copy_variables_to_ray() -> None:
    """Let vLLM copy the plug-in's variables to Ray's workers, also on other nodes."""
    names = [name for name in os.environ.get(_RAY, "").split(",") if name]
    os.environ[_RAY] = ",".join(dict.fromkeys([*names, SWITCH, MARKS, DRAFTS]))


def _install(name: str, marked: bool) -> None:
    """Replace methods of vLLM's classes. `name` is the sampler, or '' for vLLM's."""
    runner, runner_v1, worker = find(RUNNER), find(RUNNER_V1), find(WORKER)
    load_model, dummy_run = runner.load_model, runner._dummy_sampler_run
    sample, shutdown = runner.sample, runner.shutdown
    compile_or_warm_up = worker.compile_or_warm_up_model
    mark: Callable[[str], AbstractContextManager[Any]] = record_function if marked else nullcontext

    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        spec = adapter.engine_spec(self, name) if torch.cuda.is_available() else None
        ahead = None if spec is None else start_compiling(spec)
        load_model(self, *args, **kwargs)
        if marked:
            self.model.compute_logits = _marked(self.model.compute_logits)
        self._fsbench = RunnerPlugin(self, name, ahead)

    def warm_up(self: Any, hidden_states: Tensor) -> None:
        dummy_run(self, hidden_states)
        self._fsbench.warm_up(self, hidden_states)

    def draw(self: Any, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        engine_sample = functools.partial(sample, self)
        with mark(DRAW_MARK):
            return self._fsbench.sample(
                self, hidden_states, input_batch, grammar_output, engine_sample
            )

    def end(self: Any) -> None:
        if self._fsbench is not None:
            self._fsbench.end()
        shutdown(self)

    def compiled(self: Any) -> Any:
        times = compile_or_warm_up(self)
        plugin = getattr(self.model_runner, "_fsbench", None)
        if plugin is not None:
            plugin.sampling.counts = Counts()
        return times

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise EngineMismatch(
            f"{SWITCH}: expected vLLM's model runner V2; this engine runs V1. Set "
            "VLLM_USE_V2_MODEL_RUNNER=1, or unset the variable"
        )

    def fsbench_counts(self: Any) -> dict[str, Any]:
        counts: dict[str, Any] = self.model_runner._fsbench.sampling.counts.as_dict()
        return counts

    def weights_change(owner: Any, *_: Any) -> None:
        plugin = getattr(getattr(owner, "model_runner", owner), "_fsbench", None)
        if plugin is not None:
            plugin.weights_change()

    runner._fsbench = None
    runner.load_model, runner._dummy_sampler_run, runner.sample = load, warm_up, draw
    runner.shutdown = end
    runner.reload_weights = call_before(runner.reload_weights, weights_change)
    for method in ("finish_weight_update", "wake_up"):
        setattr(worker, method, call_before(getattr(worker, method), weights_change))
    worker.compile_or_warm_up_model, worker.fsbench_counts = compiled, fsbench_counts
    if name:
        runner_v1.load_model = refuse


def _marked(compute_logits: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(MATMUL_MARK):
            return compute_logits(*args, **kwargs)

    return marked
