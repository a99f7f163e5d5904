"""flash_sample inside vLLM: a plug-in (entry point `vllm.general_plugins`, see entry.py).

    FSBENCH_VLLM=flash_sample vllm serve ...       (or screened)

It hooks into vLLM's model runner V2, the default for Qwen3 and with VLLM_USE_V2_MODEL_RUNNER=1 for
others:

    load_model                 starts to compile in other processes (compile_ahead); then finds the
                               LM head (vllm_head), and tries whether the model's logits are
                               hidden @ weight.T (with a soft cap) and nothing else
    _dummy_sampler_run         waits for the kernels, loads them, and captures graphs of the draw,
                               before vLLM measures what memory is left
    sample                     draws the rows that can be drawn (routing, vllm_batch); vLLM draws
                               the others
    compile_or_warm_up_model   forgets what warm-up has counted
    shutdown                   logs how many tokens were served, and how many left, and why
    reload_weights, load_weights, finish_weight_update, wake_up
                               the head is looked up again before the next draw, and what is kept
                               beside it is made anew, in place where the head is where it was

A request's noise is a function of its seed and the position of the token that was fed, and of
nothing else. Fields of vLLM are read and filled by the adapter of its version (vllm_0_26).
`LLM.collective_rpc("fsbench_counts")` returns each worker's counters.

With FSBENCH_VLLM_DRAFTS=1 engines with greedy drafts are served, too: rows are drawn at every draft
and compared with it (vllm_parts), and the drafter's head and argmax become one launch.

With FSBENCH_VLLM_MARKS=1 the LM head and the drawing are marked in torch profiles (also when vLLM
draws itself), for `fsbench e2e`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from fsbench.errors import EngineMismatch, InvalidArgument
from fsbench.integrations import vllm_0_26
from fsbench.integrations.draw import (
    DRAW_MARK,
    MATMUL_MARK,
    OWN,
    known,
)
from fsbench.integrations.vllm_batch import Counts
from fsbench.integrations.vllm_expected import (
    RUNNER,
    RUNNER_V1,
    WORKER,
    check_source,
    find,
)
from fsbench.integrations.vllm_runner import DRAFTS, Plugged, before, start_compiling
from fsbench.machine.packages import package_version

SWITCH, MARKS = "FSBENCH_VLLM", "FSBENCH_VLLM_MARKS"
"""Variables of the environment that switch the plug-in on."""
SUPPORTED = vllm_0_26.EXPECTED.version
"""The version of vLLM that the plug-in runs in."""

_RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
_LOG = logging.getLogger("vllm.fsbench")


def register() -> None:
    """Called by vLLM in each of its processes. Does nothing unless switched on.

    Raises:
        InvalidArgument: FSBENCH_VLLM names no sampler.
        EngineMismatch: another version of vLLM, or one whose source is not as expected.
    """
    name = os.environ.get(SWITCH, "")
    marked = os.environ.get(MARKS, "") == "1"
    if not name and not marked:
        return
    if name not in ("", *OWN) and name not in known():
        raise InvalidArgument(
            f"{SWITCH}: expected {', '.join(OWN)} or an exact sampler of `fsbench list`; got "
            f"{name!r}"
        )
    adapter = adapter_of(package_version("vllm"))
    runner = find(RUNNER)
    if hasattr(runner, "_fsbench"):
        return
    check_source(adapter.expected)
    carry_to_ray()
    _install(adapter, name, marked)


def adapter_of(version: str | None) -> vllm_0_26.Adapter:
    """Return the adapter of a version of vLLM.

    Raises:
        EngineMismatch: it is not the supported version.
    """
    if (version or "").split("+")[0] != SUPPORTED:
        raise EngineMismatch(
            f"vllm: expected version {SUPPORTED}, which the plug-in supports; got {version}. "
            f"pip install vllm=={SUPPORTED}, or unset {SWITCH} and {MARKS} to run without it"
        )
    return vllm_0_26.Adapter()


def carry_to_ray() -> None:
    """Have vLLM copy the plug-in's variables to Ray's workers, on other nodes too."""
    names = [each for each in os.environ.get(_RAY, "").split(",") if each]
    os.environ[_RAY] = ",".join(dict.fromkeys([*names, SWITCH, MARKS, DRAFTS]))


def _install(adapter: vllm_0_26.Adapter, name: str, marked: bool) -> None:
    """Replace the methods of vLLM's classes. `name` is the sampler, or '' for vLLM's own."""
    runner, runner_v1, worker = find(RUNNER), find(RUNNER_V1), find(WORKER)
    load_model, dummy_run = runner.load_model, runner._dummy_sampler_run
    sample, shutdown = runner.sample, runner.shutdown
    compile_or_warm_up = worker.compile_or_warm_up_model
    mark = record_function if marked else _no_mark

    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        spec = adapter.engine_spec(self, name) if torch.cuda.is_available() else None
        ahead = None if spec is None else start_compiling(spec)
        load_model(self, *args, **kwargs)
        if marked:
            self.model.compute_logits = _marked(self.model.compute_logits)
        self._fsbench = Plugged(adapter, self, name, ahead)

    def warm_up(self: Any, hidden_states: Tensor) -> None:
        dummy_run(self, hidden_states)
        self._fsbench.warm_up(self, hidden_states)

    def draw(self: Any, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        own = functools.partial(sample, self)
        with mark(DRAW_MARK):
            return self._fsbench.sample(self, hidden_states, input_batch, grammar_output, own)

    def end(self: Any) -> None:
        if self._fsbench is not None:
            self._fsbench.end()
        shutdown(self)

    def compiled(self: Any) -> Any:
        times = compile_or_warm_up(self)
        plugged = getattr(self.model_runner, "_fsbench", None)
        if plugged is not None:
            plugged.sampling.counts = Counts()
        return times

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise EngineMismatch(
            f"{SWITCH}: expected vLLM's model runner V2; this engine runs V1. Set "
            "VLLM_USE_V2_MODEL_RUNNER=1, or unset the variable"
        )

    def fsbench_counts(self: Any) -> dict[str, Any]:
        counts: dict[str, Any] = self.model_runner._fsbench.sampling.counts.as_dict()
        return counts

    def change(of: Any) -> None:
        plugged = getattr(getattr(of, "model_runner", of), "_fsbench", None)
        if plugged is not None:
            plugged.weights_change()

    runner._fsbench = None
    runner.load_model, runner._dummy_sampler_run, runner.sample = load, warm_up, draw
    runner.shutdown = end
    runner.reload_weights = before(runner.reload_weights, change)
    for method in ("finish_weight_update", "wake_up"):
        setattr(worker, method, before(getattr(worker, method), change))
    worker.compile_or_warm_up_model, worker.fsbench_counts = compiled, fsbench_counts
    if name:
        runner_v1.load_model = refuse


def _no_mark(name: str) -> AbstractContextManager[Any]:
    return nullcontext()


def _marked(compute_logits: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(MATMUL_MARK):
            return compute_logits(*args, **kwargs)

    return marked
