"""Speculative decoding of a Markov chain: the tokens are those of plain decoding.

The chain has three tokens. Its next token depends on the last alone: the LM head [3, 3] applied to
the one-hot state of the last token gives its logits.
In bf16 flash_sample runs fsbench.reference on a CPU; seeds [B] make every row a separate trial.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import Verified, flash_sample, step_noise, verify_drafts
from fsbench.kernels.fused.drafts import verified_by_kernel, verified_by_torch

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 3
START = 2
WEIGHT = torch.tensor([[0.5, 1.0, -0.5], [1.0, 0.0, 0.25], [-1.0, 0.5, 0.0]], dtype=torch.bfloat16)
"""[3, 3]: column c has the logits after token c."""
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
    fed = torch.cat([last[:, None], drafts.clamp_min(0)], 1)
    sampled = draw(fed, *step_noise(seed, position, drafts.shape[1]), noise)
    return verify_drafts(sampled.flatten(), drafts)


def decode_speculatively(trials: int, k: int, noise: str) -> Tensor:
    """As decode, k drafts at a time."""
    tokens = torch.full((trials, 1 + LENGTH * (k + 1)), START)
    length = torch.ones(trials, dtype=torch.int64)
    for _ in range(LENGTH):  # each step gives a token or more
        last = tokens.gather(1, length[:, None] - 1)[:, 0]
        new = step(last, propose(last, k), seeds(trials), length - 1, noise).tokens
        # Positions behind the accepted ones are written again by the next step.
        tokens.scatter_(1, length[:, None] + torch.arange(k + 1), new)
        length += (new >= 0).sum(1)
    return tokens[:, 1 : LENGTH + 1]


@pytest.mark.parametrize("noise", ["token", "group"])
@pytest.mark.parametrize("k", [1, 4])
def test_speculation_changes_no_token(k, noise):
    assert torch.equal(decode_speculatively(1000, k, noise), decode(1000, noise))


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
    # A chain is a tree of one branch.
    tree = verify_drafts(sampled, torch.tensor(drafts), torch.arange(2))
    for one, other in zip(verified, tree, strict=True):
        assert torch.equal(one, other)
    kept = [list(range(n + 1)) + [-1] * (2 - n) for n in accepted]
    assert verified.nodes.tolist() == kept
    assert torch.equal(verified.refused, torch.tensor(drafts) < 0)


PARENTS = [0, 0, 1, 1, 3, 2, 0]
"""Of drafts 1 to 7: two branches from the last token, 1 -> 3 -> 5, 1 -> 4 and 2 -> 6; 7 alone."""


@pytest.mark.parametrize(
    ("drawn", "drafts", "nodes"),
    [
        ([8, 7, 5, 6, 0, 9, 4, 3], [8, 1, 7, 2, 6, 3, 2], [0, 1, 3, 5]),
        ([8, 2, 5, 6, 0, 9, 4, 3], [8, 1, 7, 2, 6, 3, 2], [0, 1, 4]),
        ([1, 2, 3, 6, 0, 9, 4, 3], [8, 1, 7, 2, 6, 3, 2], [0, 2, 6]),
        ([2, 2, 3, 6, 0, 9, 4, 3], [8, 1, 7, 2, 6, 3, 2], [0, 7]),
        ([9, 2, 3, 6, 0, 9, 4, 3], [8, 1, 7, 2, 6, 3, 2], [0]),
        ([8, 7, 5, 6, 0, 9, 4, 3], [8, 1, 7, 2, -1, 3, 2], [0, 1, 3]),  # missing below
        ([8, 7, 5, 6, 0, 9, 4, 3], [-1, 1, 7, 2, 6, 3, 2], [0]),  # and above: no path
        ([8, 7, 5, 6, 0, 9, 4, 3], [8, 8, 7, 7, 6, 3, 8], [0, 1, 3, 5]),  # equal: the first
        ([-1, 7, 5, 6, 0, 9, 4, 3], [-1, -1, 7, 2, 6, 3, 2], [0]),  # no draw at the root
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_path_through_a_tree(drawn, drafts, nodes, dtype):
    sampled = torch.tensor([drawn, drawn])
    shared = torch.tensor(PARENTS, dtype=dtype)
    for parents in (shared, shared.expand(2, -1).contiguous()):
        verified = verify_drafts(sampled, torch.tensor([drafts, drafts], dtype=dtype), parents)
        behind = [-1] * (8 - len(nodes))
        assert verified.nodes.tolist() == [[*nodes, *behind]] * 2
        assert verified.num_accepted.tolist() == [len(nodes) - 1] * 2
        assert verified.tokens.tolist() == [[*(drawn[node] for node in nodes), *behind]] * 2


def test_a_long_chain_is_a_tree():
    drafts = torch.arange(9).expand(10, 9).clone()
    for row in range(9):
        drafts[row, row] = 99
    sampled = torch.arange(10).expand(10, 10).contiguous()
    chain, tree = (verify_drafts(sampled, drafts, parents) for parents in (None, torch.arange(9)))
    assert chain.num_accepted.tolist() == list(range(10))
    for one, other in zip(chain, tree, strict=True):
        assert torch.equal(one, other)


def test_what_no_draw_can_confirm_is_flagged():
    sampled = torch.tensor([[4, 5, 6, 7], [4, 5, 6, 7]])
    drafts = torch.tensor([[4, 9, -1], [4, 5, 6]])
    chain = verify_drafts(sampled, drafts, vocab_size=9)
    assert chain.refused.tolist() == [[False, True, True], [False, False, False]]
    # A parent that is itself, later, or below 0: refused, and so is nothing else.
    for bad in (2, 3, 2**40, -1):
        tree = verify_drafts(sampled, drafts, torch.tensor([[0, 1, 2], [0, bad, 2]]), vocab_size=9)
        assert tree.refused[1].tolist() == [False, True, False]
        assert tree.tokens[1].tolist() == [4, 5, -1, -1]
        assert tree.tokens[0].tolist() == chain.tokens[0].tolist()


@pytest.mark.parametrize("k", [0, 3, 8])
@pytest.mark.parametrize("vocab_size", [None, 3])
def test_the_kernel_returns_what_torch_returns(k, vocab_size):
    """Few tokens, so that many drafts are right and siblings equal; some of no use."""
    B = 64
    generator = torch.Generator().manual_seed(k)
    sampled = torch.randint(-1, 4, (B, k + 1), generator=generator)
    drafts = torch.randint(-1, 4, (B, k), generator=generator).int()
    of_rows = torch.randint(-1, k + 2, (B, k), generator=generator)
    early = torch.arange(k) // 2  # a tree of two branches at each node
    for parents in (None, early, of_rows, early.expand(B, -1).int().contiguous()):
        by_kernel = verified_by_kernel(sampled, drafts, parents, vocab_size)
        by_torch = verified_by_torch(sampled, drafts, parents, vocab_size)
        for one, other in zip(by_kernel, by_torch, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
        assert k < 3 or 0 < by_torch.num_accepted.float().mean() < k


def test_noise_of_a_step():
    seed, position = torch.tensor([11, 12]), torch.tensor([5, 2**40])
    of_rows, offset = step_noise(seed, position, 3)
    assert of_rows.tolist() == [11] * 4 + [12] * 4
    assert (offset.view(2, 4) - position[:, None]).tolist() == [[0, 1, 2, 3]] * 2
    of_rows, offset = step_noise(seed, position, 7, torch.tensor(PARENTS))
    assert of_rows.tolist() == [11] * 8 + [12] * 8
    assert (offset.view(2, 8) - position[:, None]).tolist() == [[0, 1, 1, 2, 2, 3, 2, 1]] * 2


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"seed": torch.tensor([1])}, InvalidArgument, r"seed: expected shape \[2\]; got \[1\]"),
        ({"seed": torch.tensor([1, 2]).int()}, InvalidType, "seed: expected dtype torch.int64"),
        ({"position": 3}, InvalidType, "position: expected a tensor; got int"),
        ({"position": torch.zeros(1, 2).long()}, InvalidArgument, r"position: expected shape"),
        ({"k": -1}, InvalidArgument, "k: expected 0 to"),
        ({"parents": torch.zeros(2).long()}, InvalidArgument, r"parents: expected shape \[3\]"),
        ({"parents": torch.zeros(3)}, InvalidType, "parents: expected dtype"),
    ],
)
def test_bad_noise_of_a_step(changed, error, message):
    arguments = {"seed": torch.tensor([1, 2]), "position": torch.tensor([0, 0]), "k": 3}
    with pytest.raises(error, match=message):
        step_noise(**{**arguments, **changed})


def test_without_drafts_it_is_plain_decoding():
    verified = verify_drafts(torch.tensor([3, 4]), torch.empty(2, 0, dtype=torch.int64))
    assert verified.tokens.tolist() == [[3], [4]] and verified.num_accepted.tolist() == [0, 0]


def test_no_value_is_read_on_the_host():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():  # a fake tensor has no values, and raises where one is asked for
        sampled, drafts = (torch.empty(n, dtype=torch.int64) for n in ((2, 3), (2, 2)))
        for parents in (None, torch.empty(2, dtype=torch.int64)):
            verified = verify_drafts(sampled, drafts, parents)
            assert verified.tokens.shape == (2, 3) and verified.num_accepted.shape == (2,)
            step_noise(drafts[:, 0].contiguous(), verified.num_accepted, 2, parents)


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
    launch()  # compiles
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
