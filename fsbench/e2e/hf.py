"""A decode loop over Hugging Face transformers: static cache, on a GPU one CUDA graph per step.

    step:  hidden = layers(tokens);  tokens = draw(hidden)      all of it on the device
    host:  replay, copy the B new tokens to the host, wait for them: they are the client's

The simplest engine there is: B requests start together, have prompts of one length, and get their
tokens in lockstep. No scheduler, no paging; what is between the model and a user is as little as
can be, so that it shows what a sampler can gain at most. Samplers share model, cache and buffers;
each has a graph of its own, and they decode in turn.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from fsbench.e2e.hf_drafts import DraftSession, drafts_label
from fsbench.e2e.measure import DecodePlan, Session
from fsbench.e2e.models import PLAIN, Decoder
from fsbench.e2e.records import Decoded, Profile
from fsbench.e2e.trace import step_profile
from fsbench.errors import EngineUnavailable, InvalidArgument, shown
from fsbench.integrations.draw import (
    DRAW_MARK,
    MATMUL_MARK,
    SERVING,
    Draw,
    Head,
    Rows,
    check_sampler,
    make_draw,
    sampler_labels,
    unavailable_reason,
)
from fsbench.integrations.speculating import captured, synchronize

try:
    from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache

    _MISSING = ""
except ImportError as error:
    _MISSING = str(error)

_PROFILED = 8  # steps


class HuggingFace:
    """See Engine. device: cuda or cpu.

    Raises:
        EngineUnavailable: transformers is not installed, or too old.
    """

    name = "hf"

    def __init__(self, device: str):
        if _MISSING:
            raise EngineUnavailable(
                f"--engine hf: expected transformers 4.51 or later; {_MISSING}. "
                "pip install 'transformers>=4.51'"
            )
        self.device = device
        self.gpu = torch.cuda.get_device_name() if device == "cuda" else ""

    def check(self, plan: DecodePlan) -> None:
        for sampler in plan.samplers:
            self.label(sampler)
        if plan.tp != (1,):
            raise InvalidArgument(f"--tp: expected 1 with --engine hf; got {max(plan.tp)}")
        if fp8 := [each.name for each in plan.models if each.fp8]:
            raise InvalidArgument(f"--model: expected none in fp8 with --engine hf; got {fp8[0]}")
        if plan.requests != (PLAIN,):
            given = shown(",".join(plan.requests))
            raise InvalidArgument(f"--requests: expected plain with --engine hf; got {given}")

    def label(self, sampler: str) -> tuple[str, bool]:
        drafts = drafts_label(sampler)
        if drafts:
            return drafts, True
        check_sampler(sampler)
        label, fused = sampler_labels()[sampler]
        if sampler in SERVING and self.device == "cpu":
            label += " (reference, on a CPU)"
        return label, fused

    def missing(self, sampler: str) -> str | None:
        return None if drafts_label(sampler) else unavailable_reason(sampler, self.device)

    def open(self, plan: DecodePlan, decoder: Decoder, tp: int, samplers: Sequence[str]) -> Session:
        if plan.speculate:
            device = torch.device(self.device)
            return DraftSession(plan, random_model(decoder, plan, device), device)
        return Loaded(plan, decoder, self.device)


class Loaded:
    """See Session: one model, and the batch size that is being measured."""

    def __init__(self, plan: DecodePlan, decoder: Decoder, device: str):
        self._plan = plan
        self._device = torch.device(device)
        self._model = random_model(decoder, plan, self._device)
        weight = self._model.lm_head.weight.detach()
        self._head = Head(weight, decoder.V)
        self._draws: dict[str, Draw] = {}
        self._batch: HfBatch | None = None
        self._steps: dict[str, Callable[[], object]] = {}

    def prepare(self, sampler: str, B: int, requests: str = PLAIN) -> None:
        if self._batch is None or self._batch.B != B:
            self._steps.clear()
            self._batch = None  # frees its cache before the next is made
            self._batch = HfBatch(self._model, self._plan, B, self._device)
        if sampler not in self._draws:
            self._draws[sampler] = make_draw(sampler, self._head)
        self._steps[sampler] = self._batch.compiled(self._draws[sampler])

    def decode(self, sampler: str, B: int, requests: str = PLAIN) -> Decoded:
        assert self._batch is not None and self._batch.B == B
        return self._batch.decode(self._steps[sampler])

    def profile(self, sampler: str, B: int, requests: str = PLAIN) -> Profile:
        assert self._batch is not None and self._batch.B == B
        return self._batch.profile(self._draws[sampler])

    def counts(self, sampler: str) -> None:
        return None

    def close(self) -> None:
        self._steps.clear()
        self._batch = None
        del self._model, self._head
        self._draws.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class HfBatch:
    """B requests over one model: cache, tokens, positions, and the step from one to the next.

    sequence: int64 [B, prompt_tokens + output_tokens], prompts and what was drawn.
    """

    def __init__(self, model: Any, plan: DecodePlan, B: int, device: Any):
        self.B = B
        self._model, self._plan, self._device = model, plan, device
        length = plan.prompt_tokens + plan.output_tokens
        generator = torch.Generator().manual_seed(plan.seed)
        prompts = torch.randint(
            model.config.vocab_size, (B, plan.prompt_tokens), generator=generator
        )
        self.sequence = torch.zeros(B, length, dtype=torch.int64, device=device)
        self.sequence[:, : plan.prompt_tokens] = prompts
        self._columns = torch.arange(length, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._temperature = torch.ones(B, device=device)
        self._seed = plan.seed + torch.arange(B, device=device)
        # transformers before 4.56 wants batch size, device and type of the cache; later ones find
        # out.
        self._cache = StaticCache(
            config=model.config,
            max_batch_size=B,
            max_cache_len=length,
            device=device,
            dtype=model.dtype,
        )
        self._newest = torch.zeros(B, dtype=torch.int64, device=device)
        self._received = torch.zeros(B, dtype=torch.int64)
        if device.type == "cuda":
            self._received = self._received.pin_memory()

    def start(self) -> None:
        """Forget what was drawn; the cache then has the prompts without their last tokens."""
        P = self._plan.prompt_tokens
        self._cache.reset()
        self._position.fill_(P - 1)
        if P > 1:
            self._forward(self.sequence[:, : P - 1], self._columns[: P - 1])

    def step(self, draw: Draw) -> None:
        """Feed the tokens at the position, draw those behind them. All on the device."""
        position = self._position
        hidden = self._forward(self.sequence.index_select(1, position), position)
        self._newest.copy_(self._drawn(draw, hidden[:, 0].contiguous()))
        self.sequence.index_copy_(1, position + 1, self._newest[:, None])
        position.add_(1)

    def compiled(self, draw: Draw) -> Callable[[], object]:
        """The step, ready to be repeated: on a GPU as a CUDA graph. One whole decoding warms up."""
        with torch.inference_mode():
            self.start()
            for _ in range(2):
                self.step(draw)
            step = captured(lambda: self.step(draw), self._device)
            if self._device.type == "cuda":
                self.decode(step)
        return step

    def decode(self, step: Callable[[], object]) -> Decoded:
        """See Session. A token's time is when the host has it."""
        at = []
        with torch.inference_mode():
            synchronize(self._device)
            begin = time.perf_counter()
            self.start()
            for _ in range(self._plan.output_tokens):
                step()
                self._receive()
                at.append(time.perf_counter())
        steps = [(after - before) * 1e6 for before, after in pairwise(at)]
        return Decoded(
            self._plan.prompt_tokens,
            self._plan.output_tokens,
            ttft_us=(at[0] - begin) * 1e6,
            tpot_us=sum(steps) / len(steps),
            step_us=[round(us, 2) for us in steps],
        )

    def profile(self, draw: Draw) -> Profile:
        """Eager steps, so that each kernel can be told; their gaps are not those of the graph."""
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        steps = min(_PROFILED, self._plan.output_tokens - 1)
        with torch.inference_mode():
            self.start()
            D = self._model.config.hidden_size
            hidden = torch.randn(self.B, D, device=self._device).to(self._model.dtype)
            self._model.lm_head(hidden)
            self.step(draw)
            with _without_notices(), profile(activities=activities) as recorded:
                for _ in range(steps):
                    with record_function(MATMUL_MARK):
                        self._model.lm_head(hidden)
                for _ in range(steps):
                    self.step(draw)
                synchronize(self._device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            recorded.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return step_profile(events, DRAW_MARK, MATMUL_MARK)

    def _drawn(self, draw: Draw, hidden: Tensor) -> Tensor:
        with record_function(DRAW_MARK):  # costs nothing in a graph
            rows = Rows(hidden, self._temperature, self._seed, self._position)
            return draw(rows).tokens

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [B, n, D] of the tokens ids [B, n] at positions [n]; no logits."""
        visible = self._columns <= positions[:, None]  # [n, length]
        hidden: Tensor = self._model.model(
            input_ids=ids,
            attention_mask=visible.expand(self.B, 1, -1, -1),
            position_ids=positions.expand(self.B, -1),
            past_key_values=self._cache,
            use_cache=True,
            cache_position=positions,  # read by transformers 4; the caches of 5 count themselves
        ).last_hidden_state
        return hidden

    def _receive(self) -> None:
        """The newest tokens, to the host."""
        self._received.copy_(self._newest, non_blocking=True)
        synchronize(self._device)


def random_model(decoder: Decoder, plan: DecodePlan, device: Any) -> Any:
    """The model on the device, in the plan's dtype, with random weights of a fixed seed."""
    length = plan.prompt_tokens + plan.output_tokens
    config = Qwen3Config(**decoder.config(plan.dtype, length))
    before = torch.get_default_dtype()
    torch.manual_seed(plan.seed)
    try:
        torch.set_default_dtype(getattr(torch, plan.dtype))
        with device:
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _without_notices() -> Iterator[None]:
    """Keeps the profiler's notices of its begin and end (USDT) from stderr, and nothing else.

    KINETO_LOG_LEVEL would silence its errors, too.
    """
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            os.write(2, b"".join(line for line in said if not line.startswith(b"USDT:")))
