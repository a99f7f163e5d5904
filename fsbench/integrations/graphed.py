"""A draw as CUDA graphs beside the engine's own: its thread pays for a replay, not for a launch."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsbench.integrations.draw import Draw

_WARM_UP = 2  # the first call compiles, the second has all memory that a capture needs


class GraphedDraw:
    """See Draw. One graph for each of some batch sizes; a batch is filled up to the next of them.

    The rows that fill it up are what was there before. A batch larger than all of them is drawn
    without a graph.

    Args:
        draw: what is captured. It must not wait for the GPU.
        rows: of the largest graph.
        like: a tensor of the dtype and on the device of hidden, [*, D].

    The tokens are overwritten by the next call. Temperature and seed are copied if they are other
    tensors than in the last call, so those that are passed again must be unchanged.
    """

    def __init__(self, draw: Draw, rows: int, like: Tensor):
        self._draw = draw
        self._sizes = sizes_up_to(rows)
        device = like.device
        counters = torch.arange(rows, device=device)
        self._hidden = torch.zeros(rows, like.shape[1], dtype=like.dtype, device=device)
        self._temperature = torch.ones(rows, device=device)
        self._seed, self._offset = counters.clone(), counters.clone()
        self._given: tuple[Tensor, Tensor] | None = None
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            for B in reversed(self._sizes):  # so that smaller graphs fit into the pool
                self._graphs[B] = self._captured(B, pool)

    def declines(self, temperature: np.ndarray) -> str | None:
        return self._draw.declines(temperature)

    def __call__(self, hidden: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        B = hidden.shape[0]
        if self._sizes[-1] < B:
            return self._draw(hidden, temperature, seed, offset)
        graph, tokens = self._graphs[self._sizes[bisect_left(self._sizes, B)]]
        self._hidden[:B].copy_(hidden)
        self._offset[:B].copy_(offset)
        given = self._given
        if given is None or given[0] is not temperature or given[1] is not seed:
            self._temperature[:B].copy_(temperature)
            self._seed[:B].copy_(seed)
            self._given = (temperature, seed)  # kept, so that no other tensor can pass for them
        graph.replay()
        return tokens[:B]

    def _captured(self, B: int, pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        rows = (each[:B] for each in (self._hidden, self._temperature, self._seed, self._offset))
        arguments = tuple(rows)
        for _ in range(_WARM_UP):
            self._draw(*arguments)
        torch.cuda.synchronize(self._hidden.device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the engine may go on with what a capture would not allow them.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            tokens = self._draw(*arguments)
        return graph, tokens


def sizes_up_to(rows: int) -> list[int]:
    """1, 2, 4, multiples of 8 up to 64, of 16 up to 256, of 64 above, and `rows` itself."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, rows, 64), rows}
    return sorted(size for size in sizes if size <= rows)
