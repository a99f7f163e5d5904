"""The four designs of SIMPLE's ablation (section 7.4): logits [B, V] in host memory -> tokens [B].

    FullV     an engine's GPU sampler moved to the CPU unchanged: whole-vocabulary tensors in torch
    Parallel  the same, rows split over persistent samplers, uniforms drawn before
    Offload   the C++ core: penalties as sparse edits, filters before any softmax, one pass
    Shvs      the same on the hot tokens only, where that settles the row

B, V and the controls are fixed; the designs of the core also filter and penalize. Members:

    logits    [B, V], to be written before a step
    begin     start a request, with its prompt and output, in a row (the core's designs)
    tokens    draw: int64 [B], counted as drawn; seed and offset are int64 [1] on the CPU

An undefined row (NaN, +inf, no finite logit) gives -1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsbench.cores import usable_cores
from fsbench.errors import InvalidArgument
from fsbench.simple import reference
from fsbench.simple.native import NEEDS_TAIL
from fsbench.simple.plane import Plane, uniforms
from fsbench.simple.ring import RingShape


@dataclass(frozen=True)
class Controls:
    """Sampling controls, the same for all rows of a step.

    Attributes:
        temperature: 0 is greedy.
        top_k, top_p, min_p: Filters; 0, 1 and 0 turn them off.
        repetition, presence, frequency: Penalties, see Plane.begin; 1, 0 and 0 turn them off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def penalizes(self) -> bool:
        """Whether a penalty is on."""
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)

    @property
    def filters(self) -> dict[str, Any]:
        """The temperature and the filters, by name."""
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}

    @property
    def penalties(self) -> dict[str, Any]:
        """The three penalties, by name."""
        return {name: getattr(self, name) for name in ("repetition", "presence", "frequency")}


PLAIN = Controls()


class FullV:
    """vLLM's sampler on the CPU: each operation is a pass over [B, V] with torch's threads.

    The token is the argmax of p / Exp(1). The noise is torch's, so seed and offset are not read.
    """

    def __init__(self, B: int, V: int, temperature: float = 1.0):
        self.temperature = temperature
        self.logits = torch.zeros(B, V, dtype=torch.float32)

    def tokens(self, seed: Tensor, offset: Tensor) -> Tensor:
        p, undefined = probabilities(self.logits, self.temperature)
        noise = torch.empty_like(p).exponential_()
        return p.div_(noise).argmax(1).masked_fill_(undefined, -1)


