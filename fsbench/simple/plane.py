"""The decision plane: persistent samplers that take steps from a ring and return tokens in it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsbench.cores import usable_cores
from fsbench.errors import FsbenchError, InvalidArgument
from fsbench.simple.native import core
from fsbench.simple.ring import Ring, RingShape


class PlaneStalled(FsbenchError, RuntimeError):
    """A step was not decided in time: the samplers have ended, or get no CPU time."""


def uniforms(out: Tensor, seed: Tensor, offset: Tensor) -> None:
    """Fill `out` with the step's uniform numbers in (0, 1).

    Philox has the seed as its key and row and step as its counter, so a token depends neither on
    the number of samplers nor on the batch.

    Args:
        out: float64 [B], contiguous.
        seed: int64 [1] or [B], on the CPU. With [B] each request has a seed, and its row does not
            count.
        offset: int64 [1], the step.
    """
    core().fsb_uniforms(out.data_ptr(), len(out), seed.data_ptr(), len(seed), int(offset))


class Plane:
    """Persistent samplers over a ring: threads of this process that never hold Python's lock.

    The next free sampler takes a row, so a row that takes long (a tail to be scanned) delays no
    other. SIMPLE gives each sampler a fixed block of rows; tokens are the same either way, because
    every row has its uniform.

    Args:
        shape: Sizes of the ring.
        samplers: Number of threads; None for one per core.
        requests: Number of requests whose penalties are kept (`begin`).
        buffer: Memory of the ring; see Ring.

    A step: write the slot's logits and what else it needs (`ring`), `publish`, then `wait`. Other
    steps may be published in between, up to the number of slots.
    """

    def __init__(
        self,
        shape: RingShape,
        samplers: int | None = None,
        *,
        requests: int = 0,
        buffer: Tensor | None = None,
    ):
        self.shape = shape
        self.samplers = samplers or usable_cores()
        self.requests = requests
        self.ring = Ring(shape, buffer)
        self._core = core()
        self._next = 0
        self._plane = self._core.fsb_plane_new(self.ring.pointer(), self.samplers, requests)
        if not self._plane:
            raise PlaneStalled(f"cannot start {self.samplers} samplers")
        # The ring is an argument so that its memory outlives the threads that read it.
        self._close = weakref.finalize(self, _delete, self._core, self._plane, self.ring)

    def close(self) -> None:
        """Stop the samplers. The garbage collector does the same."""
        self._close()

    @property
    def slot(self) -> int:
        """The slot of the next step to be published."""
        return self._next % self.shape.slots

    def publish(self, rows: int) -> int:
        """Hand the first rows of `slot` to the samplers; return the step's number."""
        if not 1 <= rows <= self.shape.rows:
            raise InvalidArgument(f"rows: expected 1 to {self.shape.rows}; got {rows}")
        self._next += 1
        return self._core.fsb_publish(self.ring.pointer(), rows)

    def wait(self, step: int, rows: int, timeout_s: float = 60.0) -> Tensor:
        """Return the tokens of a step, int64 [rows], a view of its slot.

        A row is -1 if it has NaN or +inf, no finite logit or an invalid temperature, and -2 if only
        its hot logits were present and it needs the others.

        Raises:
            PlaneStalled: The step is not decided after `timeout_s`.
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
        """Start a request in row `request` of the penalties, which no step in flight uses.

        Repetition divides positive logits of tokens in prompt or output and multiplies negative
        ones; then frequency is subtracted once per output token, presence once if there is any.
        A step names the row in ring.request; the samplers count the tokens that they draw.
        """
        self._require(request)
        if not repetition > 0:
            raise InvalidArgument(f"repetition: expected a number above 0; got {repetition}")
        tokens = self._tokens(prompt)
        self._core.fsb_plane_begin(
            self._plane, request, tokens.data_ptr(), len(tokens), repetition, presence, frequency
        )

    def drawn(self, request: int, tokens: Sequence[int]) -> None:
        """Count tokens as drawn, for a request that already has output."""
        self._require(request)
        for token in self._tokens(tokens).tolist():
            self._core.fsb_plane_output(self._plane, request, token)

    def _require(self, request: int) -> None:
        if not 0 <= request < self.requests:
            raise InvalidArgument(f"request: expected 0 to {self.requests - 1}; got {request}")

    def _tokens(self, tokens: Sequence[int]) -> Tensor:
        ids = torch.as_tensor(tokens, dtype=torch.int64).contiguous()
        if len(ids) and not bool(((ids >= 0) & (ids < self.shape.vocab)).all()):
            raise InvalidArgument(f"tokens: expected ids in [0, {self.shape.vocab})")
        return ids


def _delete(library: Any, plane: int, ring: Ring) -> None:
    library.fsb_plane_delete(plane)
    del ring
