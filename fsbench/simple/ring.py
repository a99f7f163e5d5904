"""The ring that a producer of logits and the samplers share: one buffer, and views of its parts."""

from __future__ import annotations

import ctypes
import math
import mmap
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument
from fsbench.simple.native import CRing

ELEMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Types of logits that a ring can hold."""

_ALIGNMENT = 64  # bytes of a cache line: no two parts share one


@dataclass(frozen=True)
class RingShape:
    """Sizes of a ring.

    Attributes:
        slots: Steps that may be in flight.
        rows: Largest batch size B.
        vocab: V.
        dtype: Type of the logits, one of ELEMENTS.
    """

    slots: int
    rows: int
    vocab: int
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        if self.rows >= 2**16:
            raise InvalidArgument(f"rows: expected fewer than 65536; got {self.rows}")

    def parts(self) -> dict[str, tuple[torch.dtype, tuple[int, ...], Any]]:
        """Return name -> (dtype, shape, initial value) of the buffer's parts, in their order."""
        cells = (self.slots, self.rows)
        i32, i64, f32 = torch.int32, torch.int64, torch.float32
        return {
            "state": (i32, (16,), 0),
            "work": (i64, (self.slots,), -1),
            "done": (i32, (self.slots,), 0),
            "shape": (i32, (self.slots, 3), (0, self.vocab, self.vocab)),
            "uniform": (torch.float64, cells, 0.5),
            "temperature": (f32, cells, 1),
            "top_p": (f32, cells, 1),
            "min_p": (f32, cells, 0),
            "top_k": (i32, cells, 0),
            "tail_max": (f32, cells, math.nan),
            "tail_sum": (f32, cells, math.nan),
            "request": (i32, cells, -1),
            "tokens": (i64, cells, -1),
            "logprob": (f32, cells, math.nan),
            "logits": (ELEMENTS[self.dtype], (*cells, self.vocab), None),
        }

    def bytes(self) -> int:
        """Return the size of the buffer."""
        return sum(_size(dtype, shape) for dtype, shape, _ in self.parts().values())

    def hot(self, hot: int, present: int | None = None) -> tuple[int, int, int]:
        """Return a slot's `shape` entry: hot tokens, tokens in the slot, stride of its rows.

        Args:
            hot: 0 for no hot path.
            present: Logits of each row that were copied, the first of it; None for all.
        """
        present = self.vocab if present is None else present
        return hot, present, present


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    size = dtype.itemsize * math.prod(shape)
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Ring:
    """A buffer and views of its parts as tensors: logits [slots, rows, V], uniform [slots, rows].

    A slot's rows have no filter, T = 1 and no penalties until something else is written.

    Args:
        buffer: uint8 memory of at least shape.bytes(), aligned to 64 bytes (pinned, for copies from
            a GPU); None for shared memory that the ring allocates.
    """

    def __init__(self, shape: RingShape, buffer: Tensor | None = None):
        self.shape = shape
        if buffer is None:
            buffer = torch.frombuffer(mmap.mmap(-1, shape.bytes()), dtype=torch.uint8)
        self.parts: dict[str, Tensor] = {}
        offset = 0
        for name, (dtype, sizes, value) in shape.parts().items():
            end = offset + math.prod(sizes) * dtype.itemsize
            self.parts[name] = buffer[offset:end].view(dtype).view(sizes)
            offset += _size(dtype, sizes)
            if value is not None:
                self.parts[name].copy_(torch.tensor(value))
        pointers = {name: part.data_ptr() for name, part in self.parts.items()}
        self.c = CRing(
            slots=shape.slots,
            rows=shape.rows,
            vocab=shape.vocab,
            elements=list(ELEMENTS).index(shape.dtype),
            **pointers,
        )

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["parts"][name]
        except KeyError:
            raise AttributeError(name) from None

    def pointer(self) -> Any:
        """Return a pointer for the core's functions."""
        return ctypes.byref(self.c)
