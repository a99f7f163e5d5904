"""The core's decisions against the oracle in plain torch, on every instruction set it has."""

from __future__ import annotations

import pytest
import torch

from fsbench.simple import native, reference
from fsbench.simple.ring import Ring, RingShape

pytestmark = pytest.mark.skipif(bool(native.missing()), reason=str(native.missing()))

SIZES = (1, 2, 17, 127, 512, 513, 9001)


@pytest.fixture(params=native.ISAS, autouse=True)
def isa(request):
    """Each instruction set in turn."""
    best = native.isa()
    if native.core().fsb_use_isa(request.param.encode()):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    native.core().fsb_use_isa(best.encode())


def rows(V: int, B: int = 24, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(B, V, generator=torch.Generator().manual_seed(seed))


def uniforms(B: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(B, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def decided(logits, uniform, *, hot=0, present=None, stats=True, order=None, shards=1,
            dtype="fp32", **parameters):  # fmt: skip
    """Tokens and log-probabilities of the core for logits [B, V] in the order of tokens."""
    B, V = logits.shape
    shape = RingShape(1, B, V, shards, dtype)
    ring = Ring(shape)
    places = logits if order is None else logits[:, order]
    if hot and stats:
        T = parameters.get("temperature", 1.0)
        largest, total = reference.tail(places, hot, T)
        ring.tail_max.copy_(largest[None])
        ring.tail_sum.copy_(total[None])
    if present is not None:
        flat = ring.logits.view(-1)[: B * present].view(B, present)
        flat.copy_(places[:, :present])
    else:
        ring.logits[0].copy_(places.unflatten(1, (shards, -1)).transpose(0, 1))
    ring.parts["shape"][0] = torch.tensor(shape.hot(hot, present))
    ring.uniform[0].copy_(uniform)
    for name, value in parameters.items():
        ring.parts[name][0].copy_(torch.as_tensor(value))
    ids = None if order is None else order.int().contiguous()
    native.core().fsb_rows(ring.pointer(), 0, 0, B, ids.data_ptr() if ids is not None else None)
    return ring.tokens[0].clone(), ring.logprob[0].clone()


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 30.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 700},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01, "temperature": 0.7},
    {"temperature": 0.0},
]
filters = pytest.mark.parametrize("given", FILTERS, ids=str)


LAYOUTS = {
    **{f"V = {V}": (V, {}) for V in SIZES},
    **{f"{hot} hot": (9001, {"hot": hot}) for hot in (1, 500, 4096)},
    "no statistics of the tail": (9001, {"hot": 100, "stats": False}),
    "four shards": (4 * 777, {"shards": 4}),
    "bf16": (9001, {"dtype": "bf16"}),
}


@filters
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_the_oracles(layout, given):
    V, options = LAYOUTS[layout]
    logits, uniform, order = rows(V), uniforms(24), None
    if options.get("dtype") == "bf16":
        logits = logits.bfloat16()
    if "hot" in options:
        # Half of the rows have their large logits among the hot ones, half of them anywhere.
        order = torch.randperm(V, generator=torch.Generator().manual_seed(3))
        logits[::2] = logits[::2].sort(1, descending=True).values[:, order.argsort()]
    tokens, _ = decided(logits, uniform, order=order, **options, **given)
    expected = reference.decide(logits, uniform, order=order, **given)
    assert expected.accepts(tokens, uniform).all(), (tokens, expected.tokens)
    assert (tokens == expected.tokens).float().mean() > 0.9


@filters
def test_without_the_tail_a_row_is_decided_alike_or_asks_for_it(given):
    V, hot = 9001, 1000
    logits, uniform = rows(V, 64), uniforms(64)
    logits[::2] = logits[::2].sort(1, descending=True).values
    tokens, _ = decided(logits, uniform, hot=hot, present=hot, **given)
    asked = tokens == native.NEEDS_TAIL
    expected = reference.decide(logits, uniform, **given)
    assert (expected.accepts(tokens, uniform) | asked).all()
    # Of a row that is hot first, top-k and greedy decoding never need more.
    if (set(given) & {"top_k", "min_p"} and given.get("top_k", 0) < hot) or given == {
        "temperature": 0.0
    }:
        assert not asked[::2].any()
    assert asked[1::2].any()


@pytest.mark.parametrize(
    "given", [{"top_k": 5}, {"top_p": 0.3}, {"top_k": 9, "top_p": 0.5}], ids=str
)
@pytest.mark.parametrize("hot", [0, 300])
def test_ties_go_to_the_lowest_tokens(given, hot):
    """All logits of three values, also where places are in another order than tokens."""
    V = 1000
    logits = torch.randint(0, 3, (200, V), generator=torch.Generator().manual_seed(0)).float()
    uniform = uniforms(200)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(4))
    tokens, _ = decided(logits, uniform, hot=hot, order=order, **given)
    expected = reference.decide(logits, uniform, order=order, **given)
    assert expected.accepts(tokens, uniform).all()


@pytest.mark.parametrize("hot", [0, 10])
@filters
def test_undefined_rows(given, hot):
    logits, uniform = rows(600, 8), uniforms(8)
    logits[0, 5] = logits[1, 599] = torch.nan
    logits[2, 300] = torch.inf
    logits[3] = -torch.inf
    logits[4, 5:] = -torch.inf
    logits[5, :-1] = -torch.inf
    tokens, _ = decided(logits, uniform, hot=hot, **given)
    expected = reference.decide(logits, uniform, **given)
    assert expected.tokens[:4].eq(-1).all()
    assert expected.accepts(tokens, uniform).all(), (tokens, expected.tokens)
    assert tokens[4] < 5 and tokens[5] == 599


@pytest.mark.parametrize("T", [-1.0, float("nan"), float("inf")])
def test_invalid_temperatures(T):
    tokens, _ = decided(rows(100, 2), uniforms(2), temperature=T)
    assert tokens.tolist() == [-1, -1]


@pytest.mark.parametrize("hot", [0, 2000])
def test_logprob_is_that_of_the_softmax(hot):
    logits, uniform = rows(9001), uniforms(24)
    tokens, logprob = decided(logits, uniform, hot=hot, temperature=0.7)
    wanted = torch.log_softmax(logits.double() / 0.7, 1).gather(1, tokens[:, None])[:, 0]
    assert (logprob - wanted).abs().max() < 1e-4


def test_a_masked_token_is_never_drawn():
    """Also where everything that is left is far below the largest logit of its block."""
    logits = torch.full((4096, 40), -torch.inf)
    logits[:, 3], logits[:, 30] = 0.0, -80.0
    uniform = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    tokens, _ = decided(logits, uniform)
    assert set(tokens.tolist()) <= {3, 30}


def test_far_tail_keeps_its_mass():
    """One leader, all others 20 below: the inverse CDF reaches each of them."""
    V = 20_000
    logits = torch.full((1, V), -20.0)
    logits[0, 777] = 0.0
    tail = (V - 1) * torch.exp(torch.tensor(-20.0, dtype=torch.float64))
    lead = 1 / (1 + tail)
    below = float(777 * torch.exp(torch.tensor(-20.0, dtype=torch.float64)) * lead)
    uniform = torch.linspace(below + float(lead), 1, 4098, dtype=torch.float64)[1:-1]
    tokens, _ = decided(logits.expand(4096, V), uniform)
    expected = 778 + (torch.arange(1, 4097).double() / 4097 * (V - 778)).long()
    assert (tokens - expected).abs().max() <= 2
