"""The core's decisions against the oracle in plain torch, on every instruction set it has."""

from __future__ import annotations

import pytest
import torch

from fsbench.simple import native, reference
from fsbench.simple.ring import Ring, RingShape

pytestmark = pytest.mark.skipif(bool(native.missing()), reason=str(native.missing()))


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


def decided(logits, uniform, *, hot=0, present=None, stats=True, **parameters):
    """Return the core's tokens and log-probabilities for logits [B, V], fp32 or bf16."""
    B, V = logits.shape
    shape = RingShape(1, B, V, "bf16" if logits.dtype == torch.bfloat16 else "fp32")
    ring = Ring(shape)
    if hot and stats:
        largest, total = reference.tail(logits, hot, parameters.get("temperature", 1.0))
        ring.tail_max[0], ring.tail_sum[0] = largest, total
    columns = present or V
    ring.logits.view(-1)[: B * columns].view(B, columns).copy_(logits[:, :columns])
    ring.parts["shape"][0] = torch.tensor(shape.hot(hot, present))
    ring.uniform[0] = uniform
    for name, value in parameters.items():
        ring.parts[name][0] = value
    native.core().fsb_rows(ring.pointer(), 0, 0, B)
    return ring.tokens[0].clone(), ring.logprob[0].clone()


def assert_oracle(tokens, logits, uniform, filters):
    expected = reference.decide(logits, uniform, **filters)
    assert expected.accepts(tokens, uniform).all(), (tokens, expected.tokens)
    return expected.tokens


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
every_filter = pytest.mark.parametrize("filters", FILTERS, ids=str)


LAYOUTS = {
    **{f"V = {V}": (V, {}) for V in (1, 17, 512, 513, 3001)},
    **{f"{hot} hot": (3001, {"hot": hot}) for hot in (1, 1100)},
    "no statistics of the tail": (3001, {"hot": 100, "stats": False}),
    "bf16": (3001, {}),
}


@every_filter
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_the_oracles(layout, filters):
    V, options = LAYOUTS[layout]
    logits, uniform = rows(V), uniforms(24)
    if layout == "bf16":
        logits = logits.bfloat16()
    if "hot" in options:  # half of the rows have their largest logits among the hot tokens
        logits[::2] = logits[::2].sort(1, descending=True).values
    tokens, _ = decided(logits, uniform, **options, **filters)
    expected = assert_oracle(tokens, logits, uniform, filters)
    assert (tokens == expected).float().mean() > 0.9


@every_filter
def test_without_the_tail_a_row_is_decided_or_needs_it(filters):
    V, hot = 3001, 1000
    logits, uniform = rows(V, 64), uniforms(64)
    logits[::2] = logits[::2].sort(1, descending=True).values
    tokens, _ = decided(logits, uniform, hot=hot, present=hot, **filters)
    needs_tail = tokens == native.NEEDS_TAIL
    expected = reference.decide(logits, uniform, **filters)
    assert (expected.accepts(tokens, uniform) | needs_tail).all()
    # A row whose largest logits are hot never needs more for top-k, min-p or greedy decoding.
    if filters.get("temperature") == 0 or (
        set(filters) & {"top_k", "min_p"} and filters.get("top_k", 0) < hot
    ):
        assert not needs_tail[::2].any()
    assert needs_tail[1::2].any()


@pytest.mark.parametrize(
    "filters", [{"top_k": 5}, {"top_p": 0.3}, {"top_k": 9, "top_p": 0.5}], ids=str
)
@pytest.mark.parametrize("hot", [0, 300])
def test_ties_go_to_the_lowest_tokens(filters, hot):
    logits = torch.randint(0, 3, (200, 1000), generator=torch.Generator().manual_seed(0)).float()
    uniform = uniforms(200)
    tokens, _ = decided(logits, uniform, hot=hot, **filters)
    assert_oracle(tokens, logits, uniform, filters)


@pytest.mark.parametrize("hot", [0, 10])
@every_filter
def test_undefined_rows(filters, hot):
    logits, uniform = rows(600, 8), uniforms(8)
    logits[0, 5] = logits[1, 599] = torch.nan
    logits[2, 300] = torch.inf
    logits[3] = -torch.inf
    logits[4, 5:] = -torch.inf
    logits[5, :-1] = -torch.inf
    tokens, _ = decided(logits, uniform, hot=hot, **filters)
    assert assert_oracle(tokens, logits, uniform, filters)[:4].eq(-1).all()
    assert tokens[4] < 5 and tokens[5] == 599


@pytest.mark.parametrize("T", [-1.0, float("nan"), float("inf")])
def test_invalid_temperatures(T):
    tokens, _ = decided(rows(100, 2), uniforms(2), temperature=T)
    assert tokens.tolist() == [-1, -1]


@pytest.mark.parametrize("hot", [0, 1500])
def test_logprob_is_that_of_the_softmax(hot):
    logits, uniform = rows(3001), uniforms(24)
    tokens, logprob = decided(logits, uniform, hot=hot, temperature=0.7)
    expected = torch.log_softmax(logits.double() / 0.7, 1).gather(1, tokens[:, None])[:, 0]
    assert (logprob - expected).abs().max() < 1e-4


def test_a_masked_token_is_never_drawn():
    """Also where all others are far below the largest logit of its block."""
    logits = torch.full((4096, 40), -torch.inf)
    logits[:, 3], logits[:, 30] = 0.0, -80.0
    uniform = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    tokens, _ = decided(logits, uniform)
    assert set(tokens.tolist()) <= {3, 30}


def test_far_tail_keeps_its_mass():
    """One leader, all others 20 below: the inverse CDF reaches each of them."""
    V, n = 5000, 1024
    logits = torch.full((1, V), -20.0)
    logits[0, 777] = 0.0
    small = torch.exp(torch.tensor(-20.0, dtype=torch.float64))
    lead = 1 / (1 + (V - 1) * small)
    below = float(777 * small * lead)
    uniform = torch.linspace(below + float(lead), 1, n + 2, dtype=torch.float64)[1:-1]
    tokens, _ = decided(logits.expand(n, V), uniform)
    expected = 778 + (torch.arange(1, n + 1).double() / (n + 1) * (V - 778)).long()
    assert (tokens - expected).abs().max() <= 2
