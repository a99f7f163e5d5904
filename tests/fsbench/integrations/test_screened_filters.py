"""Filtered requests that the screened head draws, and those that it cannot.

In fp16, because the interpreter runs the kernels then.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_vllm import Model
from fake_vllm_states import D, V, params
from vllm_play import PROMPT, Play, Recording, grammars

from fsbench.integrations import vllm_0_26 as adapter
from fsbench.integrations.draw import DrawResult, Head, LogprobRequest, Rows, make_draw
from fsbench.integrations.graphed import Graph, GraphedDraw
from fsbench.kernels import Penalties, TokenHistory, truncated_sample
from fsbench.kernels.screened import head as screened_head

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.interpreter]

DEFAULT = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
KINDS: dict[str, dict[str, Any]] = {
    "default": DEFAULT,
    "greedy": {"temperature": 0},
    "k = 64": {"top_k": 64},
    "k = 65": {"top_k": 65},
    "top-p": {"top_p": 0.9},
    "plain": {},
    "biased": {**DEFAULT, "logit_bias": {5: 5.0, 6: 4.5}},
    "grammar": {**DEFAULT, "temperature": 3.0},
    "logprobs": {**DEFAULT, "logprobs": 2},
    "penalized": {**DEFAULT, "repetition_penalty": 1.4},
}


@pytest.fixture
def screened(load, filter_screens):
    """Return a function that loads a screened runner in fp16."""
    return lambda: load("screened", model=Model(dtype=torch.float16))


def step(runner: Any, request_kinds: list[str], real: bool = True) -> tuple[list[int], list[Rows]]:
    """Return the tokens of a step of new requests of these kinds, and the rows that were drawn."""
    sampling, play = runner._fsbench.sampling, Play(runner, torch.float16)
    sampling.draw = recording = Recording(sampling.draw, real)
    for row, kind in enumerate(request_kinds):
        play.add(kind, params(**KINDS[kind], seed=row), [*PROMPT, row])
    play.step(None, grammars(request_kinds))
    return [play.remove(kind)[1][0] for kind in request_kinds], recording.rows


@pytest.mark.parametrize(
    ("request_kinds", "num_screened"),
    [
        (["k = 64", "greedy", "default", "biased", "grammar"], 5),
        (["default", "penalized"], 1),  # the last is in another group
    ],
)
def test_requests_with_a_small_top_k_use_the_screen(
    screened, filter_screens, monkeypatch, request_kinds, num_screened
):
    runner = screened()
    tokens, drawn = step(runner, request_kinds)
    assert [len(rows.hidden) for rows in drawn if rows.screened] == [num_screened]
    (computed,) = filter_screens
    assert len(computed) == num_screened and min(computed) > 0  # none in full
    assert runner._fsbench.sampling.counts.as_dict() == {"served": len(request_kinds), "left": {}}
    filter_screens.clear()
    monkeypatch.setattr(screened_head, "worth_filtering", lambda *_: (False, "by the test"))
    assert step(screened(), request_kinds)[0] == tokens and filter_screens == []


@pytest.mark.parametrize(
    "request_kinds",
    [["default", "k = 65"], ["top-p", "default"], ["plain", "greedy", "default"],
     ["default", "logprobs"], ["top-p", "greedy"]],
)  # fmt: skip
def test_other_batches_do_not_use_the_screen(screened, request_kinds):
    _, drawn = step(screened(), request_kinds, real=False)
    assert drawn and not any(rows.screened for rows in drawn)


def test_the_host_decides_without_values_of_the_device(screened):
    """From vLLM's copy on the host, since the one on the device may be older."""
    runner = screened()
    states, slots = runner.sampler.sampling_states, torch.tensor([0, 1, 2]).numpy()
    for slot, (T, k) in enumerate([(0.6, 20), (0.0, V), (1.0, 64)]):
        states.temperature.np[slot], states.top_k.np[slot] = T, k
    draw = runner._fsbench.sampling.draw
    assert adapter.largest_k(runner, slots) == 64 and draw.screens(3, 64)
    for off in (V, 0, -1):
        states.top_k.np[0] = off
        assert adapter.largest_k(runner, slots) == V and not draw.screens(3, V)
    assert not draw.screens(33, 20)


def problem(B: int) -> tuple[Head, Rows]:
    """Return a head and rows with small filters."""
    generator = torch.Generator().manual_seed(B)
    weight = torch.randn(V + 4, D, generator=generator).half() / 4
    hidden = torch.randn(B, D, generator=generator).half()
    counters = torch.arange(B)
    filters = torch.full((B,), 3, dtype=torch.int32), torch.full((B,), 0.9), torch.zeros(B)
    return Head(weight, V), Rows(hidden, torch.ones(B), counters, counters + 9, filters)


def direct(head: Head, rows: Rows) -> list[int]:
    assert rows.filters is not None
    limits = dict(zip(("top_k", "top_p", "min_p"), rows.filters, strict=True))
    sample = truncated_sample(
        *(rows.hidden, head.weight),
        temperature=rows.temperature,
        seed=rows.seed,
        offset=rows.offset,
        vocab_size=V,
        noise="token",
        **limits,
    )
    return sample.tokens.tolist()


def test_only_the_screened_draw_screens_and_only_what_it_can(filter_screens):
    head, rows = problem(2)
    draw = make_draw("screened", head)
    assert [make_draw("flash_sample", head).screens(2, 3), draw.screens(2, 3)] == [False, True]
    assert not make_draw("multinomial", head).screens(2, 3)
    tokens = direct(head, rows)
    assert draw(rows).tokens.tolist() == tokens and filter_screens == []
    rows = rows._replace(screened=True)
    assert draw(rows).tokens.tolist() == tokens and len(filter_screens) == 1
    # Log-probabilities and penalties need every logit, which the weight's kernels compute.
    logprobs = LogprobRequest(2)
    assert draw(rows._replace(logprobs=logprobs)).tokens.tolist() == tokens
    penalties = Penalties(TokenHistory.from_tokens([[1], [2]], [[], []], 4, "cpu"), 1.5)
    draw(rows._replace(penalties=penalties))
    assert len(filter_screens) == 1


def redraw(draw: Any) -> Graph:
    """Stand in for a CUDA graph: a replay draws again from the same tensors."""
    result = draw()
    return Graph(lambda: result.tokens.copy_(draw().tokens), DrawResult(result.tokens), 0)


def test_padding_rows_of_a_graph_are_never_computed_in_full(filter_screens):
    """After zeros at first, and after rows with top-k off and NaNs in the same places."""
    head, rows = problem(3)
    rows = rows._replace(screened=True)
    draw = GraphedDraw(make_draw("screened", head), 4, rows.hidden, V, capture=redraw)
    assert draw.screens(3, 3) and draw(rows).tokens.tolist() == direct(head, rows)
    broken = problem(4)[1]
    broken.hidden[3] = torch.nan
    off = torch.full((4,), V, dtype=torch.int32), *broken.filters[1:]
    draw._copy_inputs(broken._replace(filters=off), 4)
    draw(rows)
    assert len(filter_screens) == 3  # the capture, and two replays
    # The lists have room for all tokens here, so a row may also list them all.
    assert all(min(each) > 0 and max(each) < V // 4 for each in filter_screens[1:])
