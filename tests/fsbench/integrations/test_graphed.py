"""The graphs that are captured, when, and what is drawn without; real ones: test_graphed_gpu.py."""

from __future__ import annotations

import pytest
import torch

from fsbench.integrations.draw import DrawResult, LogprobRequest, Rows, TokenLogprobs
from fsbench.integrations.draw_kinds import DrawKind
from fsbench.integrations.graphed import Graph, GraphedDraw, sizes_up_to
from fsbench.integrations.routing import Need

V, D, ROWS = 100, 8, 20


class EchoDraw:
    """A draw whose token encodes its row's inputs, and a capture that replays it.

    captured: (kind, rows) of each graph. eager: calls without a graph. replayed: the last replay's
    inputs.
    """

    supported = Need.FILTER

    def __init__(self, bytes_each: int = 0, error: Exception | None = None):
        self.captured: list[tuple[DrawKind, int]] = []
        self.eager = 0
        self._bytes, self._error, self._capturing = bytes_each, error, False

    def __call__(self, rows: Rows) -> DrawResult:
        if self._capturing:
            self.captured.append((DrawKind.from_rows(rows), len(rows.hidden)))
            self.replayed = rows
        else:
            self.eager += 1
        tokens = rows.seed + 1000 * rows.offset + (rows.temperature * 100000).long()
        if rows.filters is not None:
            tokens = tokens + 10000000 * rows.filters[0]
        if rows.logprobs is None:
            return DrawResult(tokens)
        ids = tokens[:, None].repeat(1, 1 + rows.logprobs.top)
        values = rows.hidden[:, : ids.shape[1]].float()
        return DrawResult(tokens, TokenLogprobs(ids, values, tokens % 5))

    def screens(self, B: int, largest_k: int) -> bool:
        return B <= 10 and largest_k <= 64

    def capture(self, draw) -> Graph:
        if self._error is not None:
            raise self._error
        self._capturing = True
        result = draw()
        self._capturing = False

        def replay() -> None:
            self._capturing = True
            fresh = draw()
            self._capturing = False
            self.captured.pop()
            result.tokens.copy_(fresh.tokens)
            for old, new in zip(result.logprobs or (), fresh.logprobs or (), strict=True):
                old.copy_(new)

        return Graph(replay, result, self._bytes)


def graphed(draw: EchoDraw, **options) -> GraphedDraw:
    return GraphedDraw(draw, ROWS, torch.empty(1, D), V, capture=draw.capture, **options)


def rows(B: int, step: int = 0, **options) -> Rows:
    counters = torch.arange(B)
    hidden = torch.full((B, D), float(step))
    return Rows(hidden, torch.ones(B) * (step + 1), counters + step, counters * 2, **options)


def filtered(B: int, k: int = 3) -> dict:
    return {"filters": (torch.full((B,), k, dtype=torch.int32), torch.ones(B), torch.zeros(B))}


def check(draw: GraphedDraw, inputs: Rows) -> None:
    """Compare with a draw without graphs."""
    result, direct = draw(inputs), EchoDraw()(inputs)
    assert torch.equal(result.tokens, direct.tokens)
    assert (result.logprobs is None) == (direct.logprobs is None)
    for values, expected in zip(result.logprobs or (), direct.logprobs or (), strict=True):
        assert torch.equal(values, expected)


