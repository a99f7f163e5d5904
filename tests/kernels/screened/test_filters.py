"""Filters from a screened head keep and draw what they keep and draw of all logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from filter_cases import matrices, roomy
from flash_sample_cases import assert_at_rest, guarded_memory, packed
from imitated_gpus import H200, imitate_gpu
from memory_watch import within_tensors
from tiers import full
from torch import Tensor

from fsbench.kernels import Penalties, TokenHistory, describe, prepare_head, truncated_sample
from fsbench.kernels.configs.screen_choice import FILTERED_ROWS, worth_filtering
from fsbench.kernels.flash_sampling_topk_topp_screened import PROVIDER
from fsbench.kernels.launch import launch_cache
from fsbench.kernels.launch.result import TruncatedSample
from fsbench.kernels.screened import filters as screened_filters
from fsbench.verify.check import Setting
from fsbench.verify.pathwise import compare_with_oracle

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.interpreter]

SEED = torch.tensor([11])


@pytest.fixture
def long_lists(monkeypatch):
    monkeypatch.setattr(screened_filters, "filter_configs", roomy)
    monkeypatch.setattr(launch_cache, "LAUNCHES", {})


def assert_same(hidden: Tensor, weight: Tensor, **options: Any) -> TruncatedSample:
    """Draw from the head; the tokens must be those of its weight with token noise."""
    options = {"seed": SEED, **options}
    with guarded_memory():
        sample = truncated_sample(hidden, prepare_head(weight), **options)
    same = truncated_sample(hidden, weight, noise="token", **options)
    assert sample.tokens.tolist() == same.tokens.tolist()
    assert sample.valid.tolist() == same.valid.tolist()
    assert sample.found is not None and sample.found.dtype == torch.int32
    assert_at_rest(len(hidden))
    return sample


@pytest.mark.parametrize(
    ("B", "D", "V", "top_k", "filters"),
    [
        (3, 40, 600, 20, {"top_p": 0.7, "min_p": 0.02}),
        (1, 64, 128, 64, {}),
        (2, 300, 200, 1, {}),
        full(2, 520, 70, 64, {"min_p": 0.1}),
        full(17, 72, 517, 2, {"top_p": 0.8}),
        full(2, 40, 2500, 64, {"top_p": 0.8}),
    ],
)
def test_tokens_are_those_of_all_logits(B, D, V, top_k, filters, long_lists):
    hidden, weight = matrices(B, D, V)
    for seed in (torch.tensor([0]), torch.tensor([1])):
        sample = assert_same(hidden, weight, top_k=top_k, seed=seed, temperature=1.5, **filters)
        if top_k < V:
            assert (sample.found >= top_k).all()


def test_a_later_call_of_the_same_kind_prepares_nothing(long_lists, monkeypatch):
    hidden, weight = matrices(3, 40, 600)
    assert_same(hidden, weight, top_k=20)
    for name in ("ScreenLaunch", "FilterLaunch"):
        monkeypatch.setattr(screened_filters, name, None)
    assert_same(hidden.flip(0), weight.flip(0), top_k=19, top_p=0.9, temperature=0.5)


def test_few_logits_are_computed():
    hidden, weight = matrices(4, 128, 1500)
    sample = assert_same(hidden, weight, top_k=20)
    assert (sample.found >= 20).all() and sample.found.float().mean() < 32


def test_rows_with_too_many_candidates_are_computed_in_full_and_counted():
    hidden, weight = matrices(17, 64, 300)
    weight[:, 0] += 2**12  # the copy has large errors
    hidden[:, 0] = 0
    hidden[3] = 0
    hidden[3, 0] = 1
    sample = assert_same(hidden, weight, top_k=5, top_p=0.9)
    assert (sample.found == -1).all()
    hidden, weight = matrices(3, 64, 700)
    weight[500:] = weight[3]  # all of these tie where they are the largest
    hidden[1] = 4 * weight[3]
    sample = assert_same(hidden, weight, top_k=5, top_p=0.9)
    assert sample.found[1] == -1 and (sample.found[[0, 2]] >= 5).all()


K_OF_ROWS = torch.tensor([20, 0, 64, 65, -3, 1, 10**12, 7])


@pytest.mark.parametrize(
    ("dtype", "filters"),
    [(torch.int32, {"min_p": 0.05}), (torch.int64, {}), full(torch.int64, {"top_p": 0.6})],
    ids=str,
)
def test_rows_of_another_k_are_computed_in_full(dtype, filters, long_lists):
    hidden, weight = matrices(8, 64, 300)
    top_k = K_OF_ROWS.clamp(max=2**31 - 1).to(dtype)
    T = torch.tensor([1.0, 0.7, 2.0, 1.0, 0.0, 0.3, 1.0, 0.0])
    sample = assert_same(hidden, weight, top_k=top_k, temperature=T, **filters)
    off = torch.tensor([1, 3, 6])
    assert (sample.found[off] == -1).all()
    others = [b for b in range(8) if b not in off]
    assert (sample.found[others] >= torch.where(T > 0, top_k, 1)[others]).all()  # 4 is greedy


V = 300
DRAW = torch.Generator().manual_seed(5)
OPTIONS: dict[str, dict[str, Any]] = {
    "bad temperatures": {"temperature": torch.tensor([0.0, torch.nan, -1.0, 2.0**110, 2.0**-121])},
    "filters of rows": {
        "top_p": torch.tensor([0.1, 0.5, 1.0, 0.0, torch.nan]),
        "min_p": torch.tensor([0.0, 0.1, 0.9, torch.nan, 0.01]),
    },
    "bias that forbids": {"bias": torch.where(torch.arange(V) % 3 == 0, -torch.inf, 0.5)},
    "a mask that leaves few": {"mask": torch.rand(5, V, generator=DRAW) < 0.03},
    "words of a mask": {"mask": packed(torch.rand(5, V, generator=DRAW) < 0.5, padding=True)},
    "nothing allowed": {"mask": torch.arange(5)[:, None].expand(5, V).contiguous() != 2},
    "infinite bias": {"bias": torch.zeros(5, V).index_fill(1, torch.tensor([7]), torch.inf)},
    "undefined bias": {"bias": torch.zeros(V).index_fill(0, torch.tensor([9]), torch.nan)},
    "seeds": {"seed": torch.tensor([5, 5, -7, 2**40, 0]), "offset": torch.tensor([0, 1, 2, 3, 4])},
    "everything": {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 2.0, 7.0]),
        "bias": torch.randn(5, V, generator=DRAW),
        "mask": torch.rand(5, V, generator=DRAW) < 0.6,
        "soft_cap": 5.0,
        "seed": torch.tensor([5, 5, -7, 2**40, 0]),
        "offset": torch.tensor([9]),
        "top_p": 0.9,
        "min_p": torch.tensor([0.0, 0.1, 0.3, 0.01, 0.0]),
    },
}


QUICK = ("filters of rows", "bias that forbids", "a mask that leaves few", "everything")


@pytest.mark.parametrize("name", [name if name in QUICK else full(name) for name in OPTIONS])
def test_options(name, long_lists):
    hidden, weight = matrices(5, 72, V)
    assert_same(hidden, weight, **{"top_k": 20, "top_p": 0.95, **OPTIONS[name]})


@pytest.mark.parametrize("name", ["seeds", "everything"])
def test_nothing_else_is_touched(name):
    """Rows of every kind, some without bounds; tokens behind the vocabulary would win."""
    hidden, weight = matrices(5, 30, V, rows=V + 60)
    weight[V:] = 64 * hidden[1].sign()
    hidden[3], hidden[4, 2] = torch.nan, 2.0**51
    head, options = prepare_head(weight), {"seed": SEED, "vocab_size": V, **OPTIONS[name]}
    with within_tensors() as launches:
        sample = truncated_sample(hidden, head, top_k=20, **options)
    assert len(launches) == 5 + ("mask" in options)  # which one packs
    same = truncated_sample(hidden, weight, top_k=20, noise="token", **options)
    assert sample.tokens.tolist() == same.tokens.tolist() and (sample.tokens < V).all()
    assert (sample.found[3:] == -1).all()


def test_undefined_rows_of_the_weight(long_lists):
    hidden, weight = matrices(4, 64, 300)
    weight[7, 0], weight[9, 1] = torch.nan, 2.0**60
    mask = torch.arange(1200).view(4, 300) % 300 != 7
    bias = torch.where(torch.arange(300) == 7, -torch.inf, 0.0)
    for valid, more in ((False, {}), (True, {"mask": mask}), (False, {"bias": bias})):
        sample = assert_same(hidden, weight, top_k=3, **more)
        assert bool(sample.valid.all()) == valid


@pytest.mark.parametrize(("equal", "top_k"), [(3, 20), (70, 1), (700, 20), full(5000, 64)])
def test_of_equal_logits_the_lowest_tokens_are_kept(equal, top_k, long_lists):
    """Also where the ties are more groups, or tokens, than one program gathers."""
    hidden, weight = matrices(2, 64, max(300, equal + 200))
    ties = torch.randperm(len(weight), generator=DRAW)[:equal]
    weight[ties] = weight[ties[0]].clone() if equal < 100 else 4 * hidden[1].sign()
    for seed in range(2):
        sample = assert_same(
            hidden, weight, top_k=top_k, seed=torch.tensor([seed]), temperature=9.0
        )
        if equal >= 700:
            assert sample.tokens[1] in ties.sort().values[:top_k]


@pytest.mark.parametrize(
    "more",
    [
        {"return_kept": True},
        {"return_logprob": True},
        {"return_top": 2},
        {"top_k": 0},
        {"top_k": 65},
        {"penalties": None},
        {"B": FILTERED_ROWS + 1},
        {"bf16": True},
    ],
    ids=str,
)
def test_what_the_screen_does_not_serve_the_fused_kernels_do(more):
    more = dict(more)
    hidden, weight = matrices(more.pop("B", 3), 40, 200)
    if more.pop("bf16", False):  # the interpreter does not run the kernels in bf16
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
        assert "capability 9.0" in describe(hidden, prepare_head(weight), top_k=20)
    options: dict[str, Any] = {"seed": SEED, "top_k": 20, "top_p": 0.9, **more}
    if "penalties" in more:
        history = TokenHistory.from_tokens([[1, 2]] * 3, [[3], [4], [5]], 8, "cpu")
        options["penalties"] = Penalties(history, 1.3)
    from_head = truncated_sample(hidden, prepare_head(weight), **options)
    from_weight = truncated_sample(hidden, weight, **options, noise="token")
    assert from_head.found is None
    for field, expected in zip(from_head, from_weight, strict=True):
        assert (field is None and expected is None) or torch.equal(field, expected)


@pytest.mark.parametrize(
    ("facts", "chosen", "reason"),
    [
        ((32, 151_936, 20), True, "B = 32 is at most 32"),
        ((33, 151_936, 20), False, "B = 33 is above 32"),
        ((1, 151_936, 0), False, "top_k = 0 is off"),
        ((1, 151_936, 65), False, "top_k = 65 is off or above 64"),
        ((1, 20, 20), False, "top_k = 20 is off"),
        ((1, 151_936, torch.tensor([0])), True, "B = 1"),
    ],
)
def test_the_choice_has_a_reason(monkeypatch, facts, chosen, reason):
    is_worth, why = worth_filtering(*facts, imitate_gpu(monkeypatch, H200))
    assert is_worth == chosen and reason in why


def test_filters_are_not_from_the_screen_where_that_was_not_measured(monkeypatch):
    a100 = imitate_gpu(monkeypatch, H200)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    is_worth, why = worth_filtering(1, 151_936, 20, a100)
    assert not is_worth and "compute capability 9.0 alone" in why


def test_it_is_described():
    hidden, weight = matrices(3, 40, 200)
    head, fused = prepare_head(weight), describe(hidden, weight, noise="token")
    assert describe(hidden, head, top_k=20) == "screened portable-b16v128d64p1; B = 3 is at most 32"
    for top_k in (0, 200):
        assert describe(hidden, head, top_k=top_k).startswith(fused)
    assert describe(hidden, head).endswith("9.0 alone")


@pytest.mark.parametrize(
    "filters",
    [{"top_p": 0.9}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "mixed": True}],
    ids=str,
)
def test_the_sampler_draws_the_tokens_of_the_oracle(filters):
    """Also without top-k, where the screen is not used."""
    problem = replace(Setting("cpu", "fp16").problem(5, 300), temperature=0.7, **filters)
    assert compare_with_oracle("oracle", PROVIDER, [(1, problem, [(5, 9), (-3, 2**31)])]).passed
    config = PROVIDER.build(problem, torch.zeros(300, problem.D, dtype=torch.float16)).config
    assert config.startswith("screened") == ("top_k" in filters), config
