"""The ring that a producer of logits and the samplers share: one buffer, and views of its parts."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
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

    def parts(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Every part of the buffer, in order: name -> (dtype, shape)."""
        cells = (self.slots, self.rows)
        return {
            "state": (torch.int32, (16,)),
            "work": (torch.int64, (self.slots,)),
            "done": (torch.int32, (self.slots,)),
            "shape": (torch.int32, (self.slots, 3)),
            "uniform": (torch.float64, cells),
            "temperature": (torch.float32, cells),
            "top_p": (torch.float32, cells),
            "min_p": (torch.float32, cells),
            "top_k": (torch.int32, cells),
            "tail_max": (torch.float32, cells),
            "tail_sum": (torch.float32, cells),
            "request": (torch.int32, cells),
            "tokens": (torch.int64, cells),
            "logprob": (torch.float32, cells),
            "logits": (
                ELEMENTS[self.dtype],
                (self.slots, self.shards, self.rows, self.vocab // self.shards),
            ),
        }

    def bytes(self) -> int:
        """Size of the buffer."""
        return sum(_size(dtype, shape) for dtype, shape in self.parts().values())

    def hot(self, hot: int, present: int | None = None) -> tuple[int, int, int]:
        """A slot's `shape` entry: how many tokens are hot, how many are in the slot, row stride.

        hot = 0: no hot path. present < vocab: only the first so many of each row were copied.
        """
        present = self.vocab if present is None else present
        return hot, present, present // self.shards


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    size = dtype.itemsize * int(np.prod(shape))
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
        for name, (dtype, sizes) in shape.parts().items():
            count = int(np.prod(sizes)) * dtype.itemsize
            self.parts[name] = flat[at : at + count].view(dtype).view(sizes)
            at += _size(dtype, sizes)
        if fresh:
            self._initialise()
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

    def _initialise(self) -> None:
        for name, value in {
            **dict.fromkeys(("state", "done", "top_k", "min_p"), 0),
            **dict.fromkeys(("temperature", "top_p"), 1),
            **dict.fromkeys(("tail_max", "tail_sum", "logprob"), float("nan")),
            **dict.fromkeys(("request", "tokens", "work"), -1),
            "uniform": 0.5,
        }.items():
            self.parts[name].fill_(value)
        width = self.shape.vocab // self.shape.shards
        self.parts["shape"].copy_(torch.tensor([0, self.shape.vocab, width]))

    def pointer(self) -> Any:
        """For the core's functions."""
        return ctypes.byref(self.c)
