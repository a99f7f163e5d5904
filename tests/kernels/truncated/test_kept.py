"""Optional fields of truncated_sample: log-probabilities, ranks, and the kept tokens."""

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

FIELDS = dict.fromkeys(("return_logprob", "return_kept_logprob", "return_rank"), True)
TOP = 20
INF, NAN = torch.inf, torch.nan


def check(limit: int = 1024, penalties: Penalties | None = None, **call) -> TruncatedSample:
    """Draw with all fields; they must be those of float64, and have the bits of score."""
    options = {"seed": SEED, "noise": "group", **call, "penalties": penalties}
    with guarded_memory():
        sample = truncated_sample(**options, **FIELDS, return_support=limit, return_top=TOP)
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
    assert_near(sample.logprob, reference.log_probability(logits, token, T).where(valid, NAN))
    among = logits.masked_fill(~kept, -INF)
    assert_near(sample.kept_logprob, reference.log_probability(among, token, T).where(valid, NAN))
    limits = logits.gather(1, token[:, None])
    above, below = ((logits > limits + way * error).sum(1).where(valid, -1) for way in (2, -2))
    wrong = ~((above <= sample.rank) & (sample.rank <= below))
    assert not wrong.any(), differing("rank", wrong, sample.rank, above)
    fits = n <= limit
    listed = (sample.support >= 0).sum(1)
    assert torch.equal(listed, n.where(fits, 0)), (listed.tolist(), n.tolist())
    support = order.where(first & fits[:, None], -1)[:, :limit]
    if not error:
        assert torch.equal(sample.support[:, : support.shape[1]], support)
    call = {name: x for name, x in call.items() if name not in (*FILTERS, "noise", "mask")}
    mask = {"mask": logits > -INF} if "mask" in options else {}
    assert same_bits(sample.logprob, score(**call, **mask, targets=sample.tokens).logprob)
    largest = flash_sample(**call, **mask, seed=SEED, return_top=TOP)
    assert torch.equal(sample.top_tokens[valid], largest.top_tokens[valid])
    assert same_bits(sample.top_logprob[valid], largest.top_logprob[valid])
    # The last column is that of -1.
    replayed = torch.zeros(len(n), logits.shape[1] + 1, dtype=torch.bool)
    replayed.scatter_(1, sample.support.where(sample.support >= 0, logits.shape[1]), True)
    scored = score(**call, mask=replayed[:, :-1].contiguous(), targets=sample.tokens).logprob
    assert same_bits(sample.kept_logprob[fits], scored[fits])
    return sample


EACH = {
    "top_k": torch.tensor([0, 1, 2, 7, 64, 300, 1000, -5, 40]),
    "top_p": torch.tensor([1.0, 0.9, 0.5, 1.5, 0.3, 0.99, 1e-9, -1.0, 0.95]),
    "min_p": torch.tensor([0.0, 0.5, 0.0, 0.1, 0.01, -1.0, 0.0, 2.0, 0.001]),
}
T = torch.tensor([1.0, 0.0, 0.7, 3.0, 1.0, 0.2, 1.0, 0.01, 1e30])


def calls() -> dict[str, dict]:
    """Return calls of every kind, by name."""
    hidden, weight = problem(9, 233, 24, torch.float16)
    matrices = {"hidden": hidden, "weight": weight}
    tied = stored(normal_logits(9, 233).round())
    undefined = normal_logits(9, 233)
    undefined[0, 232], undefined[2, 0], undefined[3] = NAN, INF, -INF
    bad = {"temperature": T.index_fill(0, torch.tensor([4]), -1.0), **EACH}
    bad["top_p"] = EACH["top_p"].index_fill(0, torch.tensor([5]), NAN)
    options = {
        "vocab_size": 201,
        "soft_cap": 3.0,
        "bias": normal_logits(9, 201),
        "mask": packed(normal_logits(9, 201) > 0.5, padding=True),
        "noise": "token",
    }
    return {
        "one token": {**stored(torch.zeros(1, 1)), "top_k": 3},
        "top-k": {**tied, "top_k": 40},
        "no filter": {**tied, "temperature": T},
        "greedy": {**tied, "temperature": 0.0, "top_p": 0.9},
        "filters of rows": {**tied, **EACH, "temperature": T},
        "with options": {**matrices, **EACH, "temperature": T, **options},
        "one bias": {**matrices, "bias": normal_logits(1, 233)[0], "top_k": 30, "top_p": 0.9},
        "all equal": {**stored(torch.full((9, 233), -3.25)), **EACH},
        "undefined rows": {**stored(undefined), **bad},
        "penalties": {**tied, **EACH, "penalties": Penalties(history(9, 233), 1.2, 0.1, 0.3)},
    }


