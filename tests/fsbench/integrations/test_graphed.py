"""Which graphs are made, when, and what is drawn without; real ones are in test_graphed_gpu.py."""

from __future__ import annotations

import pytest
import torch

from fsbench.integrations.draw import DrawResult, LogprobRequest, Rows, Told
from fsbench.integrations.graphed import DrawKind, Graph, GraphedDraw, sizes_up_to
from fsbench.integrations.routing import Need

V, D, ROWS = 100, 8, 20


class Fake:
    """A draw whose token is what it sees of its row, and a capture that replays it.

    seen: the rows of the last replay.
    """

    able = Need.FILTER

    def __init__(self, bytes_each: int = 0, fails: Exception | None = None):
        self.captured: list[tuple[DrawKind, int]] = []
        self.eager = 0
        self._bytes, self._fails, self._capturing = bytes_each, fails, False

    def __call__(self, rows: Rows) -> DrawResult:
        if self._capturing:
            kind = DrawKind(rows.filters is not None, rows.asked, rows.screened)
            self.captured.append((kind, len(rows.hidden)))
            self.seen = rows
        else:
            self.eager += 1
        tokens = rows.seed + 1000 * rows.offset + (rows.temperature * 100000).long()
        if rows.filters is not None:
            tokens = tokens + 10000000 * rows.filters[0]
        if rows.asked is None:
            return DrawResult(tokens)
        ids = tokens[:, None].repeat(1, 1 + rows.asked.top)
        return DrawResult(tokens, Told(ids, rows.hidden[:, : ids.shape[1]].float(), tokens % 5))

    def screens(self, B: int, largest_k: int) -> bool:
        return B <= 10 and largest_k <= 64

    def capture(self, draw) -> Graph:
        if self._fails is not None:
            raise self._fails
        self._capturing = True
        drawn = draw()
        self._capturing = False

        def replay() -> None:
            self._capturing = True
            again = draw()
            self._capturing = False
            self.captured.pop()
            drawn.tokens.copy_(again.tokens)
            for mine, other in zip(drawn.told or (), again.told or (), strict=True):
                mine.copy_(other)

        return Graph(replay, drawn, self._bytes)


def graphed(fake: Fake, **options) -> GraphedDraw:
    return GraphedDraw(fake, ROWS, torch.empty(1, D), V, capture=fake.capture, **options)


def rows(B: int, step: int = 0, **more) -> Rows:
    counters = torch.arange(B)
    hidden = torch.full((B, D), float(step))
    return Rows(hidden, torch.ones(B) * (step + 1), counters + step, counters * 2, **more)


