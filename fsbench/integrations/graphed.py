"""Replay draws as CUDA graphs, so that the engine's thread pays for a replay, not for launches."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsbench.integrations.draw import Draw, DrawResult, Rows, TokenLogprobs
from fsbench.integrations.draw_kinds import DrawKind

_WARM_UP = 2  # the first call compiles, the second has all memory that a capture needs
_LOG = logging.getLogger("vllm.fsbench")


class Graph(NamedTuple):
    """A captured draw.

    Attributes:
        replay: draws again from the captured inputs.
        result: tensors that each replay overwrites.
        bytes: device memory that the graph takes.
    """

    replay: Callable[[], None]
    result: DrawResult
    bytes: int


Capture = Callable[[Callable[[], DrawResult]], Graph]


class GraphedDraw:
    """A Draw with one graph for each kind and graph size; batches are padded to the next size.

    Padding rows are greedy with the first row's hidden state: they cost least, and the screened
    head never computes one in full. `capture_all` captures the graphs of one kind; those of other
    kinds are captured when they are first used. Rows with a bias, a mask or penalties, batches
    larger than all sizes, and draws whose capture failed are drawn without a graph.

    A call overwrites the result of the call before. Temperature, seed and filters are copied only
    if their tensors differ from the last call's, so a tensor that is passed again must be
    unchanged.

    Args:
        draw: the draw to capture. It must not wait for the GPU.
        max_rows: rows of the largest graph.
        like: a tensor [*, D] with the dtype and device of hidden.
        V: tokens of the vocabulary; filters are off at top_k = V.
        lazily: whether graphs may be captured later. Ranks have to capture together, so not there.
        budget: device memory in bytes that graphs may take, if they are captured lazily. Ranks have
            no bound: memory that other processes take meanwhile counts as well, and differs
            between ranks.
        capture: captures a draw as a graph.
    """

    def __init__(
        self,
        draw: Draw,
        max_rows: int,
        like: Tensor,
        V: int,
        *,
        lazily: bool = True,
        budget: int = 2 << 30,
        capture: Capture | None = None,
    ):
        self._draw, self.supported = draw, draw.supported
        self._sizes = sizes_up_to(max_rows)
        self._lazily, self._budget = lazily, budget if lazily else math.inf
        self._capture = capture or cuda_capture(like.device)
        device = like.device
        ones = like.new_ones(max_rows, dtype=torch.float32)
        counters = torch.arange(max_rows, device=device)
        self._rows = Rows(
            torch.zeros(max_rows, like.shape[1], dtype=like.dtype, device=device),
            ones,
            counters.clone(),
            counters.clone(),
        )
        self._filters = (
            torch.full((max_rows,), V, dtype=torch.int32, device=device),
            ones.clone(),
            torch.zeros_like(ones),
        )
        self._copied: list[Tensor] = []  # the caller's tensors that were copied last
        self._graphs: dict[tuple[DrawKind, int], Graph | None] = {}

    def capture_all(self, kind: DrawKind) -> None:
        """Capture the graphs of a kind, the largest first, so that the others fit its memory."""
        for size in reversed(self._sizes):
            self._capture_graph(kind, size)

    def screens(self, B: int, largest_k: int) -> bool:
        return self._draw.screens(self._size(B) or B, largest_k)

    def __call__(self, rows: Rows) -> DrawResult:
        B = len(rows.hidden)
        size = self._size(B)
        eager = rows.bias is not None or rows.mask is not None or rows.penalties is not None
        if eager or size is None:
            return self._draw(rows)
        kind = DrawKind.from_rows(rows)
        if (kind, size) not in self._graphs and self._lazily:
            self._capture_graph(kind, size)
        graph = self._graphs.get((kind, size))
        if graph is None:
            return self._draw(rows)
        self._copy_inputs(rows, size)
        graph.replay()
        tokens, logprobs = graph.result
        if logprobs is not None:
            logprobs = TokenLogprobs(*(each[:B] for each in logprobs))
        return DrawResult(tokens[:B], logprobs)

    def _size(self, B: int) -> int | None:
        """Return the smallest graph size for B rows, or None."""
        index = bisect_left(self._sizes, B)
        return self._sizes[index] if index < len(self._sizes) else None

    def _copy_inputs(self, rows: Rows, size: int) -> None:
        B = len(rows.hidden)
        self._rows.hidden[:B].copy_(rows.hidden)
        self._rows.offset[:B].copy_(rows.offset)
        inputs = [rows.temperature, rows.seed, *(rows.filters or ())]
        copied = self._copied[: len(inputs)]
        if len(copied) == len(inputs) and all(a is b for a, b in zip(inputs, copied, strict=True)):
            return
        buffers = [self._rows.temperature, self._rows.seed, *self._filters]
        for buffer, values in zip(buffers, inputs, strict=False):
            buffer[:B].copy_(values)
        if size > B:  # zeros, or a NaN of an earlier batch, would be computed in full
            self._rows.hidden[B:size].copy_(rows.hidden[:1])
            self._rows.temperature[B:size].zero_()
        self._copied = inputs  # a reference keeps `is` from matching a new tensor at an old address

    def _capture_graph(self, kind: DrawKind, B: int) -> None:
        """Capture one graph, or store None if that fails or memory has run out."""
        hidden, temperature, seed, offset, *_ = self._rows
        top_k, top_p, min_p = self._filters
        rows = Rows(
            *(hidden[:B], temperature[:B], seed[:B], offset[:B]),
            filters=(top_k[:B], top_p[:B], min_p[:B]) if kind.filters else None,
            logprobs=kind.logprobs,
            screened=kind.screened,
        )
        graph = None
        if self._budget > 0:
            try:
                graph = self._capture(lambda: self._draw(rows))
            except RuntimeError as error:  # out of memory, or not capturable: requests go on
                _LOG.warning(
                    "fsbench: no graph of %d rows (%s), drawing without: %s", B, kind, error
                )
            else:
                self._budget -= graph.bytes
                if self._budget <= 0:
                    _LOG.warning("fsbench: graphs have used their memory; no more are captured")
        self._graphs[kind, B] = graph


def cuda_capture(device: torch.device) -> Capture:
    """Return a function that captures draws on this device into one memory pool."""
    pool: Any = torch.cuda.graph_pool_handle()

    def capture(draw: Callable[[], DrawResult]) -> Graph:
        free = torch.cuda.mem_get_info(device)[0]
        with torch.inference_mode():
            for _ in range(_WARM_UP):
                draw()
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the engine may make calls that a global capture would forbid.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                result = draw()
        return Graph(graph.replay, result, max(0, free - torch.cuda.mem_get_info(device)[0]))

    return capture


def sizes_up_to(rows: int) -> list[int]:
    """Return 1, 2, 4, multiples of 8 to 64, of 16 to 256, of 64 above, and `rows` itself."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, rows, 64), rows}
    return sorted(size for size in sizes if size <= rows)
