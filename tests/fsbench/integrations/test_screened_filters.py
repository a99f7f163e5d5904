"""Filtered requests that the screened draw has from its int8 copy, and those that it has not.

In fp16, as the interpreter runs the kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_vllm import Model
from fake_vllm_states import D, V, params
from vllm_play import GRAMMAR, PROMPT, Play, Recording

from fsbench.integrations.draw import DrawResult, Head, LogprobRequest, Rows, make_draw
from fsbench.integrations.graphed import Graph, GraphedDraw
from fsbench.kernels import Penalties, TokenHistory, truncated_sample
from fsbench.kernels.screened import head as screened_head

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.interpreter]

DEFAULT = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
KINDS: dict[str, dict[str, Any]] = {
    "default": DEFAULT,
    "greedy": {"temperature": 0},
    "k = 1": {"top_k": 1},
    "k = 64": {"top_k": 64},
    "k = 65": {"top_k": 65},
    "top-p": {"top_p": 0.9},
    "plain": {},
    "biased": {**DEFAULT, "logit_bias": {5: 5.0, 6: 4.5}},
    "grammar": {**DEFAULT, "temperature": 3.0},
    "logprobs": {**DEFAULT, "logprobs": 2},
    "penalized": {**DEFAULT, "repetition_penalty": 1.4},
}


def step(play: Play, kinds: list[str]) -> list[int]:
    """What the next step of new requests of these kinds draws."""
    for row, kind in enumerate(kinds):
        play.add(kind, params(**KINDS[kind], seed=row), [*PROMPT, row])
    play.step(None, {"grammar": GRAMMAR} if "grammar" in kinds else None)
    return [play.remove(kind)[1][0] for kind in kinds]


SCREENED = [
    (["k = 64", "greedy", "k = 1", "default"], [4]),
    (["default", "biased", "grammar"], [3]),
    (["greedy", "default", "penalized"], [2]),  # the last is a group of its own
]


@pytest.mark.parametrize("kinds, screened", SCREENED)
def test_requests_with_a_small_top_k_come_from_the_screen(
    load, filter_screens, monkeypatch, kinds, screened
):
    play = Play(load("screened", model=Model(dtype=torch.float16)), torch.float16)
    sampling = play.runner._fsbench.sampling
    sampling.draw = recording = Recording(sampling.draw)
    tokens = step(play, kinds)
    assert sum(rows.screened for rows in recording.rows) == len(
        screened
    )  # so that no graph is made twice
    assert [len(found) for found in filter_screens] == screened
    assert all(found > 0 for rows in filter_screens for found in rows)  # none in full
    assert sampling.counts.as_dict() == {"served": len(kinds), "left": {}}
    filter_screens.clear()
    monkeypatch.setattr(screened_head, "worth_filtering", lambda *_: (False, "by the test"))
    other = Play(load("screened", model=Model(dtype=torch.float16)), torch.float16)
    assert step(other, kinds) == tokens and filter_screens == []


@pytest.mark.parametrize(
    "kinds",
    [
        ["default", "k = 65"],
        ["top-p", "default"],
        ["plain", "greedy", "default"],
        ["default", "logprobs"],
        ["top-p", "greedy"],
    ],
)
def test_other_batches_do_not_come_from_the_screen(load, filter_screens, kinds):
    play = Play(load("screened", model=Model(dtype=torch.float16)), torch.float16)
    sampling = play.runner._fsbench.sampling
    sampling.draw = recording = Recording(sampling.draw, real=False)
    step(play, kinds)
    assert recording.rows and not any(rows.screened for rows in recording.rows)


def test_who_draws_is_decided_without_the_values_on_the_device(load, filter_screens):
    """The engine's own copy for the host says so; that of the device may not be there yet."""
    runner = load("screened", model=Model(dtype=torch.float16))
    states, slots = runner.sampler.sampling_states, torch.tensor([0, 1, 2]).numpy()
    for slot, (T, k) in enumerate([(0.6, 20), (0.0, V), (1.0, 64)]):
        states.temperature.np[slot], states.top_k.np[slot] = T, k
    adapter, draw = runner._fsbench.sampling.adapter, runner._fsbench.sampling.draw
    assert adapter.largest_k(runner, slots) == 64 and draw.screens(3, 64)
    for off in (V, 0, -1):
        states.top_k.np[0] = off
        assert adapter.largest_k(runner, slots) == V and not draw.screens(3, V)
    assert not draw.screens(33, 20)


def problem(B: int) -> tuple[Head, Rows]:
    """A screened head's matrix and rows with filters, all of them small."""
    generator = torch.Generator().manual_seed(B)
    weight = torch.randn(V + 4, D, generator=generator).half() / 4
    hidden = torch.randn(B, D, generator=generator).half()
    counters = torch.arange(B)
    filters = torch.full((B,), 3, dtype=torch.int32), torch.full((B,), 0.9), torch.zeros(B)
    return Head(weight, V), Rows(hidden, torch.ones(B), counters, counters + 9, filters)


def direct(head: Head, rows: Rows) -> list[int]:
    assert rows.filters is not None
    top_k, top_p, min_p = rows.filters
    return truncated_sample(
        *(rows.hidden, head.weight),
        temperature=rows.temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=rows.seed,
        offset=rows.offset,
        vocab_size=V,
        noise="token",
    ).tokens.tolist()


def test_only_the_screened_draw_screens_and_only_what_it_can(filter_screens):
    head, rows = problem(2)
    draw = make_draw("screened", head)
    assert [make_draw("flash_sample", head).screens(2, 3), draw.screens(2, 3)] == [False, True]
    assert not make_draw("multinomial", head).screens(2, 3)
    tokens = direct(head, rows)
    assert draw(rows).tokens.tolist() == tokens and filter_screens == []
    rows = rows._replace(screened=True)
    assert draw(rows).tokens.tolist() == tokens and len(filter_screens) == 1
    # Asked for what needs every logit, it has it from the weight's kernels.
    assert draw(rows._replace(asked=LogprobRequest(2))).tokens.tolist() == tokens
    penalties = Penalties(TokenHistory.from_tokens([[1], [2]], [[], []], 4, "cpu"), 1.5)
    draw(rows._replace(penalties=penalties))
    assert len(filter_screens) == 1


def replayed(draw: Any) -> Graph:
    """In place of a CUDA graph: a replay draws again from the same tensors."""
    drawn = draw()
    return Graph(lambda: drawn.tokens.copy_(draw().tokens), DrawResult(drawn.tokens), 0)


def test_rows_that_fill_up_a_graph_are_never_computed_in_full(filter_screens):
    """After the zeros at first, and after rows with k off and with NaNs in the same places."""
    head, rows = problem(3)
    rows = rows._replace(screened=True)
    draw = GraphedDraw(make_draw("screened", head), 4, rows.hidden, V, capture=replayed)
    found, tokens = [], direct(head, rows)
    for _ in range(2):
        assert draw.screens(3, 3) and draw(rows).tokens.tolist() == tokens
        found.append(filter_screens[-1])
        broken = problem(4)[1]
        broken.hidden[3] = torch.nan
        off = torch.full((4,), V, dtype=torch.int32), *broken.filters[1:]
        draw(broken._replace(filters=off))
    assert len(filter_screens) == 3  # the capture, and two replays
    # Lists have room for all tokens here, so a row may have all of them on its list, too.
    assert all(len(each) == 4 and min(each) > 0 and max(each) < V // 4 for each in found), found
