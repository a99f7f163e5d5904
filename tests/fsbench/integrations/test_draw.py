"""What an engine draws with: flash_sample, or a sampler of `fsbench list` in its place."""

from __future__ import annotations

import pytest
import torch

from fsbench.errors import InvalidArgument, ProviderUnavailable
from fsbench.integrations.draw import (
    Head,
    LogprobRequest,
    Rows,
    history,
    known,
    make_draw,
    missing,
    named,
)
from fsbench.integrations.routing import Need
from fsbench.kernels import Penalties, TokenHistory, flash_sample, truncated_sample

B, D, V = 4, 64, 500


def problem():
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(B, D, generator=generator).bfloat16()
    weight = torch.randn(V + 12, D, generator=generator).bfloat16() / 4  # with padding rows
    counters = torch.arange(B) + 7
    return hidden, weight, counters


def filters(top_k: list[int], top_p: list[float], min_p: list[float]):
    return torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p), torch.tensor(min_p)


def test_flash_sample_gets_all_of_a_request():
    hidden, weight, counters = problem()
    temperature = torch.tensor([0, 0.5, 1, 2])
    bias = torch.randn(B, V)
    mask = torch.randint(-(2**31), 2**31, (B, -(-V // 32)), dtype=torch.int64).to(torch.int32)
    draw = make_draw("flash_sample", Head(weight, V, soft_cap=3.0))
    same = {
        "temperature": temperature, "seed": counters, "offset": counters + 1, "bias": bias,
        "mask": mask, "soft_cap": 3.0, "vocab_size": V,
    }  # fmt: skip
    rows = Rows(
        hidden, temperature, counters, counters + 1, bias=bias, mask=mask, asked=LogprobRequest(3)
    )
    direct = flash_sample(
        hidden, weight, return_logprob=True, return_rank=True, return_top=3, **same
    )
    assert torch.equal(draw(rows).tokens, direct.tokens)
    told = draw(rows).told
    assert torch.equal(told.tokens[:, 0], direct.tokens)
    assert torch.equal(told.tokens[:, 1:], direct.top_tokens)
    assert torch.equal(told.logprobs[:, 0], direct.logprob)
    assert torch.equal(told.logprobs[:, 1:], direct.top_logprob)
    assert torch.equal(told.ranks, direct.rank + 1)
    top_k, top_p, min_p = off = filters([3, 0, V, 1], [1, 0.5, 1, 1], [0, 0, 0.2, 0])
    cut = truncated_sample(hidden, weight, top_k=top_k, top_p=top_p, min_p=min_p, **same)
    assert torch.equal(draw(rows._replace(filters=off, asked=None)).tokens, cut.tokens)


def test_a_row_without_filters_draws_the_same_beside_a_row_that_has_them():
    """So that plain rows may join filtered ones, and a zero bias and a full mask change nothing."""
    hidden, weight, counters = problem()
    draw = make_draw("flash_sample", Head(weight, V))
    temperature = torch.tensor([0, 0.5, 1, 2])
    for step in range(20):
        plain = Rows(hidden, temperature, counters, counters + step)
        beside = plain._replace(
            filters=filters([V, V, 2, V], [1, 1, 1, 0.3], [0.0] * 4),
            bias=torch.zeros(B, V),
            mask=torch.full((B, -(-V // 32)), -1, dtype=torch.int32),
        )
        assert torch.equal(draw(plain).tokens[:2], draw(beside).tokens[:2])


def test_a_history_is_that_of_the_tokens():
    prompts, outputs = [[3, 31, 32, 499], [7]], [[32, 5, 5], [0]]
    bits = torch.zeros(2, -(-V // 32), dtype=torch.int32)
    counts = torch.zeros(2, V, dtype=torch.int32)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        for token in prompt:
            bits[row, token // 32] |= torch.tensor(1 << (token % 32)).to(torch.int32)
        for token in output:
            counts[row, token] += 1
    found = history(bits, counts, 8)
    expected = TokenHistory.from_tokens(prompts, outputs, 8, "cpu")
    assert found.lengths.tolist() == [5, 2] and not found.overflowed.any()
    for mine, theirs in zip(found.dense(V), expected.dense(V), strict=True):
        assert torch.equal(mine, theirs)
    hidden, weight, counters = (each[:2] for each in problem())
    weight = problem()[1]
    draws = [
        make_draw("flash_sample", Head(weight, V))(
            Rows(hidden, torch.ones(2), counters, counters, penalties=Penalties(each, 1.5, 0.1))
        ).tokens
        for each in (found, expected)
    ]
    assert torch.equal(*draws)


def test_a_rival_never_draws_padding():
    hidden, weight, counters = problem()
    weight[V:] = 9 * hidden[0]  # would win by far
    draw = make_draw("multinomial", Head(weight, V))
    for _ in range(20):
        assert (draw(Rows(hidden, torch.ones(B), counters, counters)).tokens < V).all()


def test_what_each_can_do():
    _, weight, _ = problem()
    assert make_draw("multinomial", Head(weight, V)).able == Need(0)
    able = make_draw("flash_sample", Head(weight, V)).able
    assert ~able == Need.LOGITS
    shard = make_draw("flash_sample", Head(object(), V)).able  # type: ignore[arg-type]
    stored = Need.FILTER | Need.REPETITION | Need.OTHER_LOGPROB | Need.TOP_LOGPROBS
    assert able & ~shard == stored


def test_where_fewer_tokens_are_allowed_forbidden_ones_are_named():
    top = torch.tensor([[7, 1, -1, -1], [0, 9, 3, 2], [-1, -1, -1, -1]])
    assert named(top).tolist() == [[7, 1, 3, 4], [0, 9, 3, 2], [0, 1, 2, 3]]


def test_the_screened_head_draws_the_tokens_of_token_noise_at_every_batch_size(screens):
    _, weight, _ = problem()
    draw = make_draw("screened", Head(weight, V))
    assert draw.extra_bytes == len(weight) * (D + 12)
    for B in range(1, 7):
        hidden, counters = torch.randn(B, D).bfloat16(), torch.arange(B)
        rows = Rows(hidden, counters / 2, counters, counters + 9)
        given = {"temperature": rows.temperature, "seed": counters, "offset": counters + 9}
        direct = flash_sample(hidden, weight, noise="token", vocab_size=V, **given)
        off = filters([V] * B, [1.0] * B, [0.0] * B)
        for asked in (rows, rows._replace(filters=off), rows._replace(asked=LogprobRequest(2)),
                      rows._replace(asked=LogprobRequest(2), filters=off)):  # fmt: skip
            assert torch.equal(draw(asked).tokens, direct.tokens)
        few = filters([5] * B, [0.9] * B, [0.0] * B)
        cut = dict(zip(("top_k", "top_p", "min_p"), few, strict=True))
        cut = truncated_sample(hidden, weight, noise="token", vocab_size=V, **given, **cut)
        assert torch.equal(draw(rows._replace(filters=few)).tokens, cut.tokens)
    assert screens == [1, 2, 3]


def test_names():
    names = known()
    assert names["screened"] == ("FlashSampling, screened", True)
    assert names["flash_sample"] == ("FlashSampling", True)
    assert "multinomial" in names and "matmul_only" not in names and "greedy" not in names
    assert missing("flash_sample", "cpu") is None
    assert missing("flash_sampling", "cpu") == "runs on cuda only"
    with pytest.raises(InvalidArgument, match="did you mean 'flash_sample'"):
        missing("flash_smaple", "cpu")


def test_what_cannot_be_made_is_named():
    _, weight, _ = problem()
    with pytest.raises(ProviderUnavailable, match="runs on cuda only"):
        make_draw("flash_sampling", Head(weight, V))
    with pytest.raises(InvalidArgument, match="without a soft cap"):
        make_draw("multinomial", Head(weight, V, soft_cap=30.0))
    with pytest.raises(InvalidArgument, match="expected a whole LM head; got a VocabShard"):
        make_draw("screened", Head(object(), V))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="sampler: expected one of"):
        make_draw("matmul_only", Head(weight, V))
