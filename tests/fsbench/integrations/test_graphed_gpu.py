"""Draws replayed as CUDA graphs are those of the draw that was captured."""

from __future__ import annotations

import pytest
import torch

from fsbench.integrations.draw import Head, LogprobRequest, Rows, make_draw
from fsbench.integrations.draw_kinds import DrawKind
from fsbench.integrations.graphed import GraphedDraw
from fsbench.kernels import flash_sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
V, D, ROWS = 20000, 1024, 72


@pytest.fixture(scope="module", params=["flash_sample", "screened"])
def draws(request):
    torch.manual_seed(0)
    weight = torch.randn(V, D, device="cuda").bfloat16() / 16
    draw = make_draw(request.param, Head(weight, V))
    like = torch.empty(1, D, dtype=torch.bfloat16, device="cuda")
    graphed = GraphedDraw(draw, ROWS, like, V)
    graphed.capture_all(DrawKind())
    return draw, graphed


def inputs(B: int, step: int, kind: DrawKind = DrawKind()) -> Rows:  # noqa: B008
    generator = torch.Generator("cuda").manual_seed(1000 * B + step)
    hidden = torch.randn(B, D, device="cuda", generator=generator).bfloat16()
    temperature = torch.rand(B, device="cuda", generator=generator) * (torch.arange(B) % 3).cuda()
    counters = torch.arange(B, device="cuda")
    filters = (
        (counters % 40 + 1).to(torch.int32),
        1 - 0.1 * temperature,
        torch.zeros(B, device="cuda"),
    )
    return Rows(
        *(hidden, temperature, counters + 17 * step, counters * 3 + step),
        filters=filters if kind.filters else None,
        logprobs=kind.logprobs,
        screened=kind.screened,
    )


KINDS = [
    DrawKind(),
    DrawKind(filters=True),
    DrawKind(filters=True, screened=True),
    *(DrawKind(filters, LogprobRequest(top, raw)) for filters in (False, True) for top in (0, 20)
      for raw in (False, True)),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_draw_at_any_batch_size(draws, kind):
    """In any order of sizes, so that what an earlier batch left behind could do harm."""
    draw, graphed = draws
    for step, B in enumerate([64, 1, 9, 3, ROWS, 2, 63, 8, ROWS + 5, 1, 40]):
        rows = inputs(B, step, kind)
        result, direct = graphed(rows), draw(rows)
        assert torch.equal(result.tokens, direct.tokens), B
        for values, expected in zip(result.logprobs or (), direct.logprobs or (), strict=True):
            assert torch.equal(values, expected), B


def test_graphs_follow_a_weight_that_is_written_to():
    weight = torch.randn(V, D, device="cuda").bfloat16() / 16
    draw = make_draw("screened", Head(weight, V))
    graphed = GraphedDraw(draw, 4, torch.empty(1, D, dtype=torch.bfloat16, device="cuda"), V)
    graphed.capture_all(DrawKind())
    for step in range(3):
        weight.normal_(0, 1 / 16)
        draw.refresh()
        rows = inputs(4, step)
        direct = flash_sample(
            *(rows.hidden, weight),
            temperature=rows.temperature,
            seed=rows.seed,
            offset=rows.offset,
            noise="token",
        )
        assert torch.equal(graphed(rows).tokens, direct.tokens)


@pytest.mark.parametrize("B", [1, 16, 64])
def test_greedy_drafts_are_captured_as_vllm_captures(draws, B):
    """After one call outside, in a graph that forbids other threads what a capture forbids."""
    draw, _ = draws
    hidden = torch.randn(B, D, device="cuda").bfloat16()
    draw.greedy(hidden)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = draw.greedy(hidden)
    for _ in range(3):
        hidden.normal_()
        graph.replay()
        assert torch.equal(tokens, draw.greedy(hidden))
