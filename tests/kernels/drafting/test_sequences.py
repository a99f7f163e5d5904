"""Whole sequences with drafts, by every public call: the bits of those without.

The next logits depend on the last token only, so a request is a Markov chain. In bf16 a CPU runs
the reference. Each request has its temperature (one in six is greedy), seed and mask.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import pytest
import torch
from tiers import full
from torch import Tensor

from fsbench import reference
from fsbench.kernels import (
    draft_sample,
    flash_sample,
    prepare_draft_vocabulary,
    prepare_head,
    screened_sample,
    step_noise,
    truncated_sample,
    verify_drafts,
)

pytestmark = pytest.mark.usefixtures("one_thread")

V, D, K = 60, 32, 4
PARENTS = torch.tensor([0, 1, 0, 3])
"""A tree of two branches."""
FILTERED: dict[str, Any] = {"top_k": 12, "top_p": 0.9, "min_p": 0.01}
SAMPLERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "token": (flash_sample, {"noise": "token"}),
    "group": (flash_sample, {"noise": "group"}),
    "screened": (screened_sample, {}),
    "filtered token": (truncated_sample, {"noise": "token", **FILTERED}),
    "filtered group": (truncated_sample, FILTERED),
}


class Chain:
    """B requests that one sampler decodes."""

    def __init__(self, sampler: str, B: int):
        generator = torch.Generator().manual_seed(5)
        self.state, self.weight, near = (
            torch.randn(V, D, generator=generator).bfloat16() for _ in range(3)
        )
        self.weight = self.weight / 2
        self.drafter = self.state + near / 4
        self.B, self.call, self.options = B, *SAMPLERS[sampler]
        request = torch.arange(B)
        self.seed = request * 0x0123456789ABCD - 7
        self.T = torch.tensor([1.0, 0.7, 1.5, 0.3, 1.0, 0.0])[request % 6]
        self.mask = torch.rand(B, V, generator=generator) < 0.7
        self.mask[:, 3] = self.mask[::2] = True
        self.ids = torch.randperm(V, generator=generator)[:40]

    @cached_property
    def head(self) -> Any:
        return prepare_head(self.weight) if self.call is screened_sample else self.weight

    def draw(self, fed: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        """Return the tokens after fed [B, n]."""
        n = fed.shape[1]
        rows = torch.arange(self.B).repeat_interleave(n)
        drawn = self.call(
            self.state[fed.flatten()], self.head, temperature=self.T[rows], mask=self.mask[rows],
            seed=seed, offset=offset, **self.options,
        )  # fmt: skip
        return drawn.tokens.view(self.B, n)

    def plain(self, length: int) -> Tensor:
        tokens = torch.zeros(self.B, length + 1, dtype=torch.int64)
        for i in range(length):
            offset = torch.full((self.B,), i)
            tokens[:, i + 1] = self.draw(tokens[:, i : i + 1], self.seed, offset)[:, 0]
        return tokens

    def step(
        self, last: Tensor, position: Tensor, drafts: Tensor, parents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens [B, K + 1] and the last token [B] of a speculative step."""
        fed = torch.cat([last[:, None], drafts], 1).clamp(0, V - 1)
        sampled = self.draw(fed, *step_noise(self.seed, position, K, parents))
        verified = verify_drafts(sampled, drafts, parents, vocab_size=V)
        tokens = verified.tokens
        assert torch.equal(tokens >= 0, verified.nodes >= 0)
        return tokens, tokens.gather(1, verified.num_accepted[:, None])[:, 0]

    def coupled_drafts(self, last: Tensor, position: Tensor) -> Tensor:
        """Draw from a reduced head of a similar model, with the target's noise."""
        vocabulary = prepare_draft_vocabulary(self.ids, V)
        filters = {name: self.options[name] for name in FILTERED if name in self.options}
        drafts = [last]
        for i in range(K):
            drawn = draft_sample(
                self.drafter[drafts[-1].clamp_min(0)], self.weight[self.ids], vocabulary,
                temperature=self.T, mask=self.mask, seed=self.seed, offset=position + i, **filters,
            )  # fmt: skip
            drafts.append(drawn.tokens)
        return torch.stack(drafts[1:], 1)


