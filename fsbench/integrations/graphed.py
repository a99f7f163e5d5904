"""A draw as CUDA graphs beside the engine's own: its thread pays for a replay, not for a launch."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsbench.integrations.draw import Draw, DrawResult, Rows, Told
from fsbench.integrations.draw_kinds import DrawKind

_WARM_UP = 2  # the first call compiles, the second has all memory that a capture needs
_LOG = logging.getLogger("vllm.fsbench")


class Graph(NamedTuple):
    """A captured draw. bytes: what the device has less of since."""

    replay: Callable[[], None]
    drawn: DrawResult
    bytes: int


Capture = Callable[[Callable[[], DrawResult]], Graph]


class GraphedDraw:
    """See Draw. A graph for each kind and each of some batch sizes; others fill up to the next.

    The rows that fill up are greedy ones of the first row's hidden state: they cost least, and no
    screen has to compute one in full. `capture_all` makes one kind's graphs; of other kinds each is
    made when it is first used. Drawn without a graph: rows with a bias, a mask or penalties,
    batches larger than all sizes, and what could not be captured.

    Args:
        draw: what is captured. It must not wait for the GPU.
        rows: of the largest graph.
        like: a tensor of the dtype and on the device of hidden, [*, D].
        V: tokens of the vocabulary; filters are off at top_k = V.
        lazily: whether graphs may be made later; not where ranks have to make them together.
        budget: bytes of the device that graphs may take.
        capture: makes a graph of a draw.

    What is drawn is overwritten by the next call. Temperature, seed and filters are copied if they
    are other tensors than in the last call, so those that are passed again must be unchanged.
    """

    def __init__(
        self,
        draw: Draw,
        rows: int,
        like: Tensor,
        V: int,
        *,
        lazily: bool = True,
        budget: int = 2 << 30,
        capture: Capture | None = None,
    ):
        self._draw, self.able = draw, draw.able
        self._sizes = sizes_up_to(rows)
        self._lazily, self._left = lazily, budget
        self._capture = capture or cuda_capture(like.device)
        device = like.device
        ones = like.new_ones(rows, dtype=torch.float32)
        counters = torch.arange(rows, device=device)
        self._rows = Rows(
            torch.zeros(rows, like.shape[1], dtype=like.dtype, device=device),
            ones,
            counters.clone(),
            counters.clone(),
        )
        self._filters = (
            torch.full((rows,), V, dtype=torch.int32, device=device),
            ones.clone(),
            torch.zeros_like(ones),
        )
        self._given: list[Tensor] = []
        self._graphs: dict[tuple[DrawKind, int], Graph | None] = {}

    def capture_all(self, kind: DrawKind) -> None:
        """Make the graphs of a kind, the largest first, so that the others fit into its memory."""
        for B in reversed(self._sizes):
            self._make(kind, B)

    def screens(self, B: int, largest_k: int) -> bool:
        return self._draw.screens(self._size(B) or B, largest_k)

    def __call__(self, rows: Rows) -> DrawResult:
        B = len(rows.hidden)
        size = self._size(B)
        eager = rows.bias is not None or rows.mask is not None or rows.penalties is not None
        if eager or size is None:
            return self._draw(rows)
        kind = DrawKind.of(rows)
        if (kind, size) not in self._graphs and self._lazily:
            self._make(kind, size)
        graph = self._graphs.get((kind, size))
        if graph is None:
            return self._draw(rows)
        self._fill(rows, size)
        graph.replay()
        tokens, told = graph.drawn
        return DrawResult(tokens[:B], None if told is None else Told(*(each[:B] for each in told)))

    def _size(self, B: int) -> int | None:
        """Rows of the graphs that B rows take, or None if there are too many for one."""
        place = bisect_left(self._sizes, B)
        return self._sizes[place] if place < len(self._sizes) else None

    def _fill(self, rows: Rows, size: int) -> None:
        B = len(rows.hidden)
        self._rows.hidden[:B].copy_(rows.hidden)
        self._rows.offset[:B].copy_(rows.offset)
        given = [rows.temperature, rows.seed, *(rows.filters or ())]
        kept = self._given[: len(given)]
        if len(kept) == len(given) and all(a is b for a, b in zip(given, kept, strict=True)):
            return
        own = [self._rows.temperature, self._rows.seed, *self._filters]
        for mine, theirs in zip(own, given, strict=False):
            mine[:B].copy_(theirs)
        if size > B:  # zeros, or a NaN of an earlier batch, would be computed in full
            self._rows.hidden[B:size].copy_(rows.hidden[:1])
            self._rows.temperature[B:size].zero_()
        self._given = given  # kept, so that no other tensor can pass for them

    def _make(self, kind: DrawKind, B: int) -> None:
        """Capture one graph, or remember that there is none."""
        hidden, temperature, seed, offset, *_ = self._rows
        top_k, top_p, min_p = self._filters
        rows = Rows(
            *(hidden[:B], temperature[:B], seed[:B], offset[:B]),
            filters=(top_k[:B], top_p[:B], min_p[:B]) if kind.filters else None,
            asked=kind.asked,
            screened=kind.screened,
        )
        graph = None
        if self._left > 0:
            try:
                graph = self._capture(lambda: self._draw(rows))
            except RuntimeError as error:  # no memory, or what cannot be captured: requests go on
                _LOG.warning(
                    "fsbench: no graph of %d rows (%s), drawing without: %s", B, kind, error
                )
            else:
                self._left -= graph.bytes
                if self._left <= 0:
                    _LOG.warning("fsbench: graphs have taken all their memory; no more are made")
        self._graphs[kind, B] = graph


def cuda_capture(device: torch.device) -> Capture:
    """Captures on this device, all into one pool of memory."""
    if device.type != "cuda":
        return lambda draw: Graph(lambda: None, draw(), 0)
    pool: Any = torch.cuda.graph_pool_handle()

    def capture(draw: Callable[[], DrawResult]) -> Graph:
        free = torch.cuda.mem_get_info(device)[0]
        with torch.inference_mode():
            for _ in range(_WARM_UP):
                draw()
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the engine may go on with what a capture would not allow them.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                drawn = draw()
        return Graph(graph.replay, drawn, max(0, free - torch.cuda.mem_get_info(device)[0]))

    return capture


def sizes_up_to(rows: int) -> list[int]:
    """1, 2, 4, multiples of 8 up to 64, of 16 up to 256, of 64 above, and `rows` itself."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, rows, 64), rows}
    return sorted(size for size in sizes if size <= rows)
