"""What truncated_sample says of its draws: log-probabilities, ranks, and the kept tokens."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from flash_sample_cases import (
    SEED,
    assert_near,
    exact_logits,
    guarded_memory,
    logits_error,
    normal_logits,
    packed,
    problem,
    same_bits,
    stored,
)
from tiers import full
from truncated_cases import FILTERS, differing, history, require_kept

from fsbench import reference
from fsbench.kernels import (
    Penalties,
    TruncatedSample,
    flash_sample,
    score,
    truncated_sample,
)
from fsbench.kernels.fused import api as fused_api
from fsbench.kernels.launch import launch_cache
from fsbench.kernels.truncated import api as module
from fsbench.kernels.truncated import support as support_kernels

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]

SAID = dict.fromkeys(("return_logprob", "return_kept_logprob", "return_rank"), True)
TOP = 20
INF, NAN = torch.inf, torch.nan


def check(limit: int = 1024, penalties: Penalties | None = None, **call) -> TruncatedSample:
    """Everything that is said of draws is float64's, and has the bits of score."""
    options = {"seed": SEED, "noise": "group", **call, "penalties": penalties}
    with guarded_memory():
        sample = truncated_sample(**options, **SAID, return_support=limit, return_top=TOP)
    plain = truncated_sample(**options, return_kept=True)
    assert torch.equal(plain.tokens, sample.tokens) and torch.equal(plain.kept, sample.kept)
    logits, T, error = exact_logits(**call), call.get("temperature", 1.0), logits_error(**call)
    if penalties is not None:
        amounts = {name: getattr(penalties, name) for name in penalties._fields[1:]}
        counts = penalties.history.dense(logits.shape[1])
        logits = reference.penalized(logits.float(), *counts, **amounts).double()
        call = {**stored(logits.float()), "temperature": T}
    valid, token, n = sample.valid, sample.tokens.clamp_min(0), sample.kept
    filters = {name: call[name] for name in FILTERS if name in call}
    if penalties is None:
        bounds = reference.truncate(logits, T, **filters, logits_error=error)
        require_kept(n, bounds)
    # The kept tokens are the first of one order.
    order = logits.sort(dim=1, descending=True, stable=True).indices
    first = torch.arange(logits.shape[1]) < n[:, None]
    kept = torch.zeros_like(first).scatter(1, order, first)
    wanted = reference.log_probability(logits, token, T).where(valid, NAN)
    assert_near(sample.logprob, wanted)
    among = logits.masked_fill(~kept, -INF)
    assert_near(sample.kept_logprob, reference.log_probability(among, token, T).where(valid, NAN))
    limits = logits.gather(1, token[:, None])
    above, below = ((logits > limits + way * error).sum(1).where(valid, -1) for way in (2, -2))
    wrong = ~((above <= sample.rank) & (sample.rank <= below))
    assert not wrong.any(), differing("rank", wrong, sample.rank, above)
    fits = n <= limit
    found = (sample.support >= 0).sum(1)
    assert torch.equal(found, n.where(fits, 0)), f"support has {found.tolist()}, kept {n.tolist()}"
    support = order.where(first & fits[:, None], -1)[:, :limit]
    if not error:
        assert torch.equal(sample.support[:, : support.shape[1]], support)
    call = {name: x for name, x in call.items() if name not in (*FILTERS, "noise", "mask")}
    mask = {"mask": logits > -INF} if "mask" in options else {}
    assert same_bits(sample.logprob, score(**call, **mask, targets=sample.tokens).logprob)
    largest = flash_sample(**call, **mask, seed=SEED, return_top=TOP)
    assert torch.equal(sample.top_tokens[valid], largest.top_tokens[valid])
    assert same_bits(sample.top_logprob[valid], largest.top_logprob[valid])
    # The last column stands for -1.
    replayed = torch.zeros(len(n), logits.shape[1] + 1, dtype=torch.bool)
    replayed.scatter_(1, sample.support.where(sample.support >= 0, logits.shape[1]), True)
    again = score(**call, mask=replayed[:, :-1].contiguous(), targets=sample.tokens).logprob
    assert same_bits(sample.kept_logprob[fits], again[fits])
    return sample


EACH = {
    "top_k": torch.tensor([0, 1, 2, 7, 64, 300, 1000, -5, 40]),
    "top_p": torch.tensor([1.0, 0.9, 0.5, 1.5, 0.3, 0.99, 1e-9, -1.0, 0.95]),
    "min_p": torch.tensor([0.0, 0.5, 0.0, 0.1, 0.01, -1.0, 0.0, 2.0, 0.001]),
}
T = torch.tensor([1.0, 0.0, 0.7, 3.0, 1.0, 0.2, 1.0, 0.01, 1e30])