QUICK = ("with options", "undefined rows", "penalties")


@pytest.mark.parametrize("name", [name if name in QUICK else full(name) for name in calls()])
def test_fields_are_right_and_have_the_bits_of_score(name):
    sample = check(**calls()[name])
    if name == "undefined rows":
        wrong = [0, 2, 3, 4, 5]
        assert (sample.rank[wrong] == -1).all() and (sample.support[wrong] == -1).all()
        assert sample.logprob[wrong].isnan().all() and sample.kept_logprob[wrong].isnan().all()
        assert (sample.top_tokens[wrong] == -1).all() and sample.top_logprob[wrong].isnan().all()
    if name == "no filter":
        both = sample.kept > 1
        assert same_bits(sample.kept_logprob[both], sample.logprob[both])


@pytest.fixture
def no_kernels(monkeypatch):
    monkeypatch.setattr(launch_cache, "LAUNCHES", {})  # a cached launch would run the kernel
    for user in (module, fused_api):
        monkeypatch.setattr(user, "runs_kernels", lambda *_: False)


@pytest.mark.parametrize("name", ["filters of rows", full("with options"), full("penalties")])
def test_the_reference_fills_the_same_fields(name, no_kernels):
    check(**calls()[name], limit=8)


@pytest.mark.parametrize("name", [full("undefined rows"), "penalties"])
def test_log_probabilities_of_another_temperature(name):
    """They are those of a draw at that temperature without filters; nothing else changes."""
    call = {**calls()[name], "seed": SEED}
    plain = truncated_sample(**call, **FIELDS, return_top=TOP)
    sample = truncated_sample(**call, **FIELDS, return_top=TOP, logprob_temperature=0.5)
    valid = sample.valid
    for field in ("tokens", "rank", "top_tokens"):
        assert torch.equal(getattr(sample, field), getattr(plain, field)), field
    assert same_bits(sample.kept_logprob, plain.kept_logprob)
    assert not same_bits(sample.logprob[valid], plain.logprob[valid])
    unfiltered = {**call, "temperature": 0.5, **{each: 0 for each in FILTERS}, "top_p": 1.0}
    expected = truncated_sample(**unfiltered, return_top=TOP).top_logprob
    assert same_bits(sample.top_logprob[valid], expected[valid])
    is_token = (sample.top_tokens == sample.tokens[:, None]) & valid[:, None]
    assert is_token.any()
    assert same_bits(sample.logprob[is_token.any(1)], sample.top_logprob[is_token])


@pytest.mark.usefixtures("no_kernels")
def test_log_probabilities_of_another_temperature_by_the_reference():
    test_log_probabilities_of_another_temperature("penalties")


@pytest.mark.parametrize("limit", [1, full(64)])
def test_kept_is_above_the_limit_in_rows_that_keep_more(limit):
    counts = torch.tensor([limit, limit + 1, 1, 133, 2])
    sample = check(**stored(normal_logits(5, 133).round()), top_k=counts, limit=limit)
    assert torch.equal(sample.kept, counts.int())


@pytest.mark.full
@pytest.mark.parametrize("programs", [1, full(10_000)])
def test_how_many_programs_share_a_row_does_not_matter(programs):
    """Rows of three blocks; kept tokens are in some of them, in all, or nearly all are kept."""
    call = {
        **stored(normal_logits(4, 4_200)),
        "top_k": torch.tensor([0, 50, 0, 4_000]),
        "top_p": torch.tensor([0.9, 1.0, 1.0, 0.7]),
        "min_p": torch.tensor([0.0, 0.0, 0.05, 0.0]),
    }
    with mock.patch.object(support_kernels, "PROGRAMS", programs):
        check(**call)


def test_only_requested_fields_are_filled():
    call = {**stored(normal_logits(2, 90)), "seed": SEED, "top_p": 0.9}
    whole = truncated_sample(**call, **FIELDS, return_support=90, return_kept=True)
    assert truncated_sample(**call)[2:] == (None,) * 8
    for name in ("kept", "logprob", "kept_logprob", "rank"):
        only = truncated_sample(**call, **{f"return_{name}": True})
        filled = {field for field, x in only._asdict().items() if x is not None}
        assert filled == {"tokens", "valid", name}
        torch.testing.assert_close(getattr(only, name), getattr(whole, name), rtol=0, atol=0)
