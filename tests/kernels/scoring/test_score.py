"""score: the bits that flash_sample returns, on any tiles, and the oracle's numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flash_sample_cases import (
    SEED,
    TILES,
    assert_near,
    columns,
    counter,
    exact_logits,
    guarded_memory,
    logits_error,
    normal_logits,
    packed,
    problem,
    same_bits,
    stored,
)

from fsbench import reference
from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import Score, flash_sample, score
from fsbench.kernels.fused import launch
from fsbench.kernels.scoring import api

pytestmark = pytest.mark.usefixtures("one_thread")

interpreted = pytest.mark.interpreter
INF, NAN = torch.inf, torch.nan


def check(targets: torch.Tensor, **call) -> Score:
    """Score in guarded memory; the result must be that of the oracle in float64."""
    with guarded_memory():
        result = score(targets=targets, return_entropy=True, return_rank=True, **call)
    logits, T = exact_logits(**call), call.get("temperature", 1.0)
    per_row = torch.as_tensor(T).double().expand(len(logits))
    defined = reference.log_partition(logits, T).isfinite() & (per_row >= 0) & (per_row < INF)
    assert_near(result.logz, reference.log_partition(logits, T).where(defined, NAN))
    assert_near(result.entropy, entropies(logits, T).where(defined, NAN))
    error = logits_error(**call)
    shaped = (targets, result.logprob, result.rank, result.valid)
    for target, logprob, rank, valid in zip(*map(columns, shaped), strict=True):
        inside = (target >= 0) & (target < logits.shape[1]) & defined
        ignored = target == -100
        expected = reference.log_probability(logits, target.where(inside, 0), T)
        assert_near(logprob, expected.where(inside, NAN).masked_fill(ignored, 0.0))
        assert valid.tolist() == (inside | ignored).tolist()
        limit = logits.gather(1, target.where(inside, 0)[:, None])
        above, below = ((logits > limit + way * error).sum(1).where(inside, -1) for way in (2, -2))
        assert ((above <= rank) & (rank <= below)).all()
    return result


def entropies(logits: torch.Tensor, T: float | torch.Tensor) -> torch.Tensor:
    """Return -sum p log p of p = softmax(logits / T), float64 [B]."""
    p = reference.inverse_temperature(T, logits.device)
    logp = (logits.double() * p).log_softmax(1)
    return -(logp.exp() * logp).masked_fill(logp == -INF, 0.0).sum(1)


def calls() -> dict[str, dict]:
    """Return calls of flash_sample of every kind, by name."""
    hidden, weight = problem(5, 200, 40, torch.float16)
    T = torch.tensor([1.0, 0.0, 0.3, 2.0, 0.7])
    return {
        "fp16": {"hidden": hidden, "weight": weight},
        "fp32, rows that TMA cannot load": dict(
            zip(("hidden", "weight"), problem(3, 127, 15), strict=True)
        ),
        "padding, soft cap": {
            **dict(zip(("hidden", "weight"), problem(7, 233, 72, sigma=9.0), strict=True)),
            "vocab_size": 190,
            "soft_cap": 4.0,
            "temperature": 0.6,
        },
        "everything": {
            "hidden": hidden,
            "weight": weight,
            "temperature": T,
            "bias": normal_logits(5, 200),
            "mask": packed(normal_logits(5, 200) > 0),
            "soft_cap": 30.0,
        },
        "one bias": {"hidden": hidden, "weight": weight, "bias": normal_logits(1, 200)[0].half()},
        "far from 0": stored(normal_logits(4, 300, sigma=30.0) - 900.0),
    }


@interpreted
@pytest.mark.parametrize(
    ("name", "noise"), [*((name, "group") for name in calls()), ("everything", "token")]
)
def test_the_bits_are_those_of_flash_sample(name, noise):
    call = calls()[name]
    drawn = flash_sample(
        **call, seed=SEED, num_samples=2, noise=noise, return_logprob=True, return_logz=True
    )
    result = check(drawn.tokens, **call)
    assert same_bits(result.logprob, drawn.logprob) and same_bits(result.logz, drawn.logz)
    first = score(targets=drawn.tokens[:, 0].contiguous(), **call)
    assert first.valid.shape == first.logprob.shape == (len(drawn.tokens),)
    assert same_bits(first.logprob, drawn.logprob[:, 0])


@interpreted
def test_the_bits_do_not_depend_on_tiles_rows_or_neighbors():
    logits = normal_logits(18, 300, sigma=9.0)
    targets = torch.randint(0, 300, (18, 6), generator=torch.Generator().manual_seed(1))
    whole = check(targets, **stored(logits), temperature=0.9)
    for config in (TILES, replace(TILES, block_v=256, block_b=32, slice=16, v_on_m=True)):
        for rows in ([17], [3, 0, 9]):
            part = score(
                **stored(logits[rows]), targets=targets[rows], temperature=0.9, config=config,
                return_entropy=True, return_rank=True,
            )  # fmt: skip
            assert same_bits(part.logprob, whole.logprob[rows])
            assert same_bits(part.logz, whole.logz[rows])
            assert same_bits(part.entropy, whole.entropy[rows])
            assert torch.equal(part.rank, whole.rank[rows])


@pytest.mark.full
@interpreted
def test_many_rows_take_several_launches_with_the_same_bits(monkeypatch):
    B = 300
    hidden, weight = problem(B, 130, 16)
    call = {
        "hidden": hidden,
        "weight": weight,
        "targets": torch.arange(2 * B).view(B, 2) % 130,
        "temperature": torch.linspace(0.5, 2.0, B),
        "bias": normal_logits(B, 130),
        "mask": packed(normal_logits(B, 130) > -1),
        "return_entropy": True,
        "return_rank": True,
    }
    whole, rows = score(**call), []

    def counted(request, *args):
        rows.append(len(request.hidden))
        carry_out(request, *args)

    carry_out = api.carry_out
    monkeypatch.setattr(api, "carry_out", counted)
    monkeypatch.setattr(api, "L2_BYTES", hidden.nbytes // 2)
    result = score(**call)
    assert rows == [256, 44]
    for field, expected in zip(result, whole, strict=True):
        assert same_bits(field.float(), expected.float())


@interpreted
def test_ranks_count_larger_logits_and_no_equal_ones():
    logits = torch.tensor([[3.0, 5.0, 3.0, -INF, 5.0, 0.0]]).repeat(1, 30)
    targets = torch.tensor([[1, 4, 0, 5, 3, -100, 180]])
    result = check(targets, **stored(logits))
    assert result.rank.tolist() == [[0, 0, 60, 120, 150, -1, -1]]


@interpreted
def test_entropy_at_its_ends():
    logits = torch.zeros(4, 512)
    logits[0, 1:] = -INF  # a single token has entropy 0
    logits[2, :256] = -60.0  # far below, and two windows of masses apart
    logits[3] = torch.arange(512) * 20.0
    result = check(counter(0, 5, 300, 511), **stored(logits))
    assert result.entropy[0] == 0.0
    expected = torch.tensor([0.0, 512.0, 256.0]).clamp_min(1).log()
    torch.testing.assert_close(result.entropy[:3], expected, atol=1e-6, rtol=1e-6)


@pytest.fixture(params=[pytest.param("kernels", marks=interpreted), "reference"])
def either(request, monkeypatch):
    """Score by the kernels, and by the reference."""
    if request.param == "reference":
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        monkeypatch.setattr(launch, "launch", None)


@pytest.mark.usefixtures("either")
def test_targets_that_are_ignored_out_of_range_or_forbidden():
    targets = torch.tensor([-100, -1, 200, 199, 2**32 + 5, -(2**63), 0, 7])
    logits = normal_logits(8, 200)
    logits[6] = -INF
    logits[7, [7, 100]] = torch.tensor([-INF, 1.0])
    logits[3, 128:] = -INF  # all of the target's group is forbidden
    result = check(targets, **stored(logits))
    assert result.valid.tolist() == [True, False, False, True, False, False, False, True]
    assert result.logprob[[0, 3, 7]].tolist() == [0.0, -INF, -INF]
    assert result.logz[:6].isfinite().all()


@pytest.mark.usefixtures("either")
def test_rows_that_are_undefined():
    logits = normal_logits(8, 200)
    logits[0, 199], logits[1, 5], logits[2, 70] = NAN, INF, NAN
    logits[2, 3] = INF
    T = torch.tensor([1.0, 1.0, 1.0, -1.0, NAN, INF, 0.0, 1.0])
    targets = torch.full((8, 2), 5)
    targets[2, 1] = -100
    result = check(targets, **stored(logits), temperature=T)
    assert result.valid.sum().item() == 5 and result.logprob[2, 1] == 0.0


def test_bf16_on_a_cpu_is_computed_by_the_reference():
    hidden, weight = problem(4, 150, 24, torch.bfloat16)
    check(torch.tensor([[1, 149], [0, 2], [-100, 150], [3, 3]]), hidden=hidden, weight=weight)


hidden, weight = problem(4, 60, 8)


def zeros(*shape: int, **options) -> torch.Tensor:
    return torch.zeros(shape, **{"dtype": torch.int64, **options})


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"targets": [1, 2, 3, 4]}, InvalidType, "targets: expected a tensor; got list"),
        (
            {"targets": zeros(4).int()},
            InvalidType,
            "targets: expected dtype torch.int64; got torch",
        ),
        ({"targets": zeros(3)}, InvalidArgument, r"targets: expected shape \[4\]; got \[3\]"),
        (
            {"targets": zeros(4, 0)},
            InvalidArgument,
            r"targets: expected 1 to 65535 .* got \[4, 0\]",
        ),
        ({"targets": zeros(3, 4).T}, InvalidArgument, "targets: expected it contiguous"),
        ({"targets": zeros(1, 4, 1)}, InvalidArgument, r"targets: expected shape \[4\]; got"),
        ({"targets": zeros(4, device="meta")}, InvalidArgument, "targets: expected it on cpu"),
        ({"hidden": 3}, InvalidType, "hidden: expected a tensor; got int"),
        ({"kernel": "fast"}, InvalidArgument, "kernel: expected"),
        ({"return_entropy": 1}, InvalidType, "return_entropy: expected True or False; got int"),
        ({"return_rank": "yes"}, InvalidType, "return_rank: expected True or False; got str"),
    ],
)
def test_arguments_are_checked_before_anything_is_launched(changed, error, message, monkeypatch):
    monkeypatch.setattr(launch, "launch", None)
    with pytest.raises(error, match=message):
        score(**{"hidden": hidden, "weight": weight, "targets": counter(1, 2, 3, 4), **changed})


def test_it_compiles_as_one_operator():
    def step(hidden, targets):
        return score(hidden * 2, weight, targets, return_entropy=True, return_rank=True)[:4]

    targets = torch.tensor([[0, 59], [1, 2], [3, 4], [5, 60]])
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(hidden, targets)
    for field, expected in zip(compiled, step(hidden, targets), strict=True):
        assert same_bits(field.float(), expected.float())


REQUIRING = ("hidden", "weight", "bias", "temperature")
"""The arguments that can require a gradient."""


def arguments_requiring(name: str) -> dict[str, torch.Tensor]:
    """Return arguments of score; the named one requires a gradient."""
    arguments = {
        "hidden": hidden.clone(),
        "weight": weight.clone(),
        "targets": counter(1, 2, 3, 4),
        "bias": normal_logits(1, 60)[0],
        "temperature": torch.full((4,), 0.7),
    }
    arguments[name].requires_grad_()
    return arguments


@pytest.mark.parametrize("name", REQUIRING)
def test_a_tensor_that_requires_a_gradient_is_refused(name, monkeypatch):
    monkeypatch.setattr(api, "carry_out", None)  # nothing may be launched
    arguments = arguments_requiring(name)

    def loss(value: torch.Tensor) -> torch.Tensor:
        return score(**arguments | {name: value}).logprob.sum()

    refused = pytest.raises(InvalidArgument, match=f"^{name}: .* under torch.no_grad")
    leaf = arguments[name]
    with refused:
        loss(leaf)
    with refused:
        loss(2 * leaf)
    with refused:
        torch.compile(loss, backend="aot_eager")(leaf)
    with refused:
        torch.func.grad(loss)(leaf.detach())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", REQUIRING)
def test_without_autograd_a_parameter_has_the_bits_of_a_tensor(name, mode):
    arguments = arguments_requiring(name)
    expected = score(**{key: value.detach() for key, value in arguments.items()})
    with mode():
        result = score(**arguments)
        step = torch.compile(lambda x: score(**x), fullgraph=True, backend="aot_eager")
        compiled = step(arguments)
    for each in (result, compiled):
        assert same_bits(each.logprob, expected.logprob) and same_bits(each.logz, expected.logz)
        assert not each.logprob.requires_grad


@interpreted
def test_a_target_is_not_larger_than_itself():
    """The interpreter adds up a target's own logit in another order than a tile's."""
    hidden, weight = problem(5, 300, 300)
    top = flash_sample(hidden, weight, seed=SEED, return_top=20).top_tokens
    place = torch.arange(20, dtype=torch.int32).expand_as(top)
    for config in (None, TILES):
        assert torch.equal(score(hidden, weight, top, return_rank=True, config=config).rank, place)
