"""The entropy, ranks and largest logits of flash_sample: the bits of `score`."""

from __future__ import annotations

import pytest
import torch
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
    "return_top": 6,
}


def calls() -> dict[str, dict]:
    hidden, weight = problem(5, 150, 40, torch.float16)
    return {
        "fp16": {"hidden": hidden[:2], "weight": weight, "num_samples": 5},
        "everything": {
            "hidden": hidden,
            "weight": weight,
            "vocab_size": 140,
            "temperature": torch.tensor([1.0, 0.0, 0.3, 2.0, 0.7]),
            "bias": normal_logits(5, 140),
            "mask": packed(normal_logits(5, 140) > 0),
            "soft_cap": 30.0,
        },
        "greedy": {**stored(normal_logits(2, 300)), "temperature": 0.0},
        "token noise": {**stored(normal_logits(2, 300)), "noise": "token"},
    }


@interpreted
@pytest.mark.parametrize("name", calls())
def test_results_are_bitwise_those_of_score(name):
    call = calls()[name]
    with guarded_memory():
        drawn = flash_sample(**call, seed=SEED, **EVERYTHING)
    plain = flash_sample(**call, seed=SEED)
    assert torch.equal(drawn.tokens, plain.tokens)
    arguments = {key: x for key, x in call.items() if key not in ("num_samples", "noise")}
    scored = score(**arguments, targets=drawn.tokens, return_entropy=True, return_rank=True)
    assert same_bits(drawn.logprob, scored.logprob) and same_bits(drawn.entropy, scored.entropy)
    assert torch.equal(drawn.rank, scored.rank)
    top = score(**arguments, targets=drawn.top_tokens, return_rank=True)
    assert same_bits(drawn.top_logprob, top.logprob)
    assert torch.equal(top.rank, torch.arange(6).repeat(len(top.rank), 1))


def largest(logits: torch.Tensor, k: int) -> list[list[int]]:
    y, tokens = logits.sort(dim=1, descending=True, stable=True)
    return tokens.where(y > -INF, -1)[:, :k].tolist()


@pytest.mark.parametrize("interpret", [pytest.param(True, marks=interpreted), False])
def test_ties_few_tokens_and_rows_without_a_draw(interpret, monkeypatch):
    if not interpret:
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        monkeypatch.setattr(launch, "launch", None)
    logits = normal_logits(7, 700).round()
    logits[0] = 0.0  # more ties than ROOM
    logits[1, :600] = 9.0
    logits[2] = -INF
    logits[2, [3, 699, 400]] = torch.tensor([1.0, 1.0, -5.0])
    logits[3], logits[4, 9], logits[5, 650] = -INF, NAN, INF
    drawn = flash_sample(**stored(logits), seed=SEED, **EVERYTHING)
    assert drawn.valid.tolist() == [True, True, True, False, False, False, True]
    for row in (0, 1, 2, 6):
        assert drawn.top_tokens[row].tolist() == largest(logits[[row]], 6)[0], row
        assert drawn.rank[row] == (logits[row] > logits[row, drawn.tokens[row]]).sum()
    assert drawn.top_tokens[2, 3:].tolist() == [-1] * 3
    assert (drawn.top_logprob[2, 3:] == -INF).all() and drawn.top_logprob[2, :3].isfinite().all()
    for row in (3, 4, 5):
        assert drawn.rank[row] == -1 and drawn.entropy[row].isnan()
        assert (drawn.top_tokens[row] == -1).all() and drawn.top_logprob[row].isnan().all()


@interpreted
def test_the_largest_logits_do_not_depend_on_their_number():
    call = stored(normal_logits(2, 2100))  # more groups than PARTS
    seven = flash_sample(**call, seed=SEED, return_top=7)
    twenty = flash_sample(**call, seed=SEED, return_top=20)
    assert torch.equal(seven.top_tokens, twenty.top_tokens[:, :7])
    assert same_bits(seven.top_logprob, twenty.top_logprob[:, :7].contiguous())
    assert seven.logprob is None and seven.rank is None


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
def test_bad_requests_are_refused(options, error, message, monkeypatch):
    monkeypatch.setattr(launch, "launch", None)
    with pytest.raises(error, match=message):
        flash_sample(hidden, weight, seed=SEED, **options)


def test_large_vocabularies_have_no_ranks(monkeypatch):
    monkeypatch.setattr("fsbench.kernels.fused.api.MAX_V", 39)
    with pytest.raises(InvalidArgument, match="return_rank: expected at most 39 tokens; got 40"):
        flash_sample(hidden, weight, seed=SEED, return_rank=True)


@pytest.mark.full
def test_it_compiles_as_one_operator():
    def step(hidden):
        return flash_sample(hidden * 2, weight, seed=SEED, **EVERYTHING)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(hidden)
    for field, expected in zip(compiled, step(hidden), strict=True):
        assert field is expected is None or same_bits(field.float(), expected.float())


def test_the_buffer_holds_the_most_that_can_be_requested():
    assert ranks.ROOM.value > ranks.PARTS.value > ranks.AT_ONCE.value > 20
