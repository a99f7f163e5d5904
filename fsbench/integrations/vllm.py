"""flash_sample inside vLLM: a plug-in (entry point `vllm.general_plugins`, see entry.py).

    FSBENCH_VLLM=flash_sample vllm serve ...       (or screened)

It hooks into vLLM's model runner V2, the default for Qwen3 and with VLLM_USE_V2_MODEL_RUNNER=1 for
others:

    load_model                 finds the LM head (vllm_head), and tries whether the model's logits
                               are hidden @ weight.T (with a soft cap) and nothing else
    _dummy_sampler_run         compiles the draw, and captures graphs of it, before vLLM measures
                               what memory is left
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
    FlashSampleDraw,
    HeadDraw,
    Rows,
    known,
    make_draw,
)
from fsbench.integrations.graphed import GraphedDraw, GraphKind, sizes_up_to
from fsbench.integrations.routing import Need
from fsbench.integrations.vllm_batch import BatchSampler, Counts
from fsbench.integrations.vllm_expected import (
    RUNNER,
    RUNNER_V1,
    WORKER,
    check_parts,
    check_source,
    find,
)
from fsbench.integrations.vllm_head import FoundHead, find_draft_head, find_head
from fsbench.machine.packages import package_version

SWITCH, MARKS, DRAFTS = "FSBENCH_VLLM", "FSBENCH_VLLM_MARKS", "FSBENCH_VLLM_DRAFTS"
"""Variables of the environment that switch the plug-in on."""
SUPPORTED = vllm_0_26.EXPECTED.version
"""The version of vLLM that the plug-in runs in."""

_GREEDY = "_greedy_sample_draft"
_RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
_LOG = logging.getLogger("vllm.fsbench")
_WARMED = 1, 16, 32, 64, 128, 192, 256  # one of each bucket that kernels are compiled for


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


class Plugged:
    """The plug-in in one model runner whose model is loaded. All ranks make it together.

    name: the sampler, or '' for vLLM's own.

    Raises:
        EngineMismatch: the runner has not what is read of it.
        InvalidArgument: the sampler cannot take this LM head.
    """

    def __init__(self, adapter: vllm_0_26.Adapter, runner: Any, name: str):
        self._name = name
        self._found: FoundHead | None = None
        self._made: list[HeadDraw] = []  # what draws, without graphs; and drafts of another head
        self._graphs: tuple[int, Tensor] | None = None  # rows of the largest, and a row like theirs
        self._stale = False
        self.sampling = BatchSampler(adapter, None, lacks="vLLM's own")
        if not name:
            return
        if runner.sampler is None:
            self.sampling.lacks = "no sampler on this rank"
            return
        check_parts(adapter.expected, adapter.parts(runner))
        self._watch(runner)
        self._look_up(runner)
        if self._found is None:
            _LOG.info("fsbench: vLLM draws all tokens (%s)", self.sampling.lacks)
            return
        _LOG.info("fsbench: %s draws", name)
        # Copies are made behind the measurement of what the model takes.
        copies = sum(each.extra_bytes for each in self._made)
        runner.model_memory_usage += self._found.copied + copies

    def _look_up(self, runner: Any) -> None:
        """Find the LM head, and draw from it."""
        sampling = self.sampling
        self._found = sampling.draw = None
        self._made = []  # frees copies before others are made
        sampling.generation += 1
        drafts = os.environ.get(DRAFTS) == "1" and self._name in OWN
        if drafts and getattr(runner, "speculator", None) is not None:
            vars(runner.speculator).pop(_GREEDY, None)
        sampling.lacks = sampling.adapter.lacks(runner, drafts) or ""
        found = sampling.lacks or find_head(runner)
        if isinstance(found, str):
            sampling.lacks = found
            return
        self._found, sampling.V = found, found.head.vocab_size
        sampling.draw = make_draw(self._name, found.head)
        self._made = [sampling.draw]
        if runner.speculative_config is not None:
            self._draft(runner)
        if self._graphs is not None:
            self._capture(runner)

    def _draft(self, runner: Any) -> None:
        """Have greedy drafts drawn in one launch over the drafter's head, if it has one."""
        found = find_draft_head(runner)
        if isinstance(found, str):
            _LOG.info("fsbench: vLLM draws the drafts (%s)", found)
            return
        (own, d2t), target = found, self._found
        assert target is not None
        same = d2t is None and own.weight.data_ptr() == target.weight.data_ptr()
        draw = self._made[0] if same else make_draw(self._name, own.head)
        assert isinstance(draw, FlashSampleDraw)
        self._made += [] if same else [draw]

        def greedy(hidden: Tensor) -> Tensor:
            tokens = draw.greedy(hidden)
            return tokens if d2t is None else tokens + d2t[tokens]

        setattr(runner.speculator, _GREEDY, greedy)
        _LOG.info("fsbench: %s draws the drafts", self._name)

    def _watch(self, runner: Any) -> None:
        """Hear of new requests and of new weights."""
        sampler, drafter = runner.sampler, getattr(runner, "speculator", None)
        add = sampler.add_request

        @functools.wraps(add)
        def add_request(*args: Any, **kwargs: Any) -> Any:
            self.sampling.generation += 1
            return add(*args, **kwargs)

        sampler.add_request = add_request
        models: list[Any] = [runner.model, getattr(drafter, "model", None)]
        for model in models:
            load = getattr(model, "load_weights", None)
            if load is not None:
                model.load_weights = _before(load, self.weights_change)

    def weights_change(self) -> None:
        """Look the head up again before the next draw."""
        self._stale = bool(self._name)

    def warm_up(self, runner: Any, hidden: Tensor) -> None:
        """Compile the draw, and capture it, for up to as many rows as hidden [*, D] has."""
        draw = self.sampling.draw
        if draw is None or self._graphs is not None:
            return
        if runner.speculative_config is not None:  # rows of drafts, too
            hidden = hidden.repeat(1 + runner.num_speculative_steps, 1)[: runner.max_num_tokens]
        n, device = len(hidden), hidden.device
        fp32 = hidden.new_ones(n, dtype=torch.float32)  # torch's default dtype may be another
        counters = torch.arange(n, device=device)
        rows = Rows(hidden.contiguous(), fp32, counters, counters)
        draw(rows)
        V = self.sampling.V
        if draw.able & Need.BIAS:  # what takes most memory, so that vLLM leaves it free
            rows = rows._replace(bias=fp32.new_zeros(n, V))
        if draw.able & Need.FILTER:
            k = 20
            top_k = torch.full((n,), k, dtype=torch.int32, device=device)
            top_p, min_p = torch.full_like(fp32, 0.95), torch.zeros_like(fp32)
            rows = rows._replace(filters=(top_k, top_p, min_p))
            # Graphs with filters are made later; by then nobody should wait for a compiler.
            sizes = [(B, False) for B in _WARMED if n >= B]
            sizes += [(B, True) for B in sizes_up_to(n) if draw.screens(B, k)]
            for B, screened in sizes:
                filters = top_k[:B], top_p[:B], min_p[:B]
                plain = hidden[:B].contiguous(), rows.temperature[:B], counters[:B], counters[:B]
                draw(Rows(*plain, filters=filters, screened=screened))
        draw(rows)
        if hidden.is_cuda:
            self._graphs = n, hidden[:1].clone()
            self._capture(runner)

    def _capture(self, runner: Any) -> None:
        draw = self.sampling.draw
        assert draw is not None and self._graphs is not None
        whole = runner.parallel_config.tensor_parallel_size == 1
        graphed = GraphedDraw(draw, *self._graphs, self.sampling.V, lazily=whole)
        graphed.capture_all(GraphKind())
        self.sampling.draw = graphed

    def sample(self, runner: Any, hidden: Tensor, batch: Any, grammar: Any, own: Any) -> Any:
        """See BatchSampler.sample."""
        if self._stale:
            self._stale = False
            if self._found is None or self._found.moved(runner):
                self._look_up(runner)
            else:
                for each in self._made:
                    each.refresh()
        return self.sampling.sample(runner, hidden, batch, grammar, own)


