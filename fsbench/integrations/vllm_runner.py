"""The plug-in in one model runner of vLLM: finding the LM head, loading kernels, drawing."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

from fsbench.errors import one_line
from fsbench.integrations import vllm_0_26
from fsbench.integrations.compile_ahead import CompileAhead, EngineSpec, ensure_cache
from fsbench.integrations.draw import (
    OWN,
    SCREENED,
    FlashSampleDraw,
    HeadDraw,
    make_draw,
)
from fsbench.integrations.draw_kinds import SIZES, DrawKind, served_kinds, warm
from fsbench.integrations.graphed import GraphedDraw
from fsbench.integrations.vllm_batch import BatchSampler
from fsbench.integrations.vllm_expected import check_parts
from fsbench.integrations.vllm_head import FoundHead, find_draft_head, find_head
from fsbench.kernels import verify_drafts

DRAFTS = "FSBENCH_VLLM_DRAFTS"
"""Variable of the environment that has drafts served, too."""
WAIT_S = 10.0
"""How long a start waits at most for kinds of draws that few requests need."""
_GREEDY = "_greedy_sample_draft"
_LOG = logging.getLogger("vllm.fsbench")


class Plugged:
    """The plug-in in one model runner whose model is loaded. All ranks make it together.

    Args:
        name: the sampler, or '' for vLLM's own.
        ahead: processes that compile its kernels, or None.

    Raises:
        EngineMismatch: the runner has not what is read of it.
        InvalidArgument: the sampler cannot take this LM head.
    """

    def __init__(
        self,
        adapter: vllm_0_26.Adapter,
        runner: Any,
        name: str,
        ahead: CompileAhead | None = None,
    ):
        self._name, self._ahead = name, ahead
        self._waiting: list[DrawKind] = []  # kinds that vLLM draws until they are compiled
        self._found: FoundHead | None = None
        self._made: list[HeadDraw] = []  # what draws, without graphs; and drafts of another head
        self._graphs: tuple[int, Tensor] | None = None  # rows of the largest, and a row like theirs
        self._stale = self._has_failed = False
        self._warm_rows: Tensor | None = None  # hidden states to load kernels with
        self.sampling = BatchSampler(adapter, None, lacks="vLLM's own", is_ready=self.is_ready)
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
        self._compile_for(self._found)
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
                model.load_weights = before(load, self.weights_change)

    def weights_change(self) -> None:
        """Look the head up again before the next draw."""
        self._stale = bool(self._name)

    def _compile_for(self, found: FoundHead) -> None:
        """Compile ahead for the head that was found, if it is not the one that was expected."""
        if self._ahead is None:
            return
        spec = EngineSpec.of_head(
            self._name, found.head, self._ahead.spec.max_rows, self._ahead.spec.raw
        )
        if spec != self._ahead.spec:
            self._ahead.stop()
            self._ahead = None if spec is None else start_compiling(spec)

    def warm_up(self, runner: Any, hidden: Tensor) -> None:
        """Load the kernels of all draws, and capture graphs, for up to the rows of hidden [*, D].

        Kinds that the processes have not compiled yet are left to vLLM until they have. Kinds that
        they will not compile any more are compiled here.
        """
        draw = self.sampling.draw
        if draw is None or self._graphs is not None:
            return
        if runner.speculative_config is not None:  # rows of drafts, too
            hidden = hidden.repeat(1 + runner.num_speculative_steps, 1)[: runner.max_num_tokens]
        hidden = hidden.contiguous()
        self._graphs = (len(hidden), hidden[:1].clone()) if hidden.is_cuda else None
        raw = runner.sampler.logprobs_mode == "raw_logprobs"
        kinds = served_kinds(draw.able, raw, self._name == SCREENED)
        self._waiting = self._not_compiled(kinds)
        for kind in kinds:
            if kind not in self._waiting:
                warm(draw, kind, hidden, self.sampling.V)
        if runner.speculative_config is not None:
            self._warm_up_drafts(runner, hidden)
        self._warm_rows = hidden.clone() if self._waiting else None
        if hidden.is_cuda:
            self._capture(runner)

    def _not_compiled(self, kinds: list[DrawKind]) -> list[DrawKind]:
        """Wait for the processes; return the kinds that they are still compiling."""
        ahead = self._ahead
        if ahead is None:
            return []
        ahead.wait([kind for kind in kinds if kind.is_common])
        ahead.wait(kinds, WAIT_S)
        waiting = [kind for kind in kinds if not ahead.is_ready(kind)]
        if waiting and not ahead.is_running:
            _LOG.warning(
                "fsbench: compiling ahead has ended (%s); the engine compiles %d of %d kinds of "
                "draws itself, which takes longer",
                *(ahead.failure, len(waiting), len(kinds)),
            )
            ensure_cache()
            return []
        if waiting:
            _LOG.info(
                "fsbench: vLLM draws %d of %d kinds of requests until they are compiled",
                *(len(waiting), len(kinds)),
            )
        return waiting

    def _warm_up_drafts(self, runner: Any, hidden: Tensor) -> None:
        """Load the kernels that draw drafts, and those that verify them."""
        steps, rows = runner.num_speculative_steps, [B for B in SIZES if len(hidden) >= B]
        for draw in self._made:
            if isinstance(draw, FlashSampleDraw):
                for B in rows:
                    draw.greedy(hidden[:B])
        for B in rows:
            tokens = torch.zeros(B, steps + 1, dtype=torch.int64, device=hidden.device)
            verify_drafts(tokens, tokens[:, 1:].contiguous())

    def is_ready(self, kind: DrawKind) -> bool:
        """Return whether a draw of this kind compiles nothing; load its kernels if they are new."""
        if kind not in self._waiting:
            return True
        ahead, draw, hidden = self._ahead, self._made[0], self._warm_rows
        assert ahead is not None and hidden is not None
        if not ahead.is_ready(kind):
            if not ahead.is_running and not self._has_failed:
                self._has_failed = True
                _LOG.warning(
                    "fsbench: compiling has ended (%s); vLLM draws %d kinds of requests",
                    *(ahead.failure, len(self._waiting)),
                )
            return False
        # They are on disk. vLLM's monitor takes a kernel that is loaded for one that is compiled.
        with _no_compile_hook():
            warm(draw, kind, hidden, self.sampling.V)
        self._waiting.remove(kind)
        return True

    def _capture(self, runner: Any) -> None:
        draw = self.sampling.draw
        assert draw is not None and self._graphs is not None
        whole = runner.parallel_config.tensor_parallel_size == 1
        graphed = GraphedDraw(draw, *self._graphs, self.sampling.V, lazily=whole)
        graphed.capture_all(DrawKind())
        self.sampling.draw = graphed

    def end(self) -> None:
        """Log what was served, and end the processes that still compile."""
        self.sampling.counts.log()
        if self._ahead is not None:
            self._ahead.stop()

    def sample(self, runner: Any, hidden: Tensor, batch: Any, grammar: Any, own: Any) -> Any:
        """Sample as BatchSampler does; look the head up again before if weights were loaded."""
        if self._stale:
            self._stale = False
            if self._found is None or self._found.moved(runner):
                self._look_up(runner)
            else:
                for each in self._made:
                    each.refresh()
        return self.sampling.sample(runner, hidden, batch, grammar, own)


def start_compiling(spec: EngineSpec) -> CompileAhead | None:
    """Start processes that compile the kernels of an engine on the current GPU, or log why not."""
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


def before(method: Callable[..., Any], note: Callable[..., Any]) -> Callable[..., Any]:
    """A method, or a bound one, that is noted first. note: gets self, if the method does."""
    bound = hasattr(method, "__self__")

    @functools.wraps(method)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*(() if bound else args[:1]))
        return method(*args, **kwargs)

    return noted
