"""What the decision plane costs a GPU: copies over the bus, and the time it leaves the GPU idle.

A decode step is a body of layers, then the LM head's matmul. The body is stood in for by as many
reads of the LM head as make up the model's weights, so its time is that of a decode step of that
model at small B. `cycle_us` is the time per step in each of:

    nothing      body and LM head only, back to back
    serial       the next step begins when the tokens are back on the GPU
    overlapped   two batches take turns: one is sampled while the other is on the GPU

exposed = serial or overlapped - nothing; hidden = serial - overlapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsbench.simple import reference
from fsbench.simple.bench import Case, Row, interleave
from fsbench.simple.controls import PLAIN
from fsbench.simple.native import NEEDS_TAIL
from fsbench.simple.ring import RingShape
from fsbench.simple.steps import Offload, Shvs


def copies(V: int, hot: int, batches: Iterable[int]) -> list[Row]:
    """Time of the copies of a step to pinned host memory: whole rows, hot tokens; and back."""
    rows = []
    for B in batches:
        logits = torch.zeros(B, V, dtype=torch.bfloat16, device="cuda")
        whole = torch.empty(B, V, dtype=torch.bfloat16, pin_memory=True)
        part = torch.empty(B, hot, dtype=torch.bfloat16, pin_memory=True)
        tokens = torch.zeros(B, dtype=torch.int64, pin_memory=True)
        on_gpu = torch.zeros(B, dtype=torch.int64, device="cuda")
        contiguous = logits[:, :hot].contiguous()
        for name, to, source in (
            ("whole rows", whole, logits),
            ("hot tokens", part, contiguous),
            ("tokens back", on_gpu, tokens),
        ):
            us = _event_us(partial(to.copy_, source, non_blocking=True))
            rows.append(
                {
                    "b": B,
                    "what": name,
                    "bytes": source.nbytes,
                    "time_us": us,
                    "gb_per_s": source.nbytes / us / 1e3,
                }
            )
    return rows


def _event_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(np.median(times))


class _Batch:
    """One batch in flight: hidden states, logits on both sides of the bus, a plane and its ring.

    Copies have a stream of their own, so the GPU computes another batch meanwhile.
    """

    def __init__(
        self,
        design: str,
        B: int,
        hidden: Tensor,
        weight: Tensor,
        body: int,
        hot: int,
        samplers: int,
    ):
        V = len(weight)
        self.hot = hot if design == "SHVS" else 0
        self.weight, self.body, self.B, self.V = weight, body, B, V
        cuda, dtype = weight.device, weight.dtype
        self.hidden = hidden[torch.arange(B, device=cuda) % len(hidden)]
        self.logits = torch.empty(B, V, device=cuda, dtype=dtype)
        self.part = torch.empty(B, self.hot or V, device=cuda, dtype=dtype)
        self.statistics = torch.empty(2, B, device=cuda)
        size = RingShape(1, B, V, dtype="bf16").bytes()
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        options: dict[str, Any] = {"dtype": "bf16", "buffer": buffer}
        self.step = (
            Shvs(B, V, PLAIN, samplers, hot=hot, **options)
            if self.hot
            else Offload(B, V, PLAIN, samplers, **options)
        )
        self.ring = self.step.plane.ring
        self.flat = self.ring.logits.view(-1)
        self.tokens = torch.zeros(B, dtype=torch.int64, device=cuda)
        self.computed, self.copied, self.back = (torch.cuda.Event() for _ in range(3))
        self.back.record()
        self.copies = torch.cuda.Stream()
        self.seed, self.offset = torch.tensor([1]), torch.tensor([0])

    def forward(self) -> None:
        """Enqueue body and LM head; the hidden states depend on the tokens of the step before."""
        torch.cuda.current_stream().wait_event(self.back)
        self.hidden.add_(self.tokens[:, None].to(self.hidden.dtype), alpha=0.0)
        for _ in range(self.body + 1):
            torch.mm(self.hidden, self.weight.T, out=self.logits)

    def enqueue(self) -> None:
        """Forward, statistics of the tail, copies to the host."""
        self.forward()
        if self.hot:
            self.statistics[0], self.statistics[1] = reference.tail(self.logits, self.hot, 1.0)
            self.part.copy_(self.logits[:, : self.hot])
        self.computed.record()
        with torch.cuda.stream(self.copies):
            self.copies.wait_event(self.computed)
            here = self.flat[: self.part.numel()].view_as(self.part)
            here.copy_(self.part if self.hot else self.logits, non_blocking=True)
            if self.hot:
                self.ring.tail_max[0].copy_(self.statistics[0], non_blocking=True)
                self.ring.tail_sum[0].copy_(self.statistics[1], non_blocking=True)
            self.copied.record()

    def sample(self) -> int:
        """Wait for the copies and the samplers, send the tokens back; rows that asked for more."""
        step, plane = self.step, self.step.plane
        self.copied.synchronize()
        self.offset += 1
        if self.hot:
            self.ring.parts["shape"][0] = torch.tensor(plane.shape.hot(self.hot, self.hot))
        tokens = plane.wait(step.publish(self.seed, self.offset), self.B)
        asked = int((tokens == NEEDS_TAIL).sum())
        with torch.cuda.stream(self.copies):
            if isinstance(step, Shvs):
                tokens = step.settled(tokens, self._fetch)
            self.ring.tokens[0, : self.B] = tokens
            self.tokens.copy_(self.ring.tokens[0, : self.B], non_blocking=True)
            self.back.record()
        return asked

    def _fetch(self, rows: Tensor, where: Tensor) -> None:
        for place, row in enumerate(rows.tolist()):  # copies only: no kernel has to wait
            where[place].copy_(self.logits[row], non_blocking=True)
        self.copies.synchronize()


def _finished(mode: Callable[[], None]) -> None:
    mode()
    torch.cuda.synchronize()


def overlap(
    hidden: Tensor, weight: Tensor, hot: int, body: int, batches: Iterable[int], samplers: int,
    steps: int = 20, rounds: int = 3,
) -> list[Row]:  # fmt: skip
    """Exposed and hidden time per step of both core designs, by B.

    Args:
        hidden: bf16 [R, D], CUDA; a batch has these rows in turns. How often the hot tokens settle
            a row follows from its logits, so they should be those of text.
        weight: bf16 [V, D]; the first `hot` tokens are the hot ones.
    """
    rows = []
    for B in batches:
        for design in ("offloaded", "SHVS"):
            # Each batch has a plane, but they sample in turns: together they use the cores once.
            pair = [_Batch(design, B, hidden, weight, body, hot, samplers) for _ in range(2)]
            asked = 0

            def nothing(pair=pair) -> None:
                for _ in range(steps):
                    pair[0].forward()

            def serial(pair=pair) -> None:
                nonlocal asked
                for _ in range(steps):
                    pair[0].enqueue()
                    asked += pair[0].sample()

            def overlapped(pair=pair) -> None:
                pair[0].enqueue()
                for number in range(steps):
                    if number + 1 < steps:
                        pair[(number + 1) % 2].enqueue()  # the GPU goes on with the other batch
                    pair[number % 2].sample()

            cases = [
                Case(mode.__name__, partial(_finished, mode), steps)
                for mode in (nothing, serial, overlapped)
            ]
            interleave(cases, rounds, 0)
            cycle = {case.name: float(np.median(case.samples_us)) for case in cases}
            rows.append(
                {
                    "b": B,
                    "design": design,
                    "samplers": samplers,
                    "body": body,
                    **{f"{name}_us": us for name, us in cycle.items()},
                    "exposed_serial_us": cycle["serial"] - cycle["nothing"],
                    "exposed_overlapped_us": cycle["overlapped"] - cycle["nothing"],
                    "hidden_us": cycle["serial"] - cycle["overlapped"],
                    "spread_us": float(np.ptp(cases[-1].samples_us)),
                    "asked_share": asked / (steps * (rounds + 1) * B),
                }
            )
            del pair
    return rows
