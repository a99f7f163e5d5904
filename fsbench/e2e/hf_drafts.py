"""`fsbench e2e --speculate k`: the decode loop over transformers with drafts and without them.

Each drafter's tokens are compared with those of plain decoding. A pass over k + 1 tokens may round
a hidden state differently than a pass over one; where that changed a token, the passes of the same
shape without drafts are decoded too, and their tokens have to be the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fsbench.e2e.measure import DecodePlan
from fsbench.e2e.records import Decoded, Drafting
from fsbench.errors import EngineFailed, InvalidArgument, unknown_name
from fsbench.integrations.draw import FLASH_SAMPLE
from fsbench.integrations.speculating import (
    Decoding,
    Drafter,
    EarlyExit,
    Steps,
    captured,
    ngram,
    no_drafts,
    synchronize,
)

DRAFTERS = ("ngram", "early-exit")

_REPEATS = 10
"""Drafts of a step that are timed back to back."""


def with_drafts(drafters: Sequence[str], k: int, output_tokens: int) -> tuple[str, ...]:
    """Plan.samplers of k drafts per step: flash_sample without drafts, and each drafter.

    Raises:
        InvalidArgument: an unknown drafter, or more drafts than a request has steps for.
    """
    for name in drafters:
        if name not in DRAFTERS:
            raise unknown_name("--drafter", name, DRAFTERS)
    if k > output_tokens - 2:
        raise InvalidArgument(
            f"--speculate: expected at most {output_tokens - 2}, two less than --output-tokens; "
            f"got {k}"
        )
    return (FLASH_SAMPLE, *(f"{name}-{k}" for name in drafters))


def drafts_label(sampler: str) -> str | None:
    """Text for legends of a drafter's name that with_drafts made; None of any other name."""
    name, _, k = sampler.rpartition("-")
    return f"{k} drafts, {name}" if name in DRAFTERS else None


class DraftSession:
    """See Session: one model, and the batch size that is being measured."""

    def __init__(self, plan: DecodePlan, model: Any, device: torch.device):
        self._plan, self._model, self._device = plan, model, device
        self._of: dict[str, tuple[Decoding, Callable[[], object]]] = {}
        self._drafts: dict[str, tuple[Callable[[], object], ...]] = {}
        self._expected: dict[str, Tensor] = {}
        self._B = 0

    def prepare(self, sampler: str, B: int, requests: str) -> None:
        if B != self._B:
            self._forget()
            self._B = B
        with torch.inference_mode():
            decoding = self._of[sampler][0] if sampler in self._of else self._begin(sampler)
            self._run(sampler)
            if sampler == FLASH_SAMPLE:
                self._expected[sampler] = self._drawn(decoding).clone()
                return
            plain = self._expected.get(FLASH_SAMPLE)
            if plain is None:
                raise EngineFailed("tokens: without drafts nothing was decoded to compare with")
            if not torch.equal(self._drawn(decoding), plain):
                same_shape = self._decoding(decoding.k, no_drafts)
                if same_shape.run(same_shape.step).accepted():
                    raise EngineFailed("tokens: expected no missing draft to be accepted")
                plain = self._drawn(same_shape).clone()
            self._expected[sampler] = plain

    def decode(self, sampler: str, B: int, requests: str) -> Decoded:
        """B requests; raises EngineFailed if drafts changed a token.

        tpot_us: the time in which all B decode, by the tokens that one of them got in it.
        """
        with torch.inference_mode():
            steps = self._run(sampler)
        tokens = self._drawn(self._of[sampler][0])
        _check(tokens, self._expected[sampler])
        delivered = steps.gained.cumsum(0).clamp_max(self._plan.output_tokens)
        last = int((delivered < self._plan.output_tokens).all(1).sum())  # the first one is done
        step_us = [(after - before) * 1e6 for before, after in pairwise(steps.at[: last + 1])]
        step_tokens = delivered[: last + 1].sum(1).diff().tolist()
        plain = self._expected[FLASH_SAMPLE]
        same = (tokens == plain).long().cumprod(1).double().mean()
        drafted = sampler != FLASH_SAMPLE
        return Decoded(
            self._plan.prompt_tokens,
            self._plan.output_tokens,
            ttft_us=steps.at[0] * 1e6,
            tpot_us=B * sum(step_us) / sum(step_tokens),
            step_us=[round(us, 2) for us in step_us],
            step_tokens=step_tokens,
            accepted=steps.accepted() if drafted else None,
            same_pct=100 * float(same) if drafted else None,
        )

    def profile(self, sampler: str, B: int, requests: str) -> Drafting | None:
        """Drafts back to back, as replays on a GPU; head and draw by themselves."""
        if sampler == FLASH_SAMPLE:
            return None
        decoding, _ = self._of[sampler]
        with torch.inference_mode():
            times = [self._timed(work) for work in self._drafts[sampler]]
        return Drafting(times[0] / decoding.k, times[1] if times[1:] else 0.0)

    def counts(self, sampler: str) -> None:
        return None

    def close(self) -> None:
        self._forget()
        del self._model
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _begin(self, sampler: str) -> Decoding:
        """The decoding of this sampler, with what is repeated of it."""
        drafter: Drafter | None = None
        if sampler != FLASH_SAMPLE:
            layers = max(1, self._model.config.num_hidden_layers // 4)
            drafter = ngram if sampler.startswith("ngram") else EarlyExit(self._model, layers)
        decoding = self._decoding(self._plan.speculate if drafter else 0, drafter)
        decoding.start()
        self._of[sampler] = decoding, captured(decoding.step, self._device)
        if drafter:
            timed = [captured(decoding.draft, self._device)]
            if isinstance(drafter, EarlyExit):
                hidden = torch.randn(self._B, self._model.config.hidden_size, device=self._device)
                hidden = hidden.to(self._model.dtype)
                draw = lambda: decoding.draw(hidden, 0, decoding.position)  # noqa: E731
                timed.append(captured(draw, self._device))
            self._drafts[sampler] = tuple(timed)
        return decoding

    def _decoding(self, k: int, drafter: Drafter | None) -> Decoding:
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
        )

    def _run(self, sampler: str) -> Steps:
        decoding, step = self._of[sampler]
        return decoding.run(step)

    def _drawn(self, decoding: Decoding) -> Tensor:
        return decoding.tokens[:, self._plan.prompt_tokens : decoding.length]

    def _timed(self, work: Callable[[], object]) -> float:
        """Microseconds of one."""
        work()
        synchronize(self._device)
        begin = time.perf_counter()
        for _ in range(_REPEATS):
            work()
        synchronize(self._device)
        return (time.perf_counter() - begin) * 1e6 / _REPEATS

    def _forget(self) -> None:
        for kept in (self._of, self._drafts, self._expected):
            kept.clear()


def _check(tokens: Tensor, expected: Tensor) -> None:
    wrong = (tokens != expected).nonzero()
    if len(wrong):
        row, place = wrong[0].tolist()
        raise EngineFailed(
            f"tokens: expected those of decoding without drafts; request {row} has "
            f"{int(tokens[row, place])} as its token {place}, not {int(expected[row, place])}"
        )