def drafts_of(
    drafter: str, chain: Chain, expected: Tensor, last: Tensor, position: Tensor
) -> Tensor:
    """Return drafts [B, K]; expected: the tokens without drafts, [B, K]."""
    generator = torch.Generator().manual_seed(int(position.sum()))
    anything = torch.randint(-(2**62), 2**62, expected.shape, generator=generator)
    uniform = torch.rand(expected.shape, generator=generator)
    return {
        "coupled": lambda: chain.coupled_drafts(last, position),
        "right": lambda: expected,
        "wrong": lambda: (expected + 1) % V,
        "late": lambda: torch.where(uniform < 0.8, expected, (expected + 1) % V),
        "anything": lambda: torch.where(uniform < 0.5, expected, anything % (2 * V) - V),
        "far": lambda: torch.where(uniform < 0.7, expected, anything),
    }[drafter]()


def decode(chain: Chain, plain: Tensor, drafter: str, parents: Tensor | None) -> int:
    """Decode with drafts, compare the whole sequence, and return the number of steps."""
    length = plain.shape[1] - 1
    padded = torch.nn.functional.pad(plain, (0, K + 1))
    out = torch.full_like(padded, -1)
    last, done = plain[:, 0], torch.zeros(chain.B, dtype=torch.int64)
    ahead = torch.arange(K + 1)
    steps = 0
    while (done < length).any():
        position = done.clamp_max(length - 1)
        depth = ahead[:K] if parents is None else torch.tensor([0, 1, 0, 1])
        expected = padded.gather(1, position[:, None] + 1 + depth)
        drafts = drafts_of(drafter, chain, expected, last, position)
        tokens, last = chain.step(last, position, drafts.contiguous(), parents)
        accepted = (tokens >= 0) & (done < length)[:, None]
        columns = torch.where(accepted, position[:, None] + 1 + ahead, 0)
        out.scatter_(1, columns, torch.where(accepted, tokens, plain[:, :1]))
        last = last.clamp_min(0)
        done += accepted.sum(1)
        steps += 1
    assert torch.equal(out[:, 1 : length + 1], plain[:, 1:])
    return steps


DRAFTERS = ("coupled", "right", "wrong", "late", "anything", "far")


@pytest.mark.parametrize(("B", "length"), [(12, 12), full(60, 20)])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sequence_with_drafts_is_the_one_without(sampler, B, length):
    """In the full tier 5 samplers, 6 drafters, 60 requests of 20 tokens: 36,000 tokens."""
    chain = Chain(sampler, B)
    plain = chain.plain(length)
    assert (plain >= 0).all()
    steps = {name: decode(chain, plain, name, None) for name in DRAFTERS}
    assert steps["right"] == -(-length // (K + 1)) and steps["wrong"] == length
    if B == 12:
        for name in ("right", "late", "anything"):
            steps[name] = decode(chain, plain, name, PARENTS)
        assert steps["right"] == -(-length // 3)


@pytest.mark.parametrize("sampler", ["token", "filtered token"])
def test_drafts_are_accepted_as_often_as_expected(sampler):
    chain = Chain(sampler, 180)
    plain = chain.plain(10)
    last, mask = plain[:, :-1].flatten(), chain.mask.repeat_interleave(10, 0)
    T = chain.T.repeat_interleave(10)
    filters = {name: chain.options[name] for name in FILTERED if name in chain.options}
    distributions = []
    for states, only in ((chain.state, range(V)), (chain.drafter, chain.ids.tolist())):
        allowed = mask & torch.isin(torch.arange(V), torch.tensor(only))
        logits = states[last].float() @ chain.weight.float().T
        logits = logits.masked_fill(~allowed, -torch.inf)
        kept = reference.truncate(logits, T, **filters)
        distributions.append(reference.filtered_probabilities(logits, kept, T.where(T > 0, 1.0)))
    greedy = distributions[0].argmax(1) == distributions[1].argmax(1)
    chance = reference.coupled_acceptance(*distributions).where(T > 0, greedy.double())
    accepted = 0
    for i in range(10):
        drafts = chain.coupled_drafts(plain[:, i], torch.full((chain.B,), i))
        accepted += int((drafts[:, 0] == plain[:, i + 1]).sum())
    spread = float((chance * (1 - chance)).sum()) ** 0.5
    assert spread > 15 and abs(accepted - float(chance.sum())) < 4 * spread  # the seeds are fixed
    assert 300 < accepted < 1500
