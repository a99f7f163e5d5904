"""Samplers that an engine can draw with: flash_sample, screened, and those of `fsbench list`."""

from __future__ import annotations

import pytest
import torch

from fsbench.errors import InvalidArgument, ProviderUnavailable
from fsbench.integrations.draw import (
    Head,
    LogprobRequest,
    Rows,
    fill_missing_ids,
    make_draw,
    sampler_labels,
    unavailable_reason,
)
from fsbench.integrations.routing import Need
from fsbench.integrations.vllm_0_26 import token_history
from fsbench.kernels import TokenHistory, flash_sample, truncated_sample

B, D, V = 4, 64, 500


def problem(B: int = B):
    """Return (hidden, weight with padding rows, one counter per row)."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(V + 12, D, generator=generator).bfloat16() / 4
    hidden = torch.randn(B, D, generator=generator).bfloat16()
    return hidden, weight, torch.arange(B) + 7


def filters(top_k: list[int], top_p: list[float], min_p: list[float]):
    return torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p), torch.tensor(min_p)


def test_flash_sample_gets_all_settings_of_a_request():
    hidden, weight, counters = problem()
    temperature = torch.tensor([0, 0.5, 1, 2])
    bias = torch.randn(B, V)
    mask = torch.randint(-(2**31), 2**31, (B, -(-V // 32)), dtype=torch.int64).to(torch.int32)
    draw = make_draw("flash_sample", Head(weight, V, soft_cap=3.0))
    settings = {
        "temperature": temperature, "seed": counters, "offset": counters + 1, "bias": bias,
        "mask": mask, "soft_cap": 3.0, "vocab_size": V,
    }  # fmt: skip
    rows = Rows(
        *(hidden, temperature, counters, counters + 1),
        bias=bias,
        mask=mask,
        logprobs=LogprobRequest(3),
    )
    direct = flash_sample(
        hidden, weight, return_logprob=True, return_rank=True, return_top=3, **settings
    )
    result = draw(rows)
    assert torch.equal(result.tokens, direct.tokens)
    tokens, values, ranks = result.logprobs
    assert torch.equal(tokens, torch.cat([direct.tokens[:, None], direct.top_tokens], 1))
    assert torch.equal(values, torch.cat([direct.logprob[:, None], direct.top_logprob], 1))
    assert torch.equal(ranks, direct.rank + 1)
    top_k, top_p, min_p = limits = filters([3, 0, V, 1], [1, 0.5, 1, 1], [0, 0, 0.2, 0])
    cut = truncated_sample(hidden, weight, top_k=top_k, top_p=top_p, min_p=min_p, **settings)
    assert torch.equal(draw(rows._replace(filters=limits, logprobs=None)).tokens, cut.tokens)


def test_token_history_from_bitmaps_and_counts():
    prompts, outputs = [[3, 31, 32, 499], [7]], [[32, 5, 5], [0]]
    bits = torch.zeros(2, -(-V // 32), dtype=torch.int32)
    counts = torch.zeros(2, V, dtype=torch.int32)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        for token in prompt:
            bits[row, token // 32] |= torch.tensor(1 << (token % 32)).to(torch.int32)
        for token in output:
            counts[row, token] += 1
    history = token_history(bits, counts, 8)
    expected = TokenHistory.from_tokens(prompts, outputs, 8, "cpu")
    assert history.lengths.tolist() == [5, 2] and not history.overflowed.any()
    for dense, expected_dense in zip(history.dense(V), expected.dense(V), strict=True):
        assert torch.equal(dense, expected_dense)


def test_a_sampler_of_fsbench_list_never_draws_padding():
    hidden, weight, counters = problem()
    weight[V:] = 9 * hidden[0]  # would win by far
    draw = make_draw("multinomial", Head(weight, V))
    for _ in range(20):
        assert (draw(Rows(hidden, torch.ones(B), counters, counters)).tokens < V).all()


def test_needs_that_each_sampler_meets():
    _, weight, _ = problem()
    assert make_draw("multinomial", Head(weight, V)).supported == Need(0)
    whole = make_draw("flash_sample", Head(weight, V)).supported
    assert ~whole == Need.LOGITS
    shard = make_draw("flash_sample", Head(object(), V)).supported  # type: ignore[arg-type]
    stored = Need.FILTER | Need.REPETITION | Need.OTHER_LOGPROB | Need.TOP_LOGPROBS
    assert whole & ~shard == stored


def test_missing_ids_become_tokens_that_are_not_in_the_row():
    top = torch.tensor([[7, 1, -1, -1], [0, 9, 3, 2], [-1, -1, -1, -1]])
    assert fill_missing_ids(top).tolist() == [[7, 1, 3, 4], [0, 9, 3, 2], [0, 1, 2, 3]]


def test_the_screened_head_draws_the_tokens_of_token_noise_at_every_batch_size(screens):
    weight = problem()[1]
    draw = make_draw("screened", Head(weight, V))
    assert draw.extra_bytes == len(weight) * (D + 12)
    for B in (1, 2, 3, 4, 6):
        hidden, _, counters = problem(B)
        rows = Rows(hidden, counters / 9, counters, counters + 9)
        settings = {"temperature": rows.temperature, "seed": counters, "offset": counters + 9}
        direct = flash_sample(hidden, weight, noise="token", vocab_size=V, **settings)
        off = filters([V] * B, [1.0] * B, [0.0] * B)
        top = LogprobRequest(2)
        for options in ({}, {"filters": off}, {"logprobs": top}, {"logprobs": top, "filters": off}):
            assert torch.equal(draw(rows._replace(**options)).tokens, direct.tokens)
        few = filters([5] * B, [0.9] * B, [0.0] * B)
        limits = dict(zip(("top_k", "top_p", "min_p"), few, strict=True))
        cut = truncated_sample(hidden, weight, noise="token", vocab_size=V, **settings, **limits)
        assert torch.equal(draw(rows._replace(filters=few)).tokens, cut.tokens)
    assert screens == [1, 2, 3]


def test_names_and_errors():
    names = sampler_labels()
    assert names["screened"] == ("FlashSampling, screened", True)
    assert names["flash_sample"] == ("FlashSampling", True)
    assert "multinomial" in names and "matmul_only" not in names and "greedy" not in names
    assert unavailable_reason("flash_sample", "cpu") is None
    assert unavailable_reason("flash_sampling", "cpu") == "runs on cuda only"
    with pytest.raises(InvalidArgument, match="did you mean 'flash_sample'"):
        unavailable_reason("flash_smaple", "cpu")
    weight = problem()[1]
    with pytest.raises(ProviderUnavailable, match="runs on cuda only"):
        make_draw("flash_sampling", Head(weight, V))
    with pytest.raises(InvalidArgument, match="without a soft cap"):
        make_draw("multinomial", Head(weight, V, soft_cap=30.0))
    with pytest.raises(InvalidArgument, match="expected a whole LM head; got a VocabShard"):
        make_draw("screened", Head(object(), V))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="sampler: expected one of"):
        make_draw("matmul_only", Head(weight, V))