@pytest.mark.parametrize("largest", [3, 100, 1024])
def test_every_batch_has_a_graph_that_is_not_much_larger(largest):
    sizes = sizes_up_to(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest and len(sizes) < 40
    for B in range(1, largest + 1):
        size = next(size for size in sizes if size >= B)
        assert size - B < max(2, 8 if B < 64 else 16 if B < 256 else 64)


def test_one_kind_is_captured_at_once_and_others_when_they_are_used():
    echo = EchoDraw()
    draw = graphed(echo)
    draw.capture_all(DrawKind())
    assert echo.captured == [(DrawKind(), B) for B in (20, 16, 8, 4, 2, 1)]
    draw(rows(3))
    draw(rows(5, **filtered(5)))
    draw(rows(6, **filtered(6)))
    draw(rows(6, logprobs=LogprobRequest(2)))
    assert echo.captured[6:] == [(DrawKind(True), 8), (DrawKind(False, LogprobRequest(2)), 8)]
    assert echo.eager == 0 and draw.supported is EchoDraw.supported


def test_replays_draw_what_the_draw_draws():
    """In any order of kinds and sizes, with settings that are passed again or new."""
    echo = EchoDraw()
    draw = graphed(echo)
    repeated = rows(5, 1)
    for inputs in [repeated, rows(1), rows(20, 2), rows(5, 3, **filtered(5)), repeated, repeated,
                   rows(5, 1, logprobs=LogprobRequest()), rows(4, logprobs=LogprobRequest(3)),
                   rows(5, 3, **filtered(5, 7)), rows(4)]:  # fmt: skip
        check(draw, inputs)
    assert echo.eager == 0


def test_screened_and_other_filters_have_different_graphs():
    echo = EchoDraw()
    draw = graphed(echo)
    for screened in (True, False, True):
        check(draw, rows(3, **filtered(3), screened=screened))
    assert echo.captured == [(DrawKind(True, None, True), 4), (DrawKind(True), 4)]
    # The graph's rows decide: 9 are padded to 16.
    batches = [(8, 64), (8, 65), (9, 5), (ROWS + 5, 5)]
    assert [draw.screens(B, k) for B, k in batches] == [True, False, False, False]


def test_padding_rows_are_greedy_and_have_the_first_hidden_state():
    """In place of zeros at first, and of an earlier batch's rows later."""
    echo = EchoDraw()
    draw = graphed(echo)
    off = rows(7, 2, **filtered(7, V))
    for inputs in (rows(3, 1), off, rows(5, 4, **filtered(5), screened=True), rows(1, 3)):
        draw(inputs)
        B, (hidden, temperature, *_) = len(inputs.hidden), echo.replayed
        assert len(hidden) in (1, 4, 8)
        assert (temperature[:B] > 0).all() and (temperature[B:] == 0).all()
        assert torch.equal(hidden, inputs.hidden[:1].expand_as(hidden))  # all its rows are equal


def test_rows_that_are_drawn_without_a_graph():
    echo = EchoDraw()
    draw = graphed(echo)
    for inputs in [rows(ROWS + 1), rows(2, bias=torch.zeros(2, V)), rows(2, penalties=object()),
                   rows(2, mask=torch.zeros(2, 4, dtype=torch.int32))]:  # fmt: skip
        check(draw, inputs)
    assert echo.eager == 4 and echo.captured == []


def test_ranks_capture_nothing_later():
    echo = EchoDraw()
    draw = graphed(echo, lazily=False)
    draw.capture_all(DrawKind())
    draw(rows(3, logprobs=LogprobRequest()))
    assert echo.eager == 1 and len(echo.captured) == 6


def test_memory_is_bounded(caplog):
    echo = EchoDraw(bytes_each=60)
    draw = graphed(echo, budget=100)
    for B in (16, 8, 4, 2, 4):
        check(draw, rows(B))
    assert [B for _, B in echo.captured] == [16, 8] and echo.eager == 3
    assert caplog.text.count("no more are captured") == 1


def test_ranks_capture_the_same_graphs_whatever_memory_others_take(caplog):
    """A rank that skipped a capture would leave the others waiting in the draws before theirs."""
    echo = EchoDraw(bytes_each=60)
    draw = graphed(echo, budget=100, lazily=False)
    draw.capture_all(DrawKind())
    assert [B for _, B in echo.captured] == [20, 16, 8, 4, 2, 1] and not caplog.text
    check(draw, rows(2))
    check(draw, rows(2, **filtered(2)))  # not captured at the start
    assert len(echo.captured) == 6 and echo.eager == 1


def test_a_capture_that_fails_is_logged_once_and_not_tried_again(caplog):
    echo = EchoDraw(error=torch.OutOfMemoryError("full"))
    draw = graphed(echo)
    for step in range(3):
        check(draw, rows(2, step))
    assert echo.eager == 3 and caplog.text.count("no graph of 2 rows") == 1


def test_settings_are_fp32_with_any_default_dtype_of_torch():
    echo, inputs = EchoDraw(), rows(3, logprobs=LogprobRequest(2), **filtered(3))
    inputs = inputs._replace(temperature=torch.full((3,), 0.7))
    torch.set_default_dtype(torch.bfloat16)
    try:
        graphed(echo)(inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(echo.replayed.temperature[:3], inputs.temperature)
    assert {each.dtype for each in echo.replayed.filters} == {torch.int32, torch.float32}
