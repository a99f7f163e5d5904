"""Speculative decoding of a Markov chain: the very tokens of plain decoding, the chain's law.

The chain has three tokens. Its next token depends on the last alone, so the LM head [3, D] applied
to the one-hot state of the last token gives its logits, and the law of every sequence is known.
In bf16 flash_sample runs fsbench.reference on a CPU; seeds [B] make every row a trial of its own.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import Verified, flash_sample, verify_drafts
from fsbench.verify.statistics import goodness_of_fit

pytestmark = pytest.mark.usefixtures("one_thread")

TRIALS = 100_000
LENGTH = 3
START = 2
WEIGHT = torch.tensor([[0.5, 1.0, -0.5], [1.0, 0.0, 0.25], [-1.0, 0.5, 0.0]], dtype=torch.bfloat16)
"""[3, 3]: column c has the logits after token c."""
P = torch.softmax(WEIGHT.double().T, 1).numpy()
"""[3, 3]: row c is the law after token c."""
NEXT = torch.tensor([1, 2, 1])
"""The draft after each token: likely, unlikely, likely."""


def seeds(trials: int) -> Tensor:
    return torch.arange(trials) * 0x9E3779B97F4A7C15 % 2**62


def draw(last: Tensor, seed: Tensor, offset: Tensor, noise: str = "token") -> Tensor:
    hidden = torch.eye(3, dtype=torch.bfloat16)[last.flatten()]
    sample = flash_sample(hidden, WEIGHT, seed=seed, offset=offset, noise=noise)
    return sample.tokens.view(last.shape)


def decode(trials: int, noise: str = "token") -> Tensor:
    """Plain decoding: [trials, LENGTH], the token at position p drawn with offset p - 1."""
    tokens = torch.full((trials, 1), START)
    for position in range(LENGTH):
        token = draw(tokens[:, -1:], seeds(trials), torch.full((1,), position), noise)
        tokens = torch.cat([tokens, token], 1)
    return tokens[:, 1:]


def propose(tokens: Tensor, k: int) -> Tensor:
    """The chain of likely successors: what an n-gram table of this model may hold."""
    drafts = [NEXT[tokens]]
    for _ in range(k - 1):
        drafts.append(NEXT[drafts[-1]])
    return torch.stack(drafts, 1)


def step(last: Tensor, drafts: Tensor, seed: Tensor, position: Tensor, noise="token") -> Verified:
    """One pass over the last token and the drafts [B, k], `last` at `position` [B]."""
    k = drafts.shape[1]
    fed = torch.cat([last[:, None], drafts.clamp_min(0)], 1)
    offset = position[:, None] + torch.arange(k + 1)
    sampled = draw(fed, seed.repeat_interleave(k + 1), offset.flatten(), noise)
    return verify_drafts(sampled.flatten(), drafts)


def keeps_draws_after_a_rejection(last, drafts, seed, position) -> Verified:
    """Counts every draft that was drawn, also behind one that was not."""
    k = drafts.shape[1]
    fed = torch.cat([last[:, None], drafts], 1)
    offset = position[:, None] + torch.arange(k + 1)
    sampled = draw(fed, seed.repeat_interleave(k + 1), offset.flatten())
    num_accepted = (sampled[:, :k] == drafts).sum(1)
    beyond = torch.arange(k + 1) > num_accepted[:, None]
    return Verified(sampled.masked_fill(beyond, -1), num_accepted)


def draws_again_after_a_rejection(last, drafts, seed, position) -> Verified:
    """Replaces the correction by another draw of the same law: the draft has a second chance."""
    tokens, num_accepted = step(last, drafts, seed, position)
    fed = torch.cat([last[:, None], drafts], 1).gather(1, num_accepted[:, None])
    again = draw(fed, seed, (position + num_accepted) + 2**31)
    again = torch.where(num_accepted[:, None] < drafts.shape[1], again, -1)
    at_correction = torch.arange(tokens.shape[1]) == num_accepted[:, None]
    return Verified(torch.where(at_correction & (again >= 0), again, tokens), num_accepted)


def returns_the_draft(last, drafts, seed, position) -> Verified:
    """The wrong draft in place of its correction."""
    tokens, num_accepted = step(last, drafts, seed, position)
    padded = torch.nn.functional.pad(drafts, (0, 1), value=-1)
    at_correction = torch.arange(tokens.shape[1]) == num_accepted[:, None]
    return Verified(torch.where(at_correction & (padded >= 0), padded, tokens), num_accepted)


def shares_noise_between_positions(last, drafts, seed, position) -> Verified:
    """One offset for all positions of a step."""
    k = drafts.shape[1]
    fed = torch.cat([last[:, None], drafts], 1)
    sampled = draw(fed, seed.repeat_interleave(k + 1), position.repeat_interleave(k + 1))
    return verify_drafts(sampled, drafts)


def decode_speculatively(trials: int, k: int, one_step=step) -> tuple[Tensor, Tensor]:
    """(tokens [trials, LENGTH], drafts accepted in the first step [trials])."""
    tokens = torch.full((trials, 1 + LENGTH * (k + 1)), START)
    length = torch.ones(trials, dtype=torch.int64)
    accepted = []
    for _ in range(LENGTH):  # each step gives a token or more
        last = tokens.gather(1, length[:, None] - 1)[:, 0]
        new, num_accepted = one_step(last, propose(last, k), seeds(trials), length - 1)
        accepted.append(num_accepted)
        # Positions behind the accepted ones are written again by the next step.
        tokens.scatter_(1, length[:, None] + torch.arange(k + 1), new)
        length += (new >= 0).sum(1)
    return tokens[:, 1 : LENGTH + 1], accepted[0]


def law(length: int) -> np.ndarray:
    """Of every sequence of the chain, in the order of `counts`."""
    chains = product(range(3), repeat=length)
    return np.array([np.prod([P[a, b] for a, b in zip((START, *c), c, strict=False)])
                     for c in chains])  # fmt: skip


def counts(tokens: Tensor) -> np.ndarray:
    """How often each sequence was seen."""
    length = tokens.shape[1]
    number = (tokens * 3 ** torch.arange(length - 1, -1, -1)).sum(1)
    return torch.bincount(number, minlength=3**length).numpy()


@pytest.fixture(scope="module")
def plain() -> Tensor:
    return decode(TRIALS)


@pytest.fixture(scope="module")
def speculative() -> tuple[Tensor, Tensor]:
    return decode_speculatively(TRIALS, 2)


def test_speculation_changes_no_token(plain, speculative):
    assert torch.equal(speculative[0], plain)


@pytest.mark.parametrize("noise", ["token", "group"])
@pytest.mark.parametrize("k", [1, 4])
def test_the_number_of_drafts_changes_no_token(k, noise):
    tokens, _ = decode_speculatively(2000, k, partial(step, noise=noise))
    assert torch.equal(tokens, decode(2000, noise))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_law_of_the_sequence_is_the_models(length, speculative):
    tokens, _ = speculative
    assert goodness_of_fit(counts(tokens[:, :length]), law(length)).passed


def test_a_draft_is_accepted_with_its_probability(speculative):
    one, two = propose(torch.tensor([START]), 2)[0].tolist()
    first, second = P[START, one], P[one, two]
    assert first > 0.4 and second < 0.4
    expected = np.array([1 - first, first * (1 - second), first * second])
    assert goodness_of_fit(torch.bincount(speculative[1]).numpy(), expected).passed


@pytest.mark.parametrize(
    "wrong",
    [
        keeps_draws_after_a_rejection,
        draws_again_after_a_rejection,
        returns_the_draft,
        shares_noise_between_positions,
    ],
)
def test_a_wrong_step_does_not_pass(wrong, plain):
    """Neither the test of the law nor the comparison with plain decoding is blind."""
    tokens, _ = decode_speculatively(TRIALS // 5, 2, wrong)
    assert not goodness_of_fit(counts(tokens), law(LENGTH)).passed
    assert not torch.equal(tokens, plain[: len(tokens)])


def test_the_kernel_speculates_like_it_decodes():
    """In fp32, in the interpreter where it is on: rows of different requests and positions."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(50, 32, generator=generator)  # the state after each token
    weight = torch.randn(50, 32, generator=generator) / 4
    B, k = 3, 3
    seed, temperature = torch.tensor([5, 6, 2**62]), torch.tensor([1.0, 0.0, 0.7])
    plain = torch.zeros(B, 1, dtype=torch.int64)
    for position in range(k + 1):
        sample = flash_sample(
            table[plain[:, -1]],
            weight,
            seed=seed,
            offset=torch.full((1,), position),
            temperature=temperature,
        )
        plain = torch.cat([plain, sample.tokens[:, None]], 1)
    drafts = plain[:, 1:-1].clone()
    drafts[1, 2] = -1
    drafts[2, 1] = (drafts[2, 1] + 1) % 50
    fed = torch.cat([plain[:, :1], drafts.clamp_min(0)], 1)
    sampled = flash_sample(
        table[fed.flatten()],
        weight,
        seed=seed.repeat_interleave(k + 1),
        offset=torch.arange(k + 1).repeat(B),
        temperature=temperature.repeat_interleave(k + 1),
    ).tokens
    tokens, num_accepted = verify_drafts(sampled, drafts)
    assert num_accepted.tolist() == [3, 2, 1]
    for row, kept in enumerate([4, 3, 2]):
        assert tokens[row].tolist() == [*plain[row, 1 : kept + 1].tolist(), *[-1] * (4 - kept)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("flat", [True, False])
def test_partial_drafts_and_rows_without_a_draw(dtype, flat):
    cases = [  # drawn, drafts, tokens, accepted
        ([4, 5, 6], [4, 5], [4, 5, 6], 2),
        ([4, 5, 6], [4, 9], [4, 5, -1], 1),
        ([4, 5, 6], [9, 5], [4, -1, -1], 0),
        ([4, 5, 6], [4, -1], [4, 5, -1], 1),
        ([4, 5, 6], [-1, -1], [4, -1, -1], 0),
        ([4, 5, 6], [-1, 5], [4, -1, -1], 0),
        ([-1, 5, 6], [-1, 5], [-1, -1, -1], 0),
        ([4, -1, 6], [4, -1], [4, -1, -1], 1),
        ([4, 5, -1], [4, 5], [4, 5, -1], 2),
    ]
    drawn, drafts, tokens, accepted = zip(*cases, strict=True)
    sampled = torch.tensor(drawn)
    verified = verify_drafts(
        sampled.flatten() if flat else sampled, torch.tensor(drafts, dtype=dtype)
    )
    assert verified.tokens.tolist() == list(tokens) and verified.tokens.dtype == torch.int64
    assert verified.num_accepted.tolist() == list(accepted)
    assert verified.num_accepted.dtype == torch.int64


def test_without_drafts_it_is_plain_decoding():
    verified = verify_drafts(torch.tensor([3, 4]), torch.empty(2, 0, dtype=torch.int64))
    assert verified.tokens.tolist() == [[3], [4]] and verified.num_accepted.tolist() == [0, 0]


def test_the_arguments_are_left_alone():
    sampled, drafts = torch.tensor([1, 2, 3]), torch.tensor([[1, 9]])
    verify_drafts(sampled, drafts)
    assert sampled.tolist() == [1, 2, 3] and drafts.tolist() == [[1, 9]]


def test_no_value_is_read_on_the_host():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():  # a fake tensor has no values, and raises where one is asked for
        verified = verify_drafts(
            torch.empty(6, dtype=torch.int64), torch.empty(2, 2, dtype=torch.int32)
        )
    assert verified.tokens.shape == (2, 3) and verified.num_accepted.shape == (2,)


def test_compiles_without_a_graph_break():
    drafts = propose(torch.tensor([0, 1, 2]), 2)
    seed, position = torch.tensor([1, 2, 3]), torch.tensor([0, 5, 9])
    arguments = torch.tensor([0, 1, 2]), drafts, seed, position
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(*arguments), step(*arguments), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    B, k, D, V = 4, 3, 64, 1000
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(B * (k + 1), D, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(V, D, generator=generator, device="cuda").bfloat16() / 8
    seed = torch.arange(B, device="cuda").repeat_interleave(k + 1)
    offset = torch.arange(k + 1, device="cuda").repeat(B)
    drafts = torch.empty(B, k, dtype=torch.int64, device="cuda")

    def launch() -> Verified:
        return verify_drafts(flash_sample(hidden, weight, seed=seed, offset=offset).tokens, drafts)

    sampled = flash_sample(hidden, weight, seed=seed, offset=offset).tokens.view(B, k + 1)
    drafts.copy_(sampled[:, :k])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verified = launch()
    graph.replay()
    assert torch.equal(verified.tokens, sampled)
    drafts[1, 1] = -1
    drafts[2, 0] += 1
    graph.replay()
    assert verified.num_accepted.tolist() == [3, 1, 0, 3]
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(eager.tokens, verified.tokens)


@pytest.mark.parametrize(
    ("sampled", "drafts", "error", "message"),
    [
        ([1, 2], torch.tensor([[1]]), InvalidType, "sampled: expected a tensor; got list"),
        (torch.tensor([1, 2]), [[1]], InvalidType, "drafts: expected a tensor; got list"),
        (torch.tensor([1, 2]), torch.tensor([1]), InvalidArgument, "drafts: expected a matrix"),
        (torch.tensor([1, 2]), torch.tensor([[1.0]]), InvalidType, "drafts: expected dtype"),
        (torch.tensor([1, 2]).int(), torch.tensor([[1]]), InvalidType, "sampled: expected dtype"),
        (torch.tensor([1]), torch.tensor([[1]]), InvalidArgument,
         r"sampled: expected shape \[2\] or \[1, 2\]; got \[1\]"),
        (torch.tensor([1, 2], device="meta"), torch.tensor([[1]]), InvalidArgument,
         "sampled: expected it on cpu"),
        (torch.arange(6), torch.arange(4).view(2, 2).T, InvalidArgument,
         "drafts: expected it contiguous"),
    ],
)  # fmt: skip
def test_bad_arguments(sampled, drafts, error, message):
    with pytest.raises(error, match=message):
        verify_drafts(sampled, drafts)
