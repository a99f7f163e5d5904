"""flash_sample's entropy, rank and largest logits: the oracle's, and the bits of score."""

from __future__ import annotations

import pytest
import torch
import triton
from flash_sample_cases import (
    SEED,
    guarded_memory,
    normal_logits,
    packed,
    problem,
    same_bits,
    stored,
)

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import Sample, flash_sample, score
from fsbench.kernels.fused import launch
from fsbench.kernels.launch import ranks

pytestmark = pytest.mark.usefixtures("one_thread")

interpreted = pytest.mark.interpreter
INF, NAN = torch.inf, torch.nan
EVERYTHING = {
    **dict.fromkeys(("return_logprob", "return_entropy", "return_rank"), True),
    "return_top": 20,
}


def calls() -> dict[str, dict]:
    hidden, weight = problem(5, 300, 40, torch.float16)
    return {
        "fp16": {"hidden": hidden, "weight": weight, "num_samples": 6},
        "everything": {
            "hidden": hidden,
            "weight": weight,
            "vocab_size": 290,
            "temperature": torch.tensor([1.0, 0.0, 0.3, 2.0, 0.7]),
            "bias": normal_logits(5, 290),
            "mask": packed(normal_logits(5, 290) > 0),
            "soft_cap": 30.0,
        },
        "greedy": {**stored(normal_logits(4, 700)), "temperature": 0.0},
        "token noise": {**stored(normal_logits(4, 2500)), "noise": "token"},
    }


@interpreted
@pytest.mark.parametrize("name", calls())
def test_all_that_is_returned_is_what_score_says_of_the_tokens(name):
    call = calls()[name]
    with guarded_memory():
        drawn = flash_sample(**call, seed=SEED, **EVERYTHING)
    plain = flash_sample(**call, seed=SEED)
    assert torch.equal(drawn.tokens, plain.tokens)
    given = {key: x for key, x in call.items() if key not in ("num_samples", "noise")}
    found = score(**given, targets=drawn.tokens, return_entropy=True, return_rank=True)
    assert same_bits(drawn.logprob, found.logprob) and same_bits(drawn.entropy, found.entropy)
    assert torch.equal(drawn.rank, found.rank)
    top = score(**given, targets=drawn.top_tokens, return_rank=True)
    assert same_bits(drawn.top_logprob, top.logprob)
    assert torch.equal(top.rank, torch.arange(20).repeat(len(top.rank), 1))


def largest(logits: torch.Tensor, k: int) -> list[list[int]]:
    y, tokens = logits.sort(dim=1, descending=True, stable=True)
    return tokens.where(y > -INF, -1)[:, :k].tolist()


@pytest.mark.parametrize("interpret", [pytest.param(True, marks=interpreted), False])
def test_ties_few_tokens_and_rows_without_a_draw(interpret, monkeypatch):
    if not interpret:
        monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
        monkeypatch.setattr(launch, "launch", None)
    logits = normal_logits(7, 1500).round()
    logits[0] = 0.0  # more ties than there is room for
    logits[1, :600] = 9.0
    logits[2] = -INF
    logits[2, [3, 1499, 700]] = torch.tensor([1.0, 1.0, -5.0])
    logits[3], logits[4, 9], logits[5, 1400] = -INF, NAN, INF
    found = flash_sample(**stored(logits), seed=SEED, **EVERYTHING)
    assert found.valid.tolist() == [True, True, True, False, False, False, True]
    for row in (0, 1, 2, 6):
        assert found.top_tokens[row].tolist() == largest(logits[[row]], 20)[0], row
        assert found.rank[row] == (logits[row] > logits[row, found.tokens[row]]).sum()
    assert found.top_tokens[2, 3:].tolist() == [-1] * 17
    assert (found.top_logprob[2, 3:] == -INF).all() and found.top_logprob[2, :3].isfinite().all()
    for row in (3, 4, 5):
        assert found.rank[row] == -1 and found.entropy[row].isnan()
        assert (found.top_tokens[row] == -1).all() and found.top_logprob[row].isnan().all()


@interpreted
@pytest.mark.parametrize("top", [1, 7])
def test_the_largest_do_not_depend_on_how_many_are_asked_for(top):
    call = stored(normal_logits(3, 4500))
    few = flash_sample(**call, seed=SEED, return_top=top)
    many = flash_sample(**call, seed=SEED, return_top=20)
    assert torch.equal(few.top_tokens, many.top_tokens[:, :top])
    assert same_bits(few.top_logprob, many.top_logprob[:, :top].contiguous())
    assert few.logprob is None and few.rank is None


hidden, weight = problem(2, 40, 8)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"return_rank": 1}, InvalidType, "return_rank: expected True or False; got int"),
        ({"return_entropy": None}, InvalidType, "return_entropy: expected True or False"),
        ({"return_top": True}, InvalidType, "return_top: expected an integer; got bool"),
        ({"return_top": 21}, InvalidArgument, "return_top: expected 0 to 20; got 21"),
        ({"return_top": 2, "out": Sample(torch.zeros(2).long(), torch.ones(2).bool())},
         InvalidType, "out.top_tokens: expected a tensor; got NoneType"),
        ({"out": Sample(torch.zeros(2).long(), torch.ones(2).bool(), rank=torch.zeros(2))},
         InvalidArgument, "out.rank: expected None without return_rank; got a tensor"),
    ],
)  # fmt: skip
def test_what_is_refused(options, error, message, monkeypatch):
    monkeypatch.setattr(launch, "launch", None)
    with pytest.raises(error, match=message):
        flash_sample(hidden, weight, seed=SEED, **options)


def test_large_vocabularies_have_no_ranks(monkeypatch):
    monkeypatch.setattr("fsbench.kernels.fused.api.MAX_V", 39)
    with pytest.raises(InvalidArgument, match="return_rank: expected at most 39 tokens; got 40"):
        flash_sample(hidden, weight, seed=SEED, return_rank=True)


def test_it_compiles_as_one_operator():
    def step(hidden):
        return flash_sample(hidden * 2, weight, seed=SEED, **EVERYTHING)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(hidden)
    for ours, theirs in zip(compiled, step(hidden), strict=True):
        assert ours is theirs is None or same_bits(ours.float(), theirs.float())


def test_the_room_for_the_largest_holds_any_number_that_is_asked_for():
    assert ranks.ROOM.value > ranks.PARTS.value > ranks.AT_ONCE.value > 20
