"""Hugging Face transformers as an engine of `fsbench e2e`: fsbench.integrations.decode_loop, timed.

B requests start together, have prompts of one length, and get their tokens in lockstep, or with
`--speculate k` by drafts. There is no scheduler and no paging: as little as possible is between the
model and the client, so this shows the most that a sampler can save. Samplers share model and
cache; each has a CUDA graph, and they decode in turn.

With drafts, each drafter's tokens are compared with those of plain decoding. A pass over k + 1
tokens may round a hidden state differently than a pass over one. If that changed a token, passes of
the same shape without drafts are decoded too, and their tokens have to be the same.
"""

from __future__ import annotations

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

from fsbench.e2e.measure import DecodePlan
from fsbench.e2e.models import DRAFTERS, PLAIN, Decoder, drafts_label
from fsbench.e2e.records import Decoded, Drafting, Profile
from fsbench.e2e.trace import read_profile
from fsbench.errors import EngineFailed, EngineUnavailable, InvalidArgument, shown
from fsbench.integrations.decode_loop import (
    Decoding,
    Drafter,
    EarlyExit,
    RowCache,
    captured,
    ngram,
    no_drafts,
    synchronize,
)
from fsbench.integrations.draw import (
    MATMUL_MARK,
    SERVING,
    Draw,
    Head,
    make_draw,
    sampler_label,
    unavailable_reason,
)
from fsbench.integrations.routing import FLASH_SAMPLE

try:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    _IMPORT_ERROR = ""
except ImportError as error:
    _IMPORT_ERROR = str(error)

_PROFILED_STEPS = 8
_TIMED_DRAFTS = 10  # drafts that are timed back to back