class Parallel:
    """The operations of FullV with a block of rows for each sampler, which has one thread.

    The token is where the row's uniform falls on the running sum of p. Uniforms are drawn before,
    so tokens do not depend on the number of samplers. Samplers are Python threads; torch's
    operations run outside of Python's lock.
    """

    def __init__(self, B: int, V: int, temperature: float = 1.0, samplers: int | None = None):
        self.temperature = temperature
        self.logits = torch.zeros(B, V, dtype=torch.float32)
        self.samplers = samplers or usable_cores()
        self._uniform = torch.empty(B, dtype=torch.float64)
        # torch's thread count belongs to the thread that sets it.
        self._pool = ThreadPoolExecutor(
            self.samplers, initializer=torch.set_num_threads, initargs=(1,)
        )

    def tokens(self, seed: Tensor, offset: Tensor) -> Tensor:
        uniforms(self._uniform, seed, offset)
        B, m = len(self.logits), self.samplers
        blocks = [range(B * j // m, B * (j + 1) // m) for j in range(m)]
        return torch.cat(list(self._pool.map(self._block, blocks)))

    def _block(self, rows: range) -> Tensor:
        drawn = [torch.empty(0, dtype=torch.int64)]
        # Row by row: a row and its probabilities stay in the core's cache.
        for row in rows:
            p, undefined = probabilities(self.logits[row : row + 1], self.temperature)
            cdf = p.cumsum(1, dtype=torch.float64)
            u = self._uniform[row] * cdf[:, -1:]
            token = torch.searchsorted(cdf, u, right=True)[:, 0].clamp_max_(p.shape[1] - 1)
            drawn.append(token.masked_fill_(undefined, -1))
        return torch.cat(drawn)


class Offload:
    """The C++ core over a ring of one slot; rows are scanned whole."""

    hot = 0

    def __init__(
        self,
        B: int,
        V: int,
        controls: Controls = PLAIN,
        samplers: int | None = None,
        *,
        dtype: str = "fp32",
        buffer: Tensor | None = None,
    ):
        self.controls, self.rows = controls, B
        shape = RingShape(1, B, V, dtype)
        requests = B if controls.penalizes else 0
        self.plane = Plane(shape, samplers, requests=requests, buffer=buffer)
        ring = self.plane.ring
        for name, value in controls.filters.items():
            ring.parts[name].fill_(value)
        if controls.penalizes:
            ring.request.copy_(torch.arange(B))
        if self.hot:
            ring.parts["shape"].copy_(torch.tensor(shape.hot(self.hot)))

    @property
    def logits(self) -> Tensor:
        """Logits [B, V] of the next slot."""
        return self.plane.ring.logits[self.plane.slot]

    def begin(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.plane.begin(row, prompt, **self.controls.penalties)
        self.plane.drawn(row, output)

    def publish(self, seed: Tensor, offset: Tensor) -> int:
        """Draw the uniforms of the next slot, whose logits are written, and publish it."""
        uniforms(self.plane.ring.uniform[self.plane.slot], seed, offset)
        return self.plane.publish(self.rows)

    def tokens(self, seed: Tensor, offset: Tensor) -> Tensor:
        return self.plane.wait(self.publish(seed, offset), self.rows)


class Shvs(Offload):
    """Speculative hot-vocab sampling: the first `hot` logits of a row are scanned first.

    `supply` replaces the producer: the GPU that writes logits also writes, for each row, the
    largest logit beyond the hot ones and their mass, 8 bytes. Without it the samplers scan all.
    """

    def __init__(
        self,
        B: int,
        V: int,
        controls: Controls = PLAIN,
        samplers: int | None = None,
        *,
        hot: int,
        **options: Any,
    ):
        if not 0 < hot <= V:
            raise InvalidArgument(f"hot: expected 1 to {V}; got {hot}")
        self.hot = hot
        super().__init__(B, V, controls, samplers, **options)

    def supply(self) -> None:
        """Write the tail's statistics of the next slot, from its logits."""
        if self.hot == self.plane.shape.vocab:
            return
        largest, mass = reference.tail(self.logits, self.hot, self.controls.temperature)
        self.plane.ring.tail_max[self.plane.slot] = largest
        self.plane.ring.tail_sum[self.plane.slot] = mass

    def settled(self, tokens: Tensor, fetch: Callable[[Tensor, Tensor], None]) -> Tensor:
        """Return the tokens with the rows decided that need their tails.

        Args:
            tokens: int64 [B], of a slot with hot logits only.
            fetch: Called with (rows [n], out [n, V]); writes these rows of logits to `out`.
        """
        plane, ring = self.plane, self.plane.ring
        rows = (tokens == NEEDS_TAIL).nonzero()[:, 0]
        n, V = len(rows), plane.shape.vocab
        if n:
            tokens = tokens.clone()
            fetch(rows, ring.logits.view(-1)[: n * V].view(n, V))
            ring.uniform[0, :n] = ring.uniform[0, rows]  # the right side is a copy
            ring.parts["shape"][0] = torch.tensor(plane.shape.hot(0))
            tokens[rows] = plane.wait(plane.publish(n), n)
        return tokens


def probabilities(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return fp32 probabilities [B, V] and which rows are undefined [B].

    The passes of an engine's sampler. T = 0: all mass is on the first largest logit.
    """
    largest = logits.amax(1)  # NaN if there is one
    undefined = ~torch.isfinite(largest)
    z = torch.where(undefined[:, None], 0.0, logits) if undefined.any() else logits
    if temperature == 0:
        return torch.zeros_like(z).scatter_(1, z.argmax(1, keepdim=True), 1.0), undefined
    return (z if temperature == 1 else z / temperature).softmax(1), undefined