def calls() -> dict[str, dict]:
    """Calls of every kind, by name."""
    hidden, weight = problem(9, 333, 24, torch.float16)
    matrices = {"hidden": hidden, "weight": weight}
    tied = stored(normal_logits(9, 500).round())
    undefined = normal_logits(9, 333)
    undefined[0, 332], undefined[2, 0], undefined[3] = NAN, INF, -INF
    bad = {"temperature": T.index_fill(0, torch.tensor([4]), -1.0), **EACH}
    bad["top_p"] = EACH["top_p"].index_fill(0, torch.tensor([5]), NAN)
    options = {
        "vocab_size": 301,
        "soft_cap": 3.0,
        "bias": normal_logits(9, 301),
        "mask": packed(normal_logits(9, 301) > 0.5, padding=True),
    }
    return {
        "one token": {
            **dict(zip(("hidden", "weight"), problem(1, 1, 15), strict=True)),
            "top_k": 3,
        },
        "top-k": {**tied, "top_k": 40},
        "top-p": {**tied, "top_p": 0.8, "temperature": T},
        "min-p": {**tied, "min_p": 0.1, "temperature": 0.6},
        "none": {**tied, "temperature": T},
        "greedy": {**tied, "temperature": 0.0, "top_p": 0.9},
        "each row its own": {**tied, **EACH, "temperature": T},
        "token noise": {**matrices, **EACH, "temperature": T, "noise": "token"},
        "with options": {**matrices, **EACH, "temperature": T, **options},
        "one bias": {**matrices, "bias": normal_logits(1, 333)[0], "top_k": 30, "top_p": 0.9},
        "all equal": {**stored(torch.full((9, 333), -3.25)), **EACH},
        "undefined rows": {**stored(undefined), **bad},
        "penalties": {**tied, **EACH, "penalties": Penalties(history(9, 500), 1.2, 0.1, 0.3)},
    }


QUICK = ("each row its own", "with options", "undefined rows", "penalties")


@pytest.mark.parametrize("name", [name if name in QUICK else full(name) for name in calls()])
def test_what_is_said_is_true_and_has_the_bits_of_score(name):
    sample = check(**calls()[name])
    if name == "undefined rows":
        wrong = [0, 2, 3, 4, 5]
        assert (sample.rank[wrong] == -1).all() and (sample.support[wrong] == -1).all()
        assert sample.logprob[wrong].isnan().all() and sample.kept_logprob[wrong].isnan().all()
        assert (sample.top_tokens[wrong] == -1).all() and sample.top_logprob[wrong].isnan().all()
    if name == "none":
        both = sample.kept > 1
        assert same_bits(sample.kept_logprob[both], sample.logprob[both])


@pytest.mark.parametrize("name", ["each row its own", full("with options"), full("penalties")])
def test_the_reference_says_the_same(name, monkeypatch):
    monkeypatch.setattr(launch_cache, "LAUNCHES", {})  # a cached launch would run the kernel
    for user in (module, fused_api):
        monkeypatch.setattr(user, "runs_kernels", lambda *_: False)
    check(**calls()[name])
    check(**calls()[name], limit=8)


@pytest.mark.parametrize("kernels", [True, full(False)])
@pytest.mark.parametrize("name", ["each row its own", full("undefined rows"), "penalties"])
def test_log_probabilities_of_another_temperature(name, kernels, monkeypatch):
    """Those of a draw at that temperature without filters, to the bit; nothing else changes."""
    monkeypatch.setattr(launch_cache, "LAUNCHES", {})
    if not kernels:
        for user in (module, fused_api):
            monkeypatch.setattr(user, "runs_kernels", lambda *_: False)
    call = {**calls()[name], "seed": SEED}
    own = truncated_sample(**call, **SAID, return_top=TOP)
    sample = truncated_sample(**call, **SAID, return_top=TOP, logprob_temperature=0.5)
    there = sample.valid
    for field in ("tokens", "rank", "top_tokens"):
        assert torch.equal(getattr(sample, field), getattr(own, field)), field
    assert same_bits(sample.kept_logprob, own.kept_logprob)
    assert not same_bits(sample.logprob[there], own.logprob[there])
    at = {**call, "temperature": 0.5, **{each: 0 for each in FILTERS}, "top_p": 1.0}
    alone = truncated_sample(**at, return_top=TOP)
    assert same_bits(sample.top_logprob[there], alone.top_logprob[there])
    place = (sample.top_tokens == sample.tokens[:, None]) & there[:, None]
    assert place.any()
    assert same_bits(sample.logprob[place.any(1)], sample.top_logprob[place])


@pytest.mark.parametrize("limit", [1, full(5), 64, full(300)])
def test_a_row_that_keeps_more_than_there_is_room_for_says_so(limit):
    """Each k is there, and the one above."""
    counts = torch.tensor([limit, limit + 1, 1, 333, 2])
    sample = check(**stored(normal_logits(5, 333).round()), top_k=counts, limit=limit)
    assert torch.equal(sample.kept, counts.int())


@pytest.mark.parametrize("programs", [1, full(10), full(10_000)])
def test_how_many_programs_share_a_row_does_not_matter(programs):
    """Rows of three blocks; what is kept is in some of them, in all, or nearly all there is."""
    logits = normal_logits(5, 4_901)
    call = {
        **stored(logits),
        "top_k": torch.tensor([0, 50, 0, 4_500, 900]),
        "top_p": torch.tensor([0.9, 1.0, 1.0, 0.7, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.05, 0.0, 0.0]),
    }
    with mock.patch.object(support_kernels, "PROGRAMS", programs):
        check(**call)


def test_nothing_is_said_unless_asked_for():
    call = {**stored(normal_logits(2, 90)), "seed": SEED, "top_p": 0.9}
    whole = truncated_sample(**call, **SAID, return_support=90, return_kept=True)
    assert truncated_sample(**call)[2:] == (None,) * 8
    for name in ("kept", "logprob", "kept_logprob", "rank"):
        only = truncated_sample(**call, **{f"return_{name}": True})
        there = {field for field, x in only._asdict().items() if x is not None}
        assert there == {"tokens", "valid", name}
        torch.testing.assert_close(getattr(only, name), getattr(whole, name), rtol=0, atol=0)
