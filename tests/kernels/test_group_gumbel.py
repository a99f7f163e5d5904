"""The samplers that merge draws of parts of a vocabulary: in torch, and in the interpreter.

Those in torch are called as (hidden, weight, T), the kernels as (logits, T); both give (tokens [B],
log Z [B] or None). Parts have 16 tokens unless a test says otherwise.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsbench import reference
from fsbench.kernels import flash_sampling_online as streaming
from fsbench.kernels import group_gumbel_distributed as distributed
from fsbench.kernels import group_gumbel_online as online
from fsbench.kernels import group_gumbel_parallel as parallel
from fsbench.reference.philox import random_words
from fsbench.verify.statistics import goodness_of_fit

pytestmark = pytest.mark.usefixtures("one_thread")

INF, NAN = torch.inf, torch.nan
SEED = -7
DRAWS = 2**16


def by_streaming(hidden: Tensor, weight: Tensor, T: float) -> tuple[Tensor, None]:
    return streaming.flash_sampling_online(hidden, weight, T), None


def by_merging(hidden: Tensor, weight: Tensor, T: float) -> tuple[Tensor, None]:
    V = len(weight)  # shards of any size
    shards = weight.split([0, 1, 0, 12, V - 13, 0]) if V > 13 else weight.tensor_split(8)
    return distributed.group_gumbel_distributed(hidden, shards, T), None


by_chunks = online.group_gumbel_online


def by_kernels(logits: Tensor, T: float, step: int = 0) -> tuple[Tensor, Tensor]:
    seed, offset = torch.tensor([SEED]), torch.tensor([step])
    return parallel.group_gumbel_parallel(logits, seed, offset, T)


IN_TORCH = (by_streaming, by_merging, by_chunks)
EVERY = (*IN_TORCH, pytest.param(by_kernels, marks=pytest.mark.interpreter))
every = pytest.mark.parametrize("draw", EVERY)
interpreted = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(5)


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Return a function that sets the number of tokens of a part."""

    def use(tokens: int) -> None:
        for module, name in (
            (streaming, "TOKENS_AT_ONCE"),
            (online, "TOKENS_AT_ONCE"),
            (parallel, "TOKENS_OF_GROUP"),
        ):
            monkeypatch.setattr(module, name, tokens)

    use(16)
    return use


def assert_drawn_from(p: Tensor, outcomes: Tensor) -> None:
    """The outcomes, integers, are independent draws with the probabilities p."""
    counts = torch.bincount(outcomes.flatten(), minlength=len(p))
    verdict = goodness_of_fit(counts.numpy(), p.double().numpy())
    assert verdict.passed, verdict.detail


def drawn(draw, logits: Tensor, T: float) -> tuple[Tensor, Tensor | None]:
    """Return (tokens, log Z) of logits [B, V]; in torch row by row, so that no NaN meets a 0."""
    if draw is by_kernels:
        return draw(logits, T)
    rows = [draw(torch.ones(1, 1), row[:, None], T) for row in logits]
    tokens = torch.cat([token for token, _ in rows])
    return tokens, torch.cat([z for _, z in rows]) if draw is by_chunks else None


def draw_many(draw, row: Tensor, T: float) -> Tensor:
    """Draw DRAWS tokens from one row of logits [V]."""
    return draw(torch.ones(DRAWS, 1), row[:, None], T)[0]


@pytest.mark.parametrize("draw", IN_TORCH)
@pytest.mark.parametrize(("size", "T"), [(1, 0.4), (16, 0.4), (16, 5.0), (100, 1.0), (8192, 1.0)])
def test_tokens_are_drawn_from_the_softmax(draw, size, T, parts):
    """100 tokens: parts of one token, a partial last one, a single whole one, one too large."""
    parts(size)
    logits = 1.5 * torch.randn(100) - 20
    logits[[0, 40, 99]] = -18.0
    assert_drawn_from((logits / T).softmax(0), draw_many(draw, logits, T))