def filtered(B: int, k: int = 3) -> dict:
    return {"filters": (torch.full((B,), k, dtype=torch.int32), torch.ones(B), torch.zeros(B))}


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 64, 100, 256, 1000, 1024])
def test_every_batch_has_a_graph_that_is_not_much_larger(largest):
    sizes = sizes_up_to(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest and len(sizes) < 40
    for B in range(1, largest + 1):
        size = next(size for size in sizes if size >= B)
        assert size - B < max(2, 8 if B < 64 else 16 if B < 256 else 64)


def test_one_kind_is_made_at_once_and_others_when_they_are_used():
    fake = Fake()
    draw = graphed(fake)
    draw.capture_all(DrawKind())
    assert fake.captured == [(DrawKind(), B) for B in (20, 16, 8, 4, 2, 1)]
    draw(rows(3))
    draw(rows(5, **filtered(5)))
    draw(rows(6, **filtered(6)))
    draw(rows(6, asked=LogprobRequest(2)))
    assert fake.captured[6:] == [(DrawKind(True), 8), (DrawKind(False, LogprobRequest(2)), 8)]
    assert fake.eager == 0 and draw.able is Fake.able


def test_what_is_drawn_is_what_the_draw_draws():
    """In any order of kinds and sizes, with settings that are kept or new."""
    fake = Fake()
    draw = graphed(fake)
    same = rows(5, 1)
    for given in [same, rows(1), rows(20, 2), rows(5, 3, **filtered(5)), same, same,
                  rows(5, 1, asked=LogprobRequest()), rows(4, asked=LogprobRequest(3)),
                  rows(5, 3, **filtered(5, 7)), rows(4)]:  # fmt: skip
        found, direct = draw(given), Fake()(given)
        assert torch.equal(found.tokens, direct.tokens)
        assert (found.told is None) == (direct.told is None)
        for mine, other in zip(found.told or (), direct.told or (), strict=True):
            assert torch.equal(mine, other)
    assert fake.eager == 0


def test_which_kernels_draw_filters_is_part_of_the_kind():
    fake = Fake()
    draw = graphed(fake)
    for screened in (True, False, True):
        given = rows(3, **filtered(3), screened=screened)
        assert torch.equal(draw(given).tokens, Fake()(given).tokens)
    assert fake.captured == [(DrawKind(True, None, True), 4), (DrawKind(True), 4)]
    # What draws is decided for the rows of the graph: 9 are filled up to 16.
    asked = [(8, 64), (8, 65), (9, 5), (ROWS + 5, 5)]
    assert [draw.screens(B, k) for B, k in asked] == [True, False, False, False]


def test_rows_that_fill_up_are_greedy_and_of_a_hidden_state_that_is_there():
    """At first there are zeros; later what an earlier batch left behind."""
    fake = Fake()
    draw = graphed(fake)
    off = rows(7, 2, **filtered(7, V))
    for given in (rows(3, 1), off, rows(5, 4, **filtered(5), screened=True), rows(1, 3)):
        draw(given)
        B, (hidden, temperature, *_) = len(given.hidden), fake.seen
        assert len(hidden) in (1, 4, 8)
        assert (temperature[:B] > 0).all() and (temperature[B:] == 0).all()
        assert torch.equal(hidden, given.hidden[:1].expand_as(hidden))  # all rows of it are equal


def test_what_has_no_graph():
    fake = Fake()
    draw = graphed(fake)
    for given in [rows(ROWS + 1), rows(2, bias=torch.zeros(2, V)), rows(2, penalties=object()),
                  rows(2, mask=torch.zeros(2, 4, dtype=torch.int32))]:  # fmt: skip
        assert torch.equal(draw(given).tokens, Fake()(given).tokens)
    assert fake.eager == 4 and fake.captured == []


def test_where_ranks_make_graphs_together_none_is_made_later():
    fake = Fake()
    draw = graphed(fake, lazily=False)
    draw.capture_all(DrawKind())
    draw(rows(3, asked=LogprobRequest()))
    assert fake.eager == 1 and len(fake.captured) == 6


def test_memory_is_bounded(caplog):
    fake = Fake(bytes_each=60)
    draw = graphed(fake, budget=100)
    for B in (16, 8, 4, 2, 4):
        assert torch.equal(draw(rows(B)).tokens, Fake()(rows(B)).tokens)
    assert [B for _, B in fake.captured] == [16, 8] and fake.eager == 3
    assert caplog.text.count("no more are made") == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("full")])
def test_out_of_memory_is_said_once_and_drawn_without(caplog, error):
    fake = Fake(fails=error)
    draw = graphed(fake)
    for step in range(3):
        assert torch.equal(draw(rows(2, step)).tokens, Fake()(rows(2, step)).tokens)
    assert fake.eager == 3 and caplog.text.count("no graph of 2 rows") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_settings_are_fp32_whatever_torchs_default_dtype_is(dtype):
    fake, given = Fake(), rows(3, asked=LogprobRequest(2), **filtered(3))
    given = given._replace(temperature=torch.full((3,), 0.7))
    torch.set_default_dtype(dtype)
    try:
        graphed(fake)(given)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(fake.seen.temperature[:3], given.temperature)
    assert {each.dtype for each in fake.seen.filters} == {torch.int32, torch.float32}