class HuggingFace:
    """The Engine of `--engine hf`, on cuda or cpu.

    Raises:
        EngineUnavailable: transformers is not installed, or too old.
    """

    name = "hf"

    def __init__(self, device: str):
        if _IMPORT_ERROR:
            raise EngineUnavailable(
                f"--engine hf: expected transformers 4.51 or later; {_IMPORT_ERROR}. "
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
            requests = shown(",".join(plan.requests))
            raise InvalidArgument(f"--requests: expected plain with --engine hf; got {requests}")

    def label(self, sampler: str) -> tuple[str, bool]:
        drafts = drafts_label(sampler)
        if drafts:
            return drafts, True
        label, fused = sampler_label(sampler)
        if sampler in SERVING and self.device == "cpu":
            label += " (reference, on a CPU)"
        return label, fused

    def unavailable_reason(self, sampler: str) -> str | None:
        return None if drafts_label(sampler) else unavailable_reason(sampler, self.device)

    def open(
        self, plan: DecodePlan, decoder: Decoder, tp: int, samplers: Sequence[str]
    ) -> HfSession:
        return HfSession(plan, decoder, torch.device(self.device))


class HfSession:
    """A Session of one model, with the decodings of the batch size that is measured."""

    def __init__(self, plan: DecodePlan, decoder: Decoder, device: torch.device):
        self._plan, self._device = plan, device
        self._model = random_model(decoder, plan, device)
        self._draws: dict[str, Draw] = {}
        self._decodings: dict[str, tuple[Decoding, Callable[[], object]]] = {}
        self._expected: dict[str, Tensor] = {}  # tokens by sampler, with drafts
        self._cache: RowCache | None = None
        self._B = 0

    def prepare(self, sampler: str, B: int, requests: str = PLAIN) -> None:
        if B != self._B:
            self._clear()
            length = self._plan.prompt_tokens + self._plan.output_tokens
            self._cache = RowCache(self._model.model, B, length + self._plan.speculate + 1)
            self._B = B
        with torch.inference_mode():
            if sampler not in self._decodings:
                decoding = self._decoding(sampler)
                decoding.start()
                self._decodings[sampler] = decoding, captured(decoding.step, self._device)
            decoding, step = self._decodings[sampler]
            decoding.run(step)
            if self._plan.speculate:
                self._expected[sampler] = self._expected_tokens(sampler, decoding)

    def decode(self, sampler: str, B: int, requests: str = PLAIN) -> Decoded:
        """Decode B requests; raise EngineFailed if drafts changed a token.

        tpot_us: the time in which all B decode, per token that one of them got in it.
        """
        decoding, step = self._decodings[sampler]
        with torch.inference_mode():
            steps = decoding.run(step)
        delivered = steps.num_tokens.cumsum(0).clamp_max(self._plan.output_tokens)
        last = int((delivered < self._plan.output_tokens).all(1).sum())  # the first one finishes
        step_us = [(after - before) * 1e6 for before, after in pairwise(steps.times[: last + 1])]
        step_tokens = delivered[: last + 1].sum(1).diff().tolist()
        equal_pct = None
        if self._plan.speculate:
            tokens = self._output(decoding)
            check_tokens(tokens, self._expected[sampler])
            equal = (tokens == self._expected[FLASH_SAMPLE]).long().cumprod(1)
            equal_pct = 100 * float(equal.double().mean())
        has_drafts = sampler != FLASH_SAMPLE and self._plan.speculate > 0
        return Decoded(
            self._plan.prompt_tokens,
            self._plan.output_tokens,
            ttft_us=steps.times[0] * 1e6,
            tpot_us=B * sum(step_us) / sum(step_tokens),
            step_us=[round(us, 2) for us in step_us],
            step_tokens=step_tokens if self._plan.speculate else None,
            accepted=steps.accepted() if has_drafts else None,
            same_pct=equal_pct if has_drafts else None,
        )

    def profile(self, sampler: str, B: int, requests: str = PLAIN) -> Profile | Drafting | None:
        """Profile eager steps; with drafts time the drafts, as replays on a GPU.

        Eager steps show each kernel, but their gaps are not those of the graph.
        """
        decoding, _ = self._decodings[sampler]
        D = self._model.config.hidden_size
        hidden = torch.randn(B, D, device=self._device).to(self._model.dtype)
        with torch.inference_mode():
            if not self._plan.speculate:
                return self._profile_steps(decoding, hidden)
            if sampler == FLASH_SAMPLE:
                return None
            draft_us, draw_us = self._timed(decoding.draft), 0.0
            if not sampler.startswith("ngram"):
                draw_us = self._timed(lambda: decoding.draw(hidden, 0, decoding.position))
        return Drafting(draft_us / decoding.k, draw_us)

    def counts(self, sampler: str) -> None:
        return None

    def close(self) -> None:
        self._clear()
        self._draws.clear()
        del self._model
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _clear(self) -> None:
        """Free the cache, with the decodings that use it."""
        self._decodings.clear()
        self._expected.clear()
        self._cache, self._B = None, 0

    def _decoding(self, sampler: str) -> Decoding:
        """Make the decoding of a sampler, or of a drafter that with_drafts named."""
        if not self._plan.speculate:
            if sampler not in self._draws:
                weight = self._model.lm_head.weight.detach()
                head = Head(weight, self._model.config.vocab_size)
                self._draws[sampler] = make_draw(sampler, head)
            return self._new_decoding(0, None, self._draws[sampler])
        if sampler == FLASH_SAMPLE:
            return self._new_decoding(0, None)
        layers = max(1, self._model.config.num_hidden_layers // 4)
        drafter = ngram if sampler.startswith(DRAFTERS[0]) else EarlyExit(self._model, layers)
        return self._new_decoding(self._plan.speculate, drafter)

    def _new_decoding(self, k: int, drafter: Drafter | None, draw: Draw | None = None) -> Decoding:
        plan, B = self._plan, self._B
        generator = torch.Generator().manual_seed(plan.seed)
        shape = (B, plan.prompt_tokens)
        prompts = torch.randint(self._model.config.vocab_size, shape, generator=generator)
        return Decoding(
            self._model,
            prompts.to(self._device),
            torch.ones(B, device=self._device),
            plan.seed + torch.arange(B, device=self._device),
            plan.prompt_tokens + plan.output_tokens,
            k,
            drafter,
            draw,
            self._cache,
        )

    def _expected_tokens(self, sampler: str, decoding: Decoding) -> Tensor:
        """Return the tokens that a decoding with drafts has to give, from decodings without."""
        tokens = self._output(decoding).clone()
        if sampler == FLASH_SAMPLE:
            return tokens
        plain = self._expected.get(FLASH_SAMPLE)
        if plain is None:
            raise EngineFailed("tokens: decoding without drafts failed; nothing to compare with")
        if torch.equal(tokens, plain):
            return plain
        same_shape = self._new_decoding(decoding.k, no_drafts)
        if same_shape.run(same_shape.step).accepted():
            raise EngineFailed("tokens: expected no missing draft to be accepted")
        return self._output(same_shape).clone()

    def _output(self, decoding: Decoding) -> Tensor:
        return decoding.tokens[:, self._plan.prompt_tokens : decoding.length]

    def _profile_steps(self, decoding: Decoding, hidden: Tensor) -> Profile:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        steps = min(_PROFILED_STEPS, self._plan.output_tokens - 1)
        decoding.start()
        self._model.lm_head(hidden)
        decoding.step()
        with _without_notices(), profile(activities=activities) as recorded:
            for _ in range(steps):
                with record_function(MATMUL_MARK):
                    self._model.lm_head(hidden)
            for _ in range(steps):
                decoding.step()
            synchronize(self._device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            recorded.export_chrome_trace(str(path))
            return read_profile(path)

    def _timed(self, work: Callable[[], object]) -> float:
        """Return the mean time of back-to-back calls, in microseconds."""
        replay = captured(work, self._device)
        replay()
        synchronize(self._device)
        begin = time.perf_counter()
        for _ in range(_TIMED_DRAFTS):
            replay()
        synchronize(self._device)
        return (time.perf_counter() - begin) * 1e6 / _TIMED_DRAFTS


@contextmanager
def _without_notices() -> Iterator[None]:
    """Remove the profiler's notices (USDT) from stderr. KINETO_LOG_LEVEL would hide errors, too."""
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            output.seek(0)
            os.write(2, b"".join(line for line in output if not line.startswith(b"USDT:")))


def check_tokens(tokens: Tensor, expected: Tensor) -> None:
    """Raise EngineFailed, naming the first difference, unless the tokens are as expected."""
    wrong = (tokens != expected).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise EngineFailed(
            f"tokens: expected those of decoding without drafts; request {row} has "
            f"{int(tokens[row, column])} as its token {column}, not {int(expected[row, column])}"
        )


def random_model(decoder: Decoder, plan: DecodePlan, device: torch.device) -> Any:
    """Return the model on the device, in the plan's dtype, with random weights of its seed."""
    length = plan.prompt_tokens + plan.output_tokens
    config = Qwen3Config(**decoder.config(plan.dtype, length))
    default = torch.get_default_dtype()
    torch.manual_seed(plan.seed)
    try:
        torch.set_default_dtype(getattr(torch, plan.dtype))
        with device:
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)
