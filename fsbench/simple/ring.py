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

_ALIGNMENT = 64  # of every part: a cache line of its own


@dataclass(frozen=True)
class RingShape:
    """slots: steps that may be in flight. rows: largest B. vocab: V. shards: of V, as with TP.

    A step's logits lie as [shards, rows, V / shards], so every rank of a TP group copies its own
    part in one piece, and no sampler has to put them together.
    """

    slots: int
    rows: int
    vocab: int
    shards: int = 1
    dtype: str = "fp32"
    spin_us: int = 20

    def __post_init__(self) -> None:
        for name in ("slots", "rows", "vocab", "shards"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name}: expected >= 1; got {getattr(self, name)}")
        if self.rows >= 2**16:
            raise InvalidArgument(f"rows: expected fewer than 65536; got {self.rows}")
        if self.vocab % self.shards:
            raise InvalidArgument(
                f"shards: expected a divisor of vocab {self.vocab}; got {self.shards}"
            )
        if self.dtype not in ELEMENTS:
            raise InvalidArgument(f"dtype: expected {' or '.join(ELEMENTS)}; got {self.dtype!r}")

    def parts(self) -> dict[str, tuple[torch.dtype, tuple[int, ...], Any]]:
        """Every part of the buffer, in order: name -> (dtype, shape, value in a fresh one)."""
        cells, width = (self.slots, self.rows), self.vocab // self.shards
        logits = (self.slots, self.shards, self.rows, width)
        i32, i64, f32 = torch.int32, torch.int64, torch.float32
        return {
            "state": (i32, (16,), 0),
            "work": (i64, (self.slots,), -1),
            "done": (i32, (self.slots,), 0),
            "shape": (i32, (self.slots, 3), (0, self.vocab, width)),
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
            "logits": (ELEMENTS[self.dtype], logits, None),
        }

    def bytes(self) -> int:
        """Size of the buffer."""
        return sum(_size(dtype, shape) for dtype, shape, _ in self.parts().values())

    def hot(self, hot: int, present: int | None = None) -> tuple[int, int, int]:
        """A slot's `shape` entry: how many tokens are hot, how many are in the slot, row stride.

        hot = 0: no hot path. present < vocab: only the first so many of each row were copied.
        """
        present = self.vocab if present is None else present
        return hot, present, present // self.shards


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    size = dtype.itemsize * math.prod(shape)
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Ring:
    """A buffer and views of its parts as tensors: logits [slots, shards, rows, V / shards] etc.

    A slot's rows have no filter, T = 1 and no penalties until something else is written.

    Args:
        buffer: memory of at least shape.bytes(), aligned to 64 bytes: a uint8 tensor (pinned, for
            copies from a GPU) or a buffer such as `SharedMemory.buf`; None for memory of its own,
            which forked processes share.
        fresh: whether to write the initial values; False in the second process that attaches.
    """

    def __init__(self, shape: RingShape, buffer: Any = None, fresh: bool = True):
        self.shape = shape
        if buffer is None:
            buffer = mmap.mmap(-1, shape.bytes())
        if isinstance(buffer, Tensor):
            flat = buffer[: shape.bytes()]
        else:
            flat = torch.frombuffer(buffer, dtype=torch.uint8, count=shape.bytes())
        self.parts: dict[str, Tensor] = {}
        at = 0
        for name, (dtype, sizes, value) in shape.parts().items():
            count = math.prod(sizes) * dtype.itemsize
            self.parts[name] = flat[at : at + count].view(dtype).view(sizes)
            at += _size(dtype, sizes)
            if fresh and value is not None:
                self.parts[name].copy_(torch.tensor(value))
        pointers = {name: part.data_ptr() for name, part in self.parts.items()}
        self.c = CRing(
            slots=shape.slots,
            rows=shape.rows,
            vocab=shape.vocab,
            shards=shape.shards,
            elements=list(ELEMENTS).index(shape.dtype),
            spin_us=shape.spin_us,
            **pointers,
        )

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["parts"][name]
        except KeyError:
            raise AttributeError(name) from None

    def pointer(self) -> Any:
        """For the core's functions."""
        return ctypes.byref(self.c)
