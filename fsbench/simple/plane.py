"""The decision plane: persistent samplers that take steps from a ring and return tokens in it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsbench.errors import FsbenchError, InvalidArgument
from fsbench.simple.native import core
from fsbench.simple.ring import Ring, RingShape


class PlaneStalled(FsbenchError, RuntimeError):
    """A step was not decided in time: the samplers are gone, or starved of CPU time."""


def cores() -> int:
    """CPU cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def checked_samplers(samplers: int | None) -> int:
    """How many samplers: one per core for None. Raises InvalidArgument below 1."""
    count = cores() if samplers is None else samplers
    if count < 1:
        raise InvalidArgument(f"samplers: expected >= 1; got {count}")
    return count


def uniforms(out: Tensor, seed: Tensor, offset: Tensor) -> None:
    """Fill out [B] (float64, contiguous) with the step's numbers in (0, 1).

    Philox keyed by the seed and counted by row and step, so a token depends neither on the number
    of samplers nor on the batch. seed: int64 [1] or [B], on the CPU; with [B] a request has its own
    and its row does not count. offset: int64 [1], the step.
    """
    core().fsb_uniforms(out.data_ptr(), len(out), seed.data_ptr(), len(seed), int(offset))


class Plane:
    """m samplers, threads of this process that never hold Python's lock, over a ring.

    Each row goes to whichever sampler is free, so a row that takes long (a tail to be scanned)
    delays no other. SIMPLE gives each sampler a fixed block of rows; tokens are the same either
    way, because every row has its own uniform.

    Args:
        shape: of the ring. samplers: how many; None for one per core.
        requests: how many requests have penalties kept for them (`begin`).
        order: int64 [V]: the token at each place of a row, where the head's rows were put into
            another order (hot tokens first). None: places are tokens.
        buffer: the ring's memory; see Ring.

    A step: write the slot's logits and what else it needs (`ring`), `publish`, then `wait`. Other
    steps may be published in between, as many as there are slots.
    """

    def __init__(
        self,
        shape: RingShape,
        samplers: int | None = None,
        *,
        requests: int = 0,
        order: Tensor | None = None,
        buffer: Tensor | None = None,
    ):
        self.shape = shape
        self.samplers = checked_samplers(samplers)
        self.requests = requests
        places = None
        if order is not None:
            if not torch.equal(order.sort().values, torch.arange(shape.vocab)):
                raise InvalidArgument(f"order: expected a permutation of [0, {shape.vocab})")
            places = order.to(torch.int32).contiguous()
        self.ring = Ring(shape, buffer)
        self._core = core()
        self._next = 0
        self._plane = self._core.fsb_plane_new(
            self.ring.pointer(),
            self.samplers,
            requests,
            None if places is None else places.data_ptr(),
        )
        if not self._plane:
            raise PlaneStalled(f"cannot start {self.samplers} samplers")
        # The ring is an argument so that its memory outlives the threads that read it.
        self._close = weakref.finalize(self, _delete, self._core, self._plane, self.ring)

    def close(self) -> None:
        """Stop the samplers. Also done when the plane is garbage."""
        self._close()

    @property
    def slot(self) -> int:
        """Where the next step to be published belongs."""
        return self._next % self.shape.slots

    def publish(self, rows: int) -> int:
        """Hand the first rows of `slot` to the samplers; returns the step's number."""
        if not 1 <= rows <= self.shape.rows:
            raise InvalidArgument(f"rows: expected 1 to {self.shape.rows}; got {rows}")
        self._next += 1
        return self._core.fsb_publish(self.ring.pointer(), rows)

    def wait(self, step: int, rows: int, timeout_s: float = 60.0) -> Tensor:
        """Tokens of a step, int64 [rows]: a view of its slot.

        -1: a row with NaN or +inf, without a finite logit, or of no valid T. -2: a row of which
        only the hot tokens were there, and which needs the others.
        """
        late = self._core.fsb_wait(self.ring.pointer(), step, rows, int(1000 * timeout_s))
        if late:
            raise PlaneStalled(f"step {step}: not decided within {timeout_s:g} s")
        return self.ring.tokens[step % self.shape.slots, :rows]

    def begin(
        self,
        request: int,
        prompt: Sequence[int] = (),
        *,
        repetition: float = 1.0,
        presence: float = 0.0,
        frequency: float = 0.0,
    ) -> None:
        """A new request takes the penalties' row `request`, which no step in flight uses.

        Repetition divides positive logits of tokens in prompt or output and multiplies negative
        ones; then frequency is subtracted once per output token, presence once if there is any.
        A step names the row in ring.request; the samplers count what they draw.
        """
        self._require(request)
        if not repetition > 0:
            raise InvalidArgument(f"repetition: expected a number above 0; got {repetition}")
        tokens = self._tokens(prompt)
        self._core.fsb_plane_begin(
            self._plane, request, tokens.data_ptr(), len(tokens), repetition, presence, frequency
        )

    def drawn(self, request: int, tokens: Sequence[int]) -> None:
        """Count tokens as drawn, for a request that comes from elsewhere with its output."""
        self._require(request)
        for token in self._tokens(tokens).tolist():
            self._core.fsb_plane_output(self._plane, request, token)

    def _require(self, request: int) -> None:
        if not 0 <= request < self.requests:
            raise InvalidArgument(f"request: expected 0 to {self.requests - 1}; got {request}")

    def _tokens(self, tokens: Sequence[int]) -> Tensor:
        given = torch.as_tensor(tokens, dtype=torch.int64).contiguous()
        if len(given) and not bool(((given >= 0) & (given < self.shape.vocab)).all()):
            raise InvalidArgument(f"tokens: expected ids in [0, {self.shape.vocab})")
        return given


def _delete(library: Any, plane: int, ring: Ring) -> None:
    library.fsb_plane_delete(plane)
    del ring