def _install(adapter: vllm_0_26.Adapter, name: str, marked: bool) -> None:
    """Replace the methods of vLLM's classes. `name` is the sampler, or '' for vLLM's own."""
    runner, runner_v1, worker = find(RUNNER), find(RUNNER_V1), find(WORKER)
    load_model, dummy_run = runner.load_model, runner._dummy_sampler_run
    sample, shutdown = runner.sample, runner.shutdown
    compile_or_warm_up = worker.compile_or_warm_up_model
    mark = record_function if marked else _no_mark

    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        load_model(self, *args, **kwargs)
        if marked:
            self.model.compute_logits = _marked(self.model.compute_logits)
        self._fsbench = Plugged(adapter, self, name)

    def warm_up(self: Any, hidden_states: Tensor) -> None:
        dummy_run(self, hidden_states)
        self._fsbench.warm_up(self, hidden_states)

    def draw(self: Any, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        own = functools.partial(sample, self)
        with mark(DRAW_MARK):
            return self._fsbench.sample(self, hidden_states, input_batch, grammar_output, own)

    def end(self: Any) -> None:
        if self._fsbench is not None:
            self._fsbench.sampling.counts.log()
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
    runner.reload_weights = _before(runner.reload_weights, change)
    for method in ("finish_weight_update", "wake_up"):
        setattr(worker, method, _before(getattr(worker, method), change))
    worker.compile_or_warm_up_model, worker.fsbench_counts = compiled, fsbench_counts
    if name:
        runner_v1.load_model = refuse


def _before(method: Callable[..., Any], note: Callable[..., Any]) -> Callable[..., Any]:
    """A method, or a bound one, that is noted first. note: gets self, if the method does."""
    bound = hasattr(method, "__self__")

    @functools.wraps(method)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*(() if bound else args[:1]))
        return method(*args, **kwargs)

    return noted


def _no_mark(name: str) -> AbstractContextManager[Any]:
    return nullcontext()


def _marked(compute_logits: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(MATMUL_MARK):
            return compute_logits(*args, **kwargs)

    return marked
