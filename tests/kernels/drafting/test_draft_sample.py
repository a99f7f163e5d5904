"""draft_sample: the reference's token noise at the target's tokens, by kernels and on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsbench import reference
from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import (
    Penalties,
    TokenHistory,
    draft_sample,
    prepare_draft_vocabulary,
    prepare_head,
    quantize_head,
    truncated_sample,
)

pytestmark = pytest.mark.usefixtures("one_thread")

B, D, V, ROWS = 5, 32, 900, 300
DTYPES = [torch.float32, torch.bfloat16]
"""The kernels in Triton's interpreter, and the reference."""


def case(dtype: torch.dtype):
    """Return hidden, weight with padding rows, vocabulary, the target's logits of its tokens."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(B, D, generator=generator).to(dtype)
    weight = (torch.randn(ROWS + 4, D, generator=generator) / 3).to(dtype)
    ids = torch.randperm(V, generator=generator)[:ROWS]
    vocabulary = prepare_draft_vocabulary(ids.int(), V)
    logits = torch.full((B, V), -torch.inf)
    logits[:, ids] = hidden.float() @ weight[:ROWS].float().T
    return hidden, weight, vocabulary, logits


SEED = torch.arange(B) * 0x0123456789ABCD - 7
OFFSET = torch.arange(B) + 2**32 - 2
T = torch.tensor([1.0, 0.5, 0.0, 2.0, 0.7])
CALL = {"temperature": T, "seed": SEED, "offset": OFFSET}


def expected(logits: Tensor, temperature=T, seed=SEED, offset=OFFSET, **filters) -> Tensor:
    kept = reference.truncate(logits, temperature, **filters)
    return reference.expect(logits, seed, offset, temperature, "token", truncation=kept).tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01}],
)
def test_the_draw_is_that_of_the_targets_noise(dtype, filters):
    hidden, weight, vocabulary, logits = case(dtype)
    for T_, seed, offset in ((T, SEED, OFFSET), (0.9, SEED[:1], OFFSET[:1]), (0.0, SEED, OFFSET)):
        drawn = draft_sample(
            hidden, weight, vocabulary, temperature=T_, seed=seed, offset=offset, **filters
        )
        assert torch.equal(drawn.tokens, expected(logits, T_, seed, offset, **filters))
        assert drawn.valid.all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
def test_bias_and_mask_are_of_the_targets_vocabulary(dtype, filters):
    hidden, weight, vocabulary, logits = case(dtype)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(B, V, generator=generator)
    allowed = torch.rand(B, V, generator=generator) < 0.4
    allowed[4] = False
    words = torch.nn.functional.pad(allowed, (0, -V % 32)).unflatten(1, (-1, 32)).long()
    packed = (words << torch.arange(32)).sum(2).to(torch.int32)
    changed = 9 * torch.tanh(logits / 9)
    changed = torch.where(logits == -torch.inf, -torch.inf, changed + bias)
    tokens = expected(changed.masked_fill(~allowed, -torch.inf), **filters)
    assert tokens[4] == -1 and (tokens[:4] >= 0).all()
    for mask in (allowed, packed):
        drawn = draft_sample(
            hidden, weight, vocabulary, **CALL,
            bias=bias, mask=mask, soft_cap=9.0, **filters,
        )  # fmt: skip
        assert torch.equal(drawn.tokens, tokens)
        assert drawn.valid.tolist() == [True] * 4 + [False]
    shared = draft_sample(hidden, weight, vocabulary, **CALL, bias=bias[0], **filters)
    assert torch.equal(shared.tokens, expected(logits + bias[0], **filters))


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties_are_on_the_targets_tokens(dtype):
    hidden, weight, vocabulary, logits = case(dtype)
    likely = logits.topk(3, 1).indices
    history = TokenHistory.from_tokens(likely.tolist(), likely[:, :1].tolist(), 8, "cpu")
    drawn = draft_sample(
        hidden, weight, vocabulary, **CALL,
        penalties=Penalties(history, repetition=3.0, frequency=1.0),
    )  # fmt: skip
    seen, counts = history.dense(V)
    tokens = expected(reference.penalized(logits, seen, counts, repetition=3.0, frequency=1.0))
    assert torch.equal(drawn.tokens, tokens)
    assert not torch.equal(drawn.tokens, expected(logits))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_screened_head_gives_the_same_tokens(dtype):
    hidden, weight, vocabulary, logits = case(dtype)
    drawn = draft_sample(hidden, prepare_head(weight), vocabulary, **CALL)
    assert torch.equal(drawn.tokens, expected(logits))


@pytest.mark.parametrize(("per_row", "filters"), [(True, {}), (False, {"top_p": 0.8})])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantized_head_draws_by_its_logits(dtype, per_row, filters):
    hidden, weight, vocabulary, logits = case(dtype)
    head = quantize_head(weight, per_row=per_row)
    numbers = head.scale.expand(len(weight))[:, None] * head.weight.float()
    logits[:, vocabulary.token_ids] = hidden.float() @ numbers[:ROWS].T
    drawn = draft_sample(hidden, head, vocabulary, **CALL, **filters)
    assert torch.equal(drawn.tokens, expected(logits, **filters))


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_draw(dtype, filters):
    hidden, weight, vocabulary, logits = case(dtype)
    hidden[1] = torch.nan
    bad = torch.tensor([1.0, 1.0, -1.0, torch.nan, torch.inf])
    for head in (weight, prepare_head(weight)) if not filters else (weight,):
        drawn = draft_sample(
            hidden, head, vocabulary, temperature=bad, seed=SEED, offset=OFFSET, **filters
        )
        assert drawn.tokens.tolist() == [int(expected(logits, 1.0, **filters)[0]), *[-1] * 4]
        assert drawn.valid.tolist() == [True, *[False] * 4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_target_with_token_noise_and_filters_draws_what_wins_among_the_kept(dtype):
    hidden, weight, _, _ = case(dtype)
    logits = hidden.float() @ weight.float().T
    for filters in ({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}):
        drawn = truncated_sample(hidden, weight, **CALL, noise="token", **filters)
        assert torch.equal(drawn.tokens, expected(logits, **filters))


IDS = torch.arange(ROWS)
BAD_MAPS = [
    ([1, 2], 9, InvalidType, "token_ids: expected a tensor; got list"),
    (IDS.float(), V, InvalidType, "token_ids: expected dtype"),
    (IDS[:0], V, InvalidArgument, "token_ids: expected 1 to 900 of them; got 0"),
    (IDS.view(3, -1), V, InvalidArgument, r"token_ids: expected shape \[300\]"),
    (IDS, 299, InvalidArgument, "token_ids: expected 1 to 299 of them; got 300"),
    (IDS - 1, V, InvalidArgument, "token_ids: expected tokens 0 to 899; got -1"),
    (IDS + 601, V, InvalidArgument, "token_ids: expected tokens 0 to 899; got 900"),
    (IDS // 2, V, InvalidArgument, "a different token in each row; got token 0 in 2 rows"),
    (IDS, 0, InvalidArgument, "vocab_size: expected 1 to"),
]


@pytest.mark.parametrize(("ids", "vocab_size", "error", "message"), BAD_MAPS)
def test_maps_that_are_refused(ids, vocab_size, error, message):
    with pytest.raises(error, match=message):
        prepare_draft_vocabulary(ids, vocab_size)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"vocabulary": IDS}, InvalidType, "vocabulary: expected a DraftVocabulary"),
        ({"vocabulary": prepare_draft_vocabulary(torch.arange(800), V)}, InvalidArgument,
         "vocabulary: expected at most 304 tokens, the rows of the head; got 800"),
        ({"vocabulary": prepare_draft_vocabulary(IDS, 2**20 + 1)}, InvalidArgument,
         "vocabulary: expected at most 1048576 tokens of a target"),
        ({"bias": torch.zeros(ROWS)}, InvalidArgument, r"bias: expected shape \[900\]"),
        ({"mask": torch.ones(B, ROWS).bool()}, InvalidArgument, r"mask: expected shape \[5, 900\]"),
        ({"top_k": 2.0}, InvalidType, "top_k: expected an integer"),
        ({"penalties": 1}, InvalidType, "penalties: expected Penalties"),
        ({"head": prepare_head(torch.ones(ROWS, D)), "top_k": 3}, InvalidArgument,
         "head: expected a weight with filters or penalties; got a ScreenedHead"),
        ({"hidden": [1]}, InvalidType, "hidden: expected a tensor"),
    ],
)  # fmt: skip
def test_bad_arguments(changed, error, message):
    hidden, weight, vocabulary, _ = case(torch.float32)
    arguments = {"hidden": hidden, "head": weight, "vocabulary": vocabulary, "seed": SEED}
    with pytest.raises(error, match=message):
        draft_sample(**{**arguments, **changed})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
def test_an_invalid_scale_leaves_no_draw(dtype, filters):
    hidden, weight, vocabulary, _ = case(dtype)
    for per_row, scale in ((True, -1.0), (True, torch.nan), (False, torch.inf)):
        head = quantize_head(weight, per_row=per_row)
        head.scale[... if not per_row else 7] = scale
        drawn = draft_sample(hidden, head, vocabulary, **CALL, **filters)
        assert (drawn.tokens == -1).all() and not drawn.valid.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_first_row_or_with_filters_to_the_lower_token(dtype):
    hidden, weight = torch.zeros(2, 16, dtype=dtype), torch.zeros(4, 16, dtype=dtype)
    call = {"temperature": 0.0, "seed": SEED[:1]}
    for ids, first, lower in (([3, 5, 6, 9], 3, 3), ([9, 5, 3, 6], 9, 3)):
        vocabulary = prepare_draft_vocabulary(torch.tensor(ids), 20)
        drawn = draft_sample(hidden, weight, vocabulary, **call)
        assert drawn.tokens.tolist() == [first] * 2
        drawn = draft_sample(hidden, weight, vocabulary, top_p=0.9, **call)
        assert drawn.tokens.tolist() == [lower] * 2
