"""The four designs of SIMPLE's ablation (section 7.4): logits [B, V] in host memory -> tokens [B].

    FullV     an engine's GPU sampler moved to the CPU as it is: whole-vocabulary tensors in torch
    Parallel  the same, rows split over persistent samplers, uniforms drawn before
    Offload   the C++ core: penalties as sparse edits, filters before any softmax, one pass
    Shvs      the same on the hot tokens only, where that settles the row

B, V and the controls are fixed when one is made. Then:

    logits    [B, V]: to be written before a step
    begin     a request, with prompt and output so far, takes a row
    tokens    a step: int64 [B], counted as drawn; seed and offset are int64 [1] on the CPU

A row that is undefined (NaN, +inf, no finite logit) gives -1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument
from fsbench.simple import reference
from fsbench.simple.controls import PLAIN, Controls
from fsbench.simple.native import NEEDS_TAIL
from fsbench.simple.plane import Plane, checked_samplers, uniforms
from fsbench.simple.ring import RingShape


class _InTorch:
    """B rows of V logits, and what their requests have seen."""

    def __init__(self, B: int, V: int, controls: Controls = PLAIN):
        self.controls = controls
        self.logits = torch.zeros(B, V)
        self.seen: list[tuple[list[int], list[int]]] = [([], []) for _ in range(B)]

    def begin(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.seen[row] = (list(prompt), list(output))


class FullV(_InTorch):
    """vLLM's sampler on the CPU: every operation a pass over [B, V] with torch's own threads.

    Histograms of what was seen are made anew at every step, filters sort the vocabulary, and the
    token is the argmax of p / Exp(1): torch's noise, so seed and offset are not read.
    """

    def tokens(self, seed: Tensor, offset: Tensor) -> Tensor:
        p, undefined = probabilities(self.logits, self.seen, self.controls)
        noise = torch.empty_like(p).exponential_()
        tokens = p.div_(noise).argmax(1)
        return _counted(tokens.masked_fill_(undefined, -1), self.seen, self.controls)


class Parallel(_InTorch):
    """Rows split into a block per sampler, each doing what FullV does, on one thread.

    The token is where the row's uniform, drawn before, falls on the running sum of p: so it does
    not depend on the number of samplers. Samplers are Python threads; torch's operations run
    outside of Python's lock.
    """

    def __init__(self, B: int, V: int, controls: Controls = PLAIN, samplers: int | None = None):
        super().__init__(B, V, controls)
        self.samplers = checked_samplers(samplers)
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
        # Row by row: a row and what is made of it stay in the core's cache.
        for row in rows:
            seen = self.seen[row : row + 1]
            p, undefined = probabilities(self.logits[row : row + 1], seen, self.controls)
            cdf = p.cumsum(1, dtype=torch.float64)
            u = self._uniform[row] * cdf[:, -1:]
            token = torch.searchsorted(cdf, u, right=True)[:, 0].clamp_max_(p.shape[1] - 1)
            drawn.append(_counted(token.masked_fill_(undefined, -1), seen, self.controls))
        return torch.cat(drawn)


class Offload:
    """The C++ core over a ring of one slot, rows scanned whole."""

    hot = 0

    def __init__(
        self,
        B: int,
        V: int,
        controls: Controls = PLAIN,
        samplers: int | None = None,
        *,
        dtype: str = "fp32",
        slots: int = 1,
        order: Tensor | None = None,
        buffer: Tensor | None = None,
    ):
        self.controls, self.rows = controls, B
        shape = RingShape(slots, B, V, dtype=dtype)
        self.plane = Plane(
            shape, samplers, requests=B if controls.penalises else 0, order=order, buffer=buffer
        )
        ring = self.plane.ring
        for name, value in controls.law.items():
            ring.parts[name].fill_(value)
        if controls.penalises:
            ring.request.copy_(torch.arange(B))
        if self.hot:
            ring.parts["shape"].copy_(torch.tensor(shape.hot(self.hot)))

    @property
    def logits(self) -> Tensor:
        """[B, V] of the next slot."""
        return self.plane.ring.logits[self.plane.slot, 0]

    def begin(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.plane.begin(row, prompt, **self.controls.penalties)
        self.plane.drawn(row, output)

    def publish(self, seed: Tensor, offset: Tensor) -> int:
        """Draw the uniforms of the next slot, whose logits are there, and hand it over."""
        uniforms(self.plane.ring.uniform[self.plane.slot], seed, offset)
        return self.plane.publish(self.rows)

    def tokens(self, seed: Tensor, offset: Tensor) -> Tensor:
        return self.plane.wait(self.publish(seed, offset), self.rows)


class Shvs(Offload):
    """Speculative hot-vocab sampling: the first `hot` logits of a row are looked at first.

    `supply` stands for the producer: the GPU that writes logits also writes, for each row, the
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
        """The tokens of a ring of one slot that had the hot logits only, all of them decided.

        fetch: (rows, where [n, V]) puts the whole rows that need their tails there.
        """
        plane, ring = self.plane, self.plane.ring
        rows = (tokens == NEEDS_TAIL).nonzero()[:, 0]
        n, V = len(rows), plane.shape.vocab
        if n:
            tokens = tokens.clone()
            fetch(rows, ring.logits.view(-1)[: n * V].view(n, V))
            ring.uniform[0, :n] = ring.uniform[0, rows]  # a copy is made before it is written
            ring.parts["shape"][0] = torch.tensor(plane.shape.hot(0))
            tokens[rows] = plane.wait(plane.publish(n), n)
        return tokens


def probabilities(
    logits: Tensor, seen: Sequence[tuple[list[int], list[int]]], controls: Controls
) -> tuple[Tensor, Tensor]:
    """([B, V] fp32 probabilities after penalties, temperature and filters; undefined rows [B]).

    The passes of an engine's sampler, in its order: penalties from histograms [B, V], temperature,
    min-p, top-k and top-p by one sort, softmax. T = 0: all mass on the first largest logit.
    """
    c = controls
    z = logits.float()
    if c.penalises:
        z = reference.penalised(z, *zip(*seen, strict=True), **c.penalties)
    largest = z.amax(1)  # NaN if there is one
    undefined = ~torch.isfinite(largest)
    if undefined.any():
        z = torch.where(undefined[:, None], 0.0, z)
    if c.temperature == 0:
        p = torch.zeros_like(z).scatter_(1, z.argmax(1, keepdim=True), 1.0)
        return p, undefined
    if c.temperature != 1:
        z = z / c.temperature
    if c.min_p:
        p = z.softmax(1)
        z = z.masked_fill(p < c.min_p * p.amax(1, keepdim=True), -torch.inf)
    if c.top_k or c.top_p < 1:
        ranked, index = z.sort(dim=1, descending=True)
        if c.top_k:
            ranked[:, c.top_k :] = -torch.inf
        if c.top_p < 1:
            p = ranked.softmax(1)
            ranked.masked_fill_(p.cumsum(1) - p >= c.top_p, -torch.inf)
        z = torch.empty_like(z).scatter_(1, index, ranked)
    return z.softmax(1), undefined


def _counted(
    tokens: Tensor, seen: Sequence[tuple[list[int], list[int]]], controls: Controls
) -> Tensor:
    if controls.penalises:
        for (_, output), token in zip(seen, tokens.tolist(), strict=True):
            if token >= 0:
                output.append(token)
    return tokens