@pytest.mark.parametrize("draw", [by_merging, by_chunks])
def test_choices_of_rows_and_steps_are_independent(draw, parts):
    """With one token per part only the merges choose; pairs of them are uniform over all pairs."""
    parts(1)
    first, second = draw_many(draw, torch.zeros(3), 1.0), draw_many(draw, torch.zeros(3), 1.0)
    uniform = torch.full((9,), 1 / 9)
    assert_drawn_from(uniform, 3 * first[0::2] + first[1::2])
    assert_drawn_from(uniform, 3 * first + second)


def test_log_masses_are_compared_in_float64(parts):
    """At logits / T of ten million, fp32 has whole numbers only."""
    parts(1)
    logits = torch.tensor([1.0, 1.0 - 2.0**-24])
    assert_drawn_from((logits.double() / 1e-7).softmax(0), draw_many(by_chunks, logits, 1e-7))


@every
@pytest.mark.parametrize("T", [0.0, 1.0])
def test_rows_of_every_kind(draw, T):
    """Undefined rows, parts without mass, and rows of a single token in one batch."""
    rows = torch.randn(9, 60) - 30
    rows[0, 59], rows[1, 0], rows[2, 20], rows[3] = NAN, NAN, INF, -INF
    rows[4:8] = -INF
    only = torch.tensor([0, 13, 33, 59])
    rows[torch.arange(4, 8), only] = -50.0  # far below 0, the sum of an empty part
    tokens, log_z = drawn(draw, rows, T)
    assert tokens[:8].tolist() == [-1] * 4 + only.tolist() and tokens[8] >= 0
    if log_z is not None:
        assert log_z.isnan().tolist() == [True] * 4 + [False] * 5


@pytest.mark.parametrize("draw", IN_TORCH)
def test_an_undefined_row_leaves_its_neighbors_alone(draw):
    hidden = torch.randn(4, 8)
    hidden[1], hidden[2] = NAN, -INF
    tokens, _ = draw(hidden, torch.ones(50, 8), 1.0)
    assert (tokens >= 0).tolist() == [True, False, False, True]


@every
def test_greedy_is_the_lowest_id_among_ties(draw):
    logits = torch.full((3, 60), -9.0)
    logits[0, [7, 12, 40]] = -3.0
    logits[1, [31, 32, 59]] = -3.0
    logits[2, 16:] = -8.9  # parts of more mass than that of the largest logit
    logits[2, 3] = -8.8
    assert drawn(draw, logits, 0.0)[0].tolist() == [7, 31, 3]


@pytest.mark.parametrize("draw", [by_chunks, *EVERY[3:]])
def test_temperatures_below_the_smallest_fp32_number_are_greedy(draw):
    logits = torch.randn(4, 50)
    for T in (1e-60, 1e-40):
        tokens, log_z = drawn(draw, logits, T)
        assert torch.equal(tokens, logits.argmax(1)) and not log_z.isnan().any()


@pytest.mark.parametrize(("size", "T"), [(1, 0.3), (7, 20.0), (8192, 1.0)])
def test_log_z_of_chunks_is_the_logsumexp(size, T, parts):
    parts(size)
    logits = torch.randn(4, 100) + torch.tensor([[50.0], [-1e4], [1e4], [-90.0]])
    logits[3, :90] = -3e38
    _, log_z = drawn(by_chunks, logits, T)
    exact = (logits.double() / T).logsumexp(1)
    assert log_z.dtype == torch.float64
    assert ((log_z - exact) / exact).abs().max() < 1e-6


# The merge of shards


def merged(log_masses: list[float], **options: bool) -> Tensor:
    """Merge shards DRAWS times; the sample of a shard is its number."""
    K = len(log_masses)
    masses = torch.tensor(log_masses, dtype=torch.float64)[:, None].expand(K, DRAWS)
    return distributed.merge(masses, torch.arange(K)[:, None].expand(K, DRAWS), **options)


