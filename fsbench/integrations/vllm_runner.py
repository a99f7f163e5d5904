"""The plug-in in one model runner of vLLM: find the LM head, load kernels, draw."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from fsbench.errors import one_line
from fsbench.integrations import vllm_0_26 as adapter
from fsbench.integrations.compile_ahead import (
    CompileAhead,
    EngineSpec,
    ensure_cache,
    triton_cache,
)
from fsbench.integrations.draw import SERVING, FlashSampleDraw, ProviderDraw, make_draw
from fsbench.integrations.draw_kinds import SIZES, DrawKind, served_kinds, warm
from fsbench.integrations.graphed import GraphedDraw
from fsbench.integrations.routing import SCREENED
from fsbench.integrations.vllm_batch import BatchSampler
from fsbench.integrations.vllm_expected import check_parts
from fsbench.integrations.vllm_head import LoadedHead, find_draft_head, find_head
from fsbench.integrations.vllm_parts import EngineSample
from fsbench.kernels import verify_drafts

DRAFTS = "FSBENCH_VLLM_DRAFTS"
"""Environment variable that also serves engines with drafts."""
WAIT_S = 10.0
"""Longest time that a start waits for kinds of draws that few requests need."""
_GREEDY = "_greedy_sample_draft"
_LOG = logging.getLogger("vllm.fsbench")


class RunnerPlugin:
    """The plug-in in one model runner whose model is loaded. Made by all ranks together.

    Args:
        runner: vLLM's GPUModelRunner.
        name: the sampler, or '' for vLLM's.
        ahead: processes that compile its kernels, or None.

    Raises:
        EngineMismatch: the runner lacks an attribute that is used.
        InvalidArgument: the sampler cannot take this LM head.
    """

    def __init__(self, runner: Any, name: str, ahead: CompileAhead | None = None):
        self._name, self._ahead = name, ahead
        self._uncompiled: list[DrawKind] = []  # kinds that vLLM draws until they are compiled
        self._head: LoadedHead | None = None
        # Of the target's head, and of a drafter's; without graphs.
        self._draws: list[FlashSampleDraw | ProviderDraw] = []
        self._graphs: tuple[int, Tensor] | None = None  # largest size, a row of their dtype
        self._weights_changed = self._has_failed = False
        self._warm_rows: Tensor | None = None  # hidden states to load kernels with
        self.sampling = BatchSampler(disabled_reason="vLLM's own", is_ready=self.is_ready)
        if not name:
            return
        if runner.sampler is None:
            self.sampling.disabled_reason = "no sampler on this rank"
            return
        check_parts(adapter.EXPECTED, adapter.parts(runner))
        self._hook(runner)
        self._find_heads(runner)
        if self._head is None:
            _LOG.info("fsbench: vLLM draws all tokens (%s)", self.sampling.disabled_reason)
            return
        _LOG.info("fsbench: %s draws", name)
        self._compile_for(self._head)
        # vLLM has measured the model's memory already; copies of the head come on top.
        copies = sum(draw.extra_bytes for draw in self._draws)
        runner.model_memory_usage += self._head.copied_bytes + copies

    def _find_heads(self, runner: Any) -> None:
        """Find the LM head, and the drafter's, and make draws from them."""
        sampling = self.sampling
        self._head = sampling.draw = None
        self._draws = []  # frees copies before new ones are made
        sampling.generation += 1
        drafts = os.environ.get(DRAFTS) == "1" and self._name in SERVING
        if drafts and getattr(runner, "speculator", None) is not None:
            # The function of an earlier call, which draws from the old head.
            vars(runner.speculator).pop(_GREEDY, None)
        sampling.disabled_reason = adapter.unsupported_reason(runner, drafts) or ""
        head = sampling.disabled_reason or find_head(runner)
        if isinstance(head, str):
            sampling.disabled_reason = head
            return
        self._head, sampling.V = head, head.head.vocab_size
        sampling.draw = make_draw(self._name, head.head)
        self._draws = [sampling.draw]
        if runner.speculative_config is not None:
            self._replace_drafting(runner, head)
        if self._graphs is not None:
            self._capture(runner)

    def _replace_drafting(self, runner: Any, target: LoadedHead) -> None:
        """Draw greedy drafts in one launch over the drafter's head, if that is supported."""
        result = find_draft_head(runner)
        if isinstance(result, str):
            _LOG.info("fsbench: vLLM draws the drafts (%s)", result)
            return
        drafter, d2t = result
        shared = d2t is None and drafter.weight.data_ptr() == target.weight.data_ptr()
        draw = self._draws[0] if shared else make_draw(self._name, drafter.head)
        assert isinstance(draw, FlashSampleDraw)
        self._draws += [] if shared else [draw]

        def greedy(hidden: Tensor) -> Tensor:
            tokens = draw.greedy(hidden)
            return tokens if d2t is None else tokens + d2t[tokens]

        setattr(runner.speculator, _GREEDY, greedy)
        _LOG.info("fsbench: %s draws the drafts", self._name)

    def _hook(self, runner: Any) -> None:
        """Note new requests and new weights."""
        sampler = runner.sampler
        drafter: Any = getattr(runner, "speculator", None)
        models: list[Any] = [runner.model, getattr(drafter, "model", None)]

        def add(*_: Any) -> None:
            self.sampling.generation += 1

        sampler.add_request = call_before(sampler.add_request, add)
        for model in models:
            load = getattr(model, "load_weights", None)
            if load is not None:
                model.load_weights = call_before(load, self.weights_change)

    def weights_change(self, *_: Any) -> None:
        """Check the head before the next draw."""
        self._weights_changed = bool(self._name)

    def _compile_for(self, loaded: LoadedHead) -> None:
        """Start compiling for the loaded head if it is not the one that was expected."""
        if self._ahead is None:
            return
        expected = self._ahead.spec
        spec = EngineSpec.of_head(self._name, loaded.head, expected.max_rows, expected.raw)
        if spec != expected:
            self._ahead.stop()
            self._ahead = None if spec is None else start_compiling(spec)

    def warm_up(self, runner: Any, hidden: Tensor) -> None:
        """Load the kernels of all draws and capture graphs, for up to the rows of hidden [B, D].

        vLLM draws the kinds that are still being compiled. If the compiling processes have ended
        early, the kernels are compiled here.
        """
        draw = self.sampling.draw
        if draw is None or self._graphs is not None:
            return
        if steps := adapter.draft_steps(runner):  # rows of drafts, too
            hidden = hidden.repeat(1 + steps, 1)[: runner.max_num_tokens]
        hidden = hidden.contiguous()
        self._graphs = (len(hidden), hidden[:1].clone()) if hidden.is_cuda else None
        with self._compiled_ahead():
            self._load_kernels(runner, hidden, steps)

    def _load_kernels(self, runner: Any, hidden: Tensor, steps: int) -> None:
        """Draw rows of all kinds; steps: drafts per step."""
        draw = self.sampling.draw
        assert draw is not None
        raw = runner.sampler.logprobs_mode == "raw_logprobs"
        draw_kinds = served_kinds(draw.supported, raw, self._name == SCREENED)
        self._uncompiled = self._wait_for_kernels(draw_kinds)
        for kind in draw_kinds:
            if kind not in self._uncompiled:
                warm(draw, kind, hidden, self.sampling.V)
        if steps:
            self._warm_up_drafts(steps, hidden)
        self._warm_rows = hidden.clone() if self._uncompiled else None
        if hidden.is_cuda:
            self._capture(runner)

    def _compiled_ahead(self) -> AbstractContextManager[None]:
        """Have Triton use the cache that the compiling processes fill."""
        return nullcontext() if self._ahead is None else triton_cache(self._ahead.cache)

    def _wait_for_kernels(self, draw_kinds: list[DrawKind]) -> list[DrawKind]:
        """Wait for the compiling processes; return the kinds that they have not finished."""
        ahead = self._ahead
        if ahead is None:
            return []
        ahead.wait([kind for kind in draw_kinds if kind.is_common])
        # Ranks draw together, so none may leave a kind to vLLM that another one draws.
        ahead.wait(draw_kinds, WAIT_S if ahead.spec.ranks == 1 else None)
        waiting = [kind for kind in draw_kinds if not ahead.is_ready(kind)]
        if waiting and not ahead.is_running:
            _LOG.warning(
                "fsbench: compiling ahead has ended (%s); the engine compiles %d of %d kinds of "
                "draws itself, which takes longer",
                *(ahead.failure, len(waiting), len(draw_kinds)),
            )
            ensure_cache()
            return []
        if waiting:
            _LOG.info(
                "fsbench: vLLM draws %d of %d kinds of requests until they are compiled",
                *(len(waiting), len(draw_kinds)),
            )
        return waiting

    def _warm_up_drafts(self, steps: int, hidden: Tensor) -> None:
        """Load the kernels that draw drafts, and those that verify them."""
        for B in (size for size in SIZES if size <= len(hidden)):
            for draw in self._draws:
                if isinstance(draw, FlashSampleDraw):
                    draw.greedy(hidden[:B])
            tokens = torch.zeros(B, steps + 1, dtype=torch.int64, device=hidden.device)
            verify_drafts(tokens, tokens[:, 1:].contiguous())

    def is_ready(self, kind: DrawKind) -> bool:
        """Return whether a draw of this kind compiles nothing; load its kernels if they are new."""
        if kind not in self._uncompiled:
            return True
        ahead, draw, hidden = self._ahead, self._draws[0], self._warm_rows
        assert ahead is not None and hidden is not None
        if not ahead.is_ready(kind):
            if not ahead.is_running and not self._has_failed:
                self._has_failed = True
                _LOG.warning(
                    "fsbench: compiling has ended (%s); vLLM draws %d kinds of requests",
                    *(ahead.failure, len(self._uncompiled)),
                )
            return False
        # vLLM's monitor would report kernels that are loaded from disk as compiled.
        with _no_compile_hook(), self._compiled_ahead():
            warm(draw, kind, hidden, self.sampling.V)
        self._uncompiled.remove(kind)
        return True

    def _capture(self, runner: Any) -> None:
        draw = self.sampling.draw
        assert draw is not None and self._graphs is not None
        lazily = runner.parallel_config.tensor_parallel_size == 1
        graphed = GraphedDraw(draw, *self._graphs, self.sampling.V, lazily=lazily)
        graphed.capture_all(DrawKind())
        self.sampling.draw = graphed

    def end(self) -> None:
        """Log what was served, and stop the processes that still compile."""
        self.sampling.counts.log()
        if self._ahead is not None:
            self._ahead.stop()

    def sample(
        self, runner: Any, hidden: Tensor, batch: Any, grammar: Any, engine_sample: EngineSample
    ) -> Any:
        """Sample as BatchSampler does, after a check of the head if weights were loaded."""
        if self._weights_changed:
            self._weights_changed = False
            if self._head is None or self._head.may_have_moved(runner):
                self._find_heads(runner)
            else:
                for draw in self._draws:
                    draw.refresh()
        return self.sampling.sample(runner, hidden, batch, grammar, engine_sample)


def start_compiling(spec: EngineSpec) -> CompileAhead | None:
    """Start processes that compile an engine's kernels for the current GPU, or log why not."""
    ensure_cache()
    try:
        return CompileAhead(spec)
    except OSError as error:
        _LOG.warning("fsbench: cannot compile ahead (%s)", one_line(error))
        return None


@contextmanager
def _no_compile_hook() -> Iterator[None]:
    """Keep Triton from reporting the kernels that are loaded inside."""
    hooks: Any = triton.knobs.runtime
    hook = hooks.jit_post_compile_hook
    hooks.jit_post_compile_hook = None
    try:
        yield
    finally:
        hooks.jit_post_compile_hook = hook


def call_before(method: Callable[..., Any], action: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that first calls `action` with its positional arguments."""

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        action(*args)
        return method(*args, **kwargs)

    return wrapper
