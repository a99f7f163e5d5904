"""Draws replayed as CUDA graphs are those of the draw that was captured."""

from __future__ import annotations

import pytest
import torch

from fsbench.integrations.draw import Head, make_draw
from fsbench.integrations.graphed import GraphedDraw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
V, D, ROWS = 20000, 1024, 72


@pytest.fixture(scope="module")
def draws():
    torch.manual_seed(0)
    weight = torch.randn(V, D, device="cuda").bfloat16() / 16
    draw = make_draw("flash_sample", Head(weight, V))
    like = torch.empty(1, D, dtype=torch.bfloat16, device="cuda")
    return draw, GraphedDraw(draw, ROWS, like)


def inputs(B: int, step: int):
    generator = torch.Generator("cuda").manual_seed(1000 * B + step)
    hidden = torch.randn(B, D, device="cuda", generator=generator).bfloat16()
    temperature = torch.rand(B, device="cuda", generator=generator) * (torch.arange(B) % 3).cuda()
    counters = torch.arange(B, device="cuda")
    return hidden, temperature, counters + 17 * step, counters * 3 + step


def test_tokens_are_those_of_the_draw_at_any_batch_size(draws):
    """In any order of sizes, so that what an earlier batch left behind could do harm."""
    draw, graphed = draws
    for step, B in enumerate([64, 1, 9, 3, ROWS, 2, 63, 8, ROWS + 5, 1, 40]):
        arguments = inputs(B, step)
        assert torch.equal(graphed(*arguments), draw(*arguments)), B


def test_what_changes_from_step_to_step_is_read_again(draws):
    draw, graphed = draws
    hidden, temperature, seed, _ = inputs(5, 0)
    for step in range(4):
        position = torch.full((5,), step, device="cuda")
        assert torch.equal(
            graphed(hidden, temperature, seed, position), draw(hidden, temperature, seed, position)
        )
    other = temperature + 1
    assert torch.equal(graphed(hidden, other, seed, position), draw(hidden, other, seed, position))
    assert torch.equal(
        graphed(hidden, other, seed + 1, position), draw(hidden, other, seed + 1, position)
    )


def test_it_declines_what_the_draw_declines(draws):
    draw, graphed = draws
    _, temperature, *_ = inputs(5, 0)
    assert graphed.declines(temperature.cpu().numpy()) is draw.declines(temperature.cpu().numpy())