@pytest.mark.parametrize(
    "log_masses",
    [[-INF, 0.0, -INF, 1.0, -INF], [1e4, 1e4 + 1, 1e4 - 2], [-1000.5, -INF, -1000.0, -1003.0]],
    ids=str,
)
def test_shards_are_chosen_in_proportion_to_their_mass(log_masses):
    p = torch.tensor(log_masses, dtype=torch.float64).softmax(0)
    assert_drawn_from(p, merged(log_masses))


@pytest.mark.parametrize("greedy", [False, True])
def test_a_merge_leaves_undefined_rows_out(greedy):
    masses = torch.tensor([[NAN, 1.0, 1.0, -INF, -INF], [1.0, NAN, INF, -INF, 2.0]])
    samples = torch.tensor([[0] * 5, [7] * 5])
    assert distributed.merge(masses, samples, greedy).tolist() == [-1, -1, -1, -1, 7]
    if greedy:
        assert set(merged([-INF, 2.0, 1.0, 2.0], greedy=True).tolist()) == {1}


# The kernels, against the algorithm in float64


def algorithm(logits: Tensor, step: int, T: float, group: int) -> Tensor:
    """Return the tokens of Algorithm I.2, T > 0, with the specified noise."""
    B, V = logits.shape
    seed, offset, rows = torch.tensor([SEED]), torch.tensor([step]), torch.arange(B)
    scaled = logits.double() / T
    scores = scaled + reference.token_noise(V, seed, offset, rows)
    samples, masses = [], []
    for v0 in range(0, V, group):
        samples.append(v0 + scores[:, v0 : v0 + group].argmax(1))
        masses.append(scaled[:, v0 : v0 + group].logsumexp(1))
    bits, _, _, _ = random_words(torch.arange(len(masses)), rows, offset, 2 << 16, seed)
    chosen = (torch.stack(masses, 1) + reference.gumbel(bits)).argmax(1)
    return torch.stack(samples, 1)[rows, chosen]


@interpreted
@pytest.mark.parametrize("T", [0.5, 1.0])
@pytest.mark.parametrize(
    ("B", "V", "group", "dtype"),
    [
        (1, 1, 1024, torch.float32),
        (3, 2500, 1024, torch.float16),
        (6, 100, 16, torch.float32),
    ],
    ids=str,
)
def test_tokens_and_log_z_are_those_of_the_algorithm(B, V, group, dtype, T, parts):
    parts(group)
    logits = (2 * torch.randn(B, V) - 30).to(dtype)
    for step in (2, 2**32 - 1):
        tokens, log_z = by_kernels(logits, T, step)
        assert tokens.tolist() == algorithm(logits, step, T, group).tolist()
        exact = (logits.double() / T).logsumexp(1)
        assert log_z.dtype == torch.float32
        assert ((log_z - exact) / exact).abs().max() < 1e-6


@pytest.mark.parametrize("T", [0.4, 1.0])
def test_the_algorithm_draws_from_the_softmax(T):
    """With the specified noise, and more draws than the interpreter can make."""
    logits = 2 * torch.randn(40)
    same = logits.expand(2**13, -1)
    tokens = torch.cat([algorithm(same, step, T, 16) for step in range(4)])
    assert_drawn_from((logits / T).softmax(0), tokens)


def test_the_choice_of_a_group_is_independent_of_noise_rows_and_steps():
    """Four equally likely tokens, two in a group, by the algorithm, whose tokens are the kernels'.

    They are the tokens of the Philox words 0 and 1 in their groups. If group k had the noise of
    word k, group 0 would be chosen when token 0 beats token 2, so token 2 would never be drawn.
    """
    logits = torch.full((64, 32), -INF)
    logits[:, [0, 2, 16, 18]] = 0.0
    steps = torch.stack([algorithm(logits, step, 1.0, 16) for step in (0, 1)])
    group, second = steps // 16, (steps % 16) // 2
    assert_drawn_from(torch.full((4,), 0.25), 2 * group + second)
    half = torch.full((2,), 0.5)
    for number in group:
        assert_drawn_from(half, number)  # rows differ
    assert_drawn_from(half, (group[0] == group[1]).long())  # steps differ
    assert_drawn_from(half, (group[:, 1:] == group[:, :-1]).long())  # neighbors differ
