"""Truncated sampling on a GPU: the fused sampler and its rivals against the reference; graphs."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import counter, problem

from fsbench import reference
from fsbench.discover import discover
from fsbench.graphs import capture
from fsbench.inputs import TORCH_DTYPES, head_with_logits
from fsbench.kernels import Penalties, TokenHistory, flash_sample, score, truncated_sample
from fsbench.kernels.akunu_exact import akunu_exact
from fsbench.kernels.akunu_faithful import akunu_scores
from fsbench.kernels.configs import hopper as hopper_tiles
from fsbench.kernels.configs.portable import BUCKETS, space
from fsbench.kernels.providing.filters import AKUNU_ORDER
from fsbench.problem import Problem
from fsbench.verify import verify
from fsbench.verify.check import Setting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

WITH_FILTERS = [
    name
    for name, entry in discover().items()
    if entry.provider and entry.provider.capabilities.filters
]
CONTRACT = [name for name in WITH_FILTERS if discover()[name].provider.capabilities.noise]


def exact(B: int, V: int, tied: bool = False):
    """hidden, weight and the logits [B, V] that they have exactly, up to 64 different rows."""
    generator = torch.Generator("cuda").manual_seed(B * V)
    logits = 3 * torch.randn(min(B, 64), V, generator=generator, device="cuda")
    logits = logits.round() if tied else logits
    hidden, weight = head_with_logits(logits, torch.bfloat16, 64)
    row = torch.arange(B, device="cuda") % len(logits)
    return hidden[row].contiguous(), weight, weight[:, row].T.float()


def row_filters(B: int) -> dict[str, torch.Tensor]:
    """Return filters that differ by row."""
    turn = torch.arange(B, device="cuda")
    return {
        "top_k": torch.tensor([50, 0, 1, 1000, 0, 7, 0], device="cuda")[turn % 7],
        "top_p": torch.tensor([0.9, 0.9, 1.0, 0.5, 1.0], device="cuda")[turn % 5],
        "min_p": torch.tensor([0.0, 0.0, 0.05], device="cuda")[turn % 3],
    }


def drawn(hidden, weight, **arguments):
    """Draw with all fields, which must have the bits of score and not change the tokens."""
    plain = truncated_sample(hidden, weight, **arguments)
    options = dict.fromkeys(("return_logprob", "return_kept_logprob", "return_rank"), True)
    sample = truncated_sample(hidden, weight, **arguments, **options, return_support=1024)
    valid = sample.valid
    assert plain.kept is None and torch.equal(sample.tokens, plain.tokens)
    assert torch.equal(valid, plain.valid)
    assert (sample.rank < sample.kept)[valid].all()
    if "penalties" not in arguments:
        V, T = len(weight), arguments.get("temperature", 1.0)
        fits = valid & (sample.kept <= 1024)
        kept = torch.zeros(len(hidden), V + 1, dtype=torch.bool, device="cuda")
        kept.scatter_(1, sample.support % (V + 1), True)  # the last column is that of -1
        among = score(hidden, weight, sample.tokens, temperature=T, mask=kept[:, :V].contiguous())
        over_all = score(hidden, weight, sample.tokens, temperature=T)
        assert torch.equal(sample.kept_logprob[fits], among.logprob[fits])
        assert torch.equal(sample.logprob[valid], over_all.logprob[valid])
        raw = truncated_sample(
            hidden, weight, **arguments, return_logprob=True, return_top=20, logprob_temperature=1.0
        )
        untempered = score(hidden, weight, sample.tokens)
        assert torch.equal(raw.logprob[valid], untempered.logprob[valid])
        at_one = {**arguments, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        top = truncated_sample(hidden, weight, **at_one, return_top=20).top_logprob
        assert torch.equal(raw.top_logprob[valid], top[valid])
    return sample


def assert_expected(
    sample, logits, seed, offset, temperature=1.0, error=0.0, noise="group", **filters
):
    kept = reference.truncate(logits, temperature, **filters, logits_error=error)
    expected = reference.expect(
        logits, seed, offset, temperature, noise, truncation=kept, logits_error=error
    )
    accepted = expected.accepts(sample.tokens)
    assert accepted.all(), (~accepted).nonzero()[:5].tolist()
    assert torch.equal(sample.valid, sample.tokens >= 0)
    assert (sample.kept >= kept.surely.sum(1)).all() and (
        sample.kept <= kept.possibly.sum(1)
    ).all(), (sample.kept.tolist(), kept.kept.sum(1).tolist())


FILTERS = [
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 1},
    {"top_k": 300, "top_p": 0.9},
    {"top_k": 1000, "top_p": 0.95, "min_p": 0.05},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("V", [1, 129, 20_011, 151_936])
@pytest.mark.parametrize("B", [1, 17, 256])
def test_tokens_are_the_oracles(B, V, filters):
    for tied in (False, True):
        hidden, weight, logits = exact(B, V, tied)
        sample = drawn(hidden, weight, seed=counter(5), offset=counter(V), **filters)
        assert_expected(sample, logits, counter(5), counter(V), **filters)


@pytest.mark.parametrize("name", ["flat", "near-uniform", "two levels", "peaked"])
def test_rows_that_many_programs_share(name):
    """Also where more tokens are at the cutoff than can be gathered."""
    B, V = 7, 151_936
    generator = torch.Generator("cuda").manual_seed(7)
    normal = torch.randn(B, V, generator=generator, device="cuda")
    logits = {
        "flat": torch.full_like(normal, 2.0),
        "near-uniform": 3.0 + 0.01 * normal,
        "two levels": (normal > 1).float(),
        "peaked": normal.index_fill(1, torch.tensor([V // 2], device="cuda"), 12.0),
    }[name]
    hidden, weight = head_with_logits(logits, torch.float16, 64)
    logits = weight[:, :B].T.float()
    filters = {
        "top_k": torch.tensor([0, 0, 1000, 0, 30_000, 30_000, 2], device="cuda"),
        "top_p": torch.tensor([0.9, 0.3, 0.5, 1.0, 1.0, 0.7, 0.9], device="cuda"),
        "min_p": torch.tensor([0.0, 0.4, 0.0, 0.05, 0.0, 0.0, 0.0], device="cuda"),
    }
    call = {"seed": counter(5), "temperature": 0.7}
    sample = drawn(hidden, weight, **call, **filters)
    assert_expected(sample, logits, counter(5), counter(0), 0.7, **filters)
    for _ in range(5):  # programs arrive in any order
        repeated = drawn(hidden, weight, **call, **filters)
        assert torch.equal(repeated.tokens, sample.tokens)
        assert torch.equal(repeated.kept, sample.kept)


REAL = [
    *((B, 1152, torch.bfloat16) for B in (1, 16, 100, 256)),
    *((B, 4096, torch.bfloat16) for B in (1, 256)),
    *((B, 4096, torch.float16) for B in (16, 100)),
    *((B, 101, torch.bfloat16) for B in (16, 100)),
    *((B, 101, torch.float16) for B in (1, 256)),
]
"""Every pair of a batch size, D and dtype but one; each compiles six matmul kernels."""


@pytest.mark.parametrize("B, D, dtype", REAL, ids=str)
def test_real_matmuls_and_filters_of_every_row(B, D, dtype):
    hidden, weight = problem(B, 20_011, D, dtype)
    filters = row_filters(B)
    temperature = torch.linspace(0, 2, B, device="cuda")
    sample = drawn(hidden, weight, seed=counter(1), temperature=temperature, **filters)
    logits = hidden.double() @ weight.double().T
    error = reference.matmul_error(hidden, weight)
    assert_expected(sample, logits, counter(1), counter(0), temperature, error, **filters)


ROWS = [(0, 0.9, 0.0), (0, 0.8, 0.0), (0, 0.2, 0.0), (20, 0.95, 0.0), (0, 0.9, 0.05)]
ROWS += [(1000, 0.9, 0.0), (0, 1.0, 0.05), (0, 0.7, 1e-3), (0, 1.0, 0.0), (1, 1.0, 0.0)]


@pytest.mark.parametrize("B", [3, 16, 70, 256])
def test_a_row_of_tensors_has_the_token_of_the_same_numbers(B):
    """Other rows may have other filters, or the same."""
    hidden, weight, _ = exact(B, 151_936)
    names, index = ("top_k", "top_p", "min_p"), torch.arange(B, device="cuda") % len(ROWS)
    columns = [torch.tensor(column, device="cuda") for column in zip(*ROWS, strict=True)]
    for step in range(3):
        call = {"seed": counter(step).expand(B).contiguous(), "offset": counter(7)}
        call["temperature"] = torch.full((B,), 0.8, device="cuda")
        mixed = {name: column[index] for name, column in zip(names, columns, strict=True)}
        drawn = truncated_sample(hidden, weight, **call, **mixed).tokens
        for i, row in enumerate(ROWS):
            numbers = dict(zip(names, row, strict=True))
            tokens = truncated_sample(hidden, weight, **call, **numbers).tokens
            assert torch.equal(drawn[index == i], tokens[index == i]), numbers
            same = {
                n: column[i].expand(B).contiguous()
                for n, column in zip(names, columns, strict=True)
            }
            assert torch.equal(truncated_sample(hidden, weight, **call, **same).tokens, tokens)


@pytest.mark.parametrize("B", [1, 64, 256])
def test_without_filters_tokens_are_those_of_flash_sample(B):
    hidden, weight = problem(B, 151_936, 1024)
    call = {"seed": counter(3), "offset": counter(4), "temperature": 0.8}
    sample = truncated_sample(hidden, weight, **call)
    plain = flash_sample(hidden, weight, **call)
    assert torch.equal(sample.tokens, plain.tokens)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_tiles_and_kernels_do_not_matter(bucket):
    hidden, weight = problem(bucket, 20_011, 512)
    filters = row_filters(bucket)
    first = drawn(hidden, weight, seed=counter(3), **filters)
    logits = hidden.double() @ weight.double().T
    error = reference.matmul_error(hidden, weight)
    assert_expected(first, logits, counter(3), counter(0), error=error, **filters)
    hopper = hopper_tiles.space(bucket) if torch.cuda.get_device_capability() == (9, 0) else []
    for config in (*space(bucket)[::40], *hopper[::3]):
        other = drawn(hidden, weight, seed=counter(3), **filters, config=config)
        assert torch.equal(other.tokens, first.tokens), config
        assert torch.equal(other.kept, first.kept), config


@pytest.mark.parametrize("amounts", [(1.3, 0.1, 0.2), (0.7, -0.5, -0.1)], ids=str)
def test_penalties(amounts):
    B, V = 40, 20_011
    hidden, weight, logits = exact(B, V)
    generator = torch.Generator().manual_seed(1)
    histories = [
        [torch.randint(0, V, (37 * row,), generator=generator).tolist() for row in range(B)]
        for _ in range(2)
    ]
    history = TokenHistory.from_tokens(*histories, 4096, "cuda")
    history.append(torch.arange(B, device="cuda"))
    penalties = Penalties(history, *amounts)
    filters = {"top_k": 50, "top_p": 0.9}
    sample = drawn(hidden, weight, seed=counter(2), penalties=penalties, **filters)
    names = ("repetition", "presence", "frequency")
    seen, counts = history.dense(V)
    changed = reference.penalized(logits, seen, counts, **dict(zip(names, amounts, strict=True)))
    assert_expected(sample, changed, counter(2), counter(0), error=1e-5, noise="token", **filters)


@pytest.mark.parametrize("field", ["tokens", "logprob", "kept_logprob", "rank", "support"])
def test_graphs_draw_afresh_and_read_filters_again(field):
    hidden, weight = problem(64, 20_011, 512)
    filters = row_filters(64)
    seed, offset = counter(3), counter(0)
    fields = {} if field == "tokens" else {f"return_{field}": 1024 if field == "support" else True}

    def launch(hidden, seed, offset):
        sample = truncated_sample(hidden, weight, seed=seed, offset=offset, **filters, **fields)
        return getattr(sample, field)

    replay = capture(launch, hidden, seed, offset)
    for k in (50, 1, 0):
        filters["top_k"].fill_(k)
        for _ in range(3):
            offset += 1
            assert torch.equal(replay(), launch(hidden, seed, offset))


def test_nothing_waits_for_the_gpu():
    hidden, weight = problem(64, 20_011, 512)
    filters = row_filters(64)
    history = TokenHistory(64, 32, "cuda")
    call = {"seed": counter(3), "penalties": Penalties(history, 1.1), **filters}
    truncated_sample(hidden, weight, **call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        history.append(truncated_sample(hidden, weight, **call).tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("filters", FILTERS[:5], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_akunu(dtype, filters):
    logits = (3 * torch.randn(4, 151_936, device="cuda")).to(dtype)
    kept = reference.truncate(logits, 1.5, **filters, order=AKUNU_ORDER)
    expected = reference.expect(logits, counter(1), counter(2), 1.5, truncation=kept)
    assert expected.accepts(akunu_exact(logits, counter(1), counter(2), 1.5, **filters)).all()
    import akunu_chapter as chapter

    scores = akunu_scores(logits, counter(1), counter(2), 1.5, **filters)
    expected = chapter.kept(logits, **filters)
    differ = ((scores > -torch.inf) != expected).sum(1)
    # A threshold of fp32 masses may be on the other side of a few of the logits.
    assert (differ <= 2 + expected.sum(1) // 100).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", WITH_FILTERS)
def test_what_is_kept_and_in_which_proportions(name, dtype):
    entry = discover()[name]
    provider = entry.provider
    if entry.unavailable_reason("cuda") or dtype not in provider.capabilities.dtypes:
        pytest.skip("cannot run here")
    if name.endswith("_compiled"):
        pytest.skip("compiles for minutes; its distribution is tested on CPUs")
    (check,) = verify(provider, Setting("cuda", dtype, truncated=True), only=["truncation"])
    assert check.passed, check


@pytest.mark.parametrize("name", CONTRACT)
def test_tokens_of_truncated_problems_are_the_oracles(name):
    provider = discover()[name].provider
    for T in (0.5, 1.0):
        setting = Setting("cuda", "bf16", T, truncated=True)
        (check,) = verify(provider, setting, only=["truncated oracle"])
        assert check.passed, check


def test_a_problem_is_truncated_as_it_says():
    """Check the launch that fsbench run times, on a problem."""
    from fsbench.inputs import make_hidden, make_weight
    from fsbench.verify.pathwise import check_on_problem

    problem = Problem(64, 1024, 151_936, "bf16", top_k=50, top_p=0.9, mixed=True)
    hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
    assert hidden.dtype == TORCH_DTYPES[problem.dtype]
    for name in CONTRACT:
        provider = discover()[name].provider
        launch = provider.build(problem, weight)
        assert check_on_problem(provider, problem, launch, hidden, weight).passed
