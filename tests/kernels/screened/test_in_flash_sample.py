"""flash_sample takes a ScreenedHead, and screened_sample is an operator of torch."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from flash_sample_cases import SEED, counter, problem
from imitated_gpus import H100, H200, imitate_gpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import (
    describe,
    flash_sample,
    prepare_head,
    screened_sample,
    truncated_sample,
)
from fsbench.kernels.configs.screen import ResolveConfig, ScreenConfig
from fsbench.kernels.configs.screen_choice import default_configs, worth_screening
from fsbench.kernels.launch.operator import arguments_of
from fsbench.kernels.screened import draw as op
from fsbench.kernels.screened import head as module

pytestmark = pytest.mark.usefixtures("one_thread")
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")


@pytest.fixture
def screened_draws(monkeypatch) -> list[int]:
    """Return a list of the rows of each draw by the screen, which always seems to be faster."""
    rows: list[int] = []
    draw = op.draw

    def counted(request, *arguments):
        rows.append(len(request.hidden))
        draw(request, *arguments)

    monkeypatch.setattr(op, "draw", counted)
    monkeypatch.setattr(module, "worth_screening", lambda *facts: (True, "this test says so"))
    return rows


@pytest.mark.parametrize(
    ("gpu", "shape", "chosen", "reason"),
    [
        (H200, (128, 151_936, 4096), True, "B = 128 is at most 128, for D = 4096"),
        (H200, (129, 128_256, 8192), False, "B = 129 is above 128, for D = 8192"),
        (H100, (256, 151_936, 4096), True, "B = 256 is at most 256, for D = 4096"),
        (H200, (300, 151_936, 4096), True, "B = 300 is between 257 and 320, for D = 4096"),
        (H200, (300, 151_936, 4096, True), False, "B = 300 is above 128, for D = 4096"),
        (H100, (256, 151_936, 4096, True), False, "B = 256 is above 128, for D = 4096"),
        (H100, (129, 128_256, 8192), False, "B = 129 is above 128, for D = 8192"),
        (H200, (8, 49_155, 3072), True, "B = 8 is at most 8, for heads below 400 MB"),
        (H100, (9, 49_155, 3072), False, "B = 9 is above 8, for heads below 400 MB"),
    ],
)
def test_the_choice_has_a_reason(monkeypatch, gpu, shape, chosen, reason):
    is_worth, why = worth_screening(*shape[:3], imitate_gpu(monkeypatch, gpu), *shape[3:])
    assert is_worth == chosen and reason in why


def test_the_screen_is_not_chosen_where_it_was_not_measured(monkeypatch):
    a100 = imitate_gpu(monkeypatch, H100)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for device in (a100, torch.device("cpu")):
        is_worth, why = worth_screening(1, 151_936, 4096, device)
        assert not is_worth and "measured on GPUs of compute capability 9.0 alone" in why


@pytest.mark.parametrize("noise", ["auto", "token"])
def test_tokens_are_those_of_the_weight_with_and_without_the_screen(
    noise, screened_draws, monkeypatch
):
    hidden, weight = problem(4, 200, 64, torch.bfloat16)
    head = prepare_head(weight)
    plain = {"seed": SEED, "temperature": torch.tensor([0.0, 0.5, 1.0, 3.0])}
    options = {**plain, "noise": noise}
    expected = flash_sample(hidden, weight, **plain, noise="token")
    out = flash_sample(hidden, weight, **plain)
    out.tokens.fill_(-7)
    for more in ({}, {"out": out}):
        sample = flash_sample(hidden, head, **options, **more)
        assert type(sample) is type(expected)
        assert torch.equal(sample.tokens, expected.tokens)
        assert torch.equal(sample.valid, expected.valid)
    assert screened_draws == [4, 4]
    described = describe(hidden, head, noise=noise)
    assert described == "screened portable-b16v128d64p1; this test says so"
    monkeypatch.undo()
    assert torch.equal(flash_sample(hidden, head, **options).tokens, expected.tokens)
    fused, reason = (
        describe(hidden, weight, noise="token"),
        worth_screening(4, 200, 64, torch.device("cpu"))[1],
    )
    assert describe(hidden, head, noise=noise) == f"{fused}; {reason}"
    assert screened_draws == [4, 4]


@pytest.mark.parametrize(
    "more",
    [{"num_samples": 3}, {"return_logprob": True}, {"return_logz": True}, {"kernel": "portable"}],
    ids=str,
)
def test_calls_that_the_screen_does_not_serve_run_the_fused_kernels(more, screened_draws):
    hidden, weight = problem(4, 200, 64, torch.bfloat16)
    from_weight = flash_sample(hidden, weight, seed=SEED, noise="token", **more)
    from_head = flash_sample(hidden, prepare_head(weight), seed=SEED, **more)
    for field, expected in zip(from_head, from_weight, strict=True):
        assert (field is None and expected is None) or torch.equal(field, expected)
    assert not screened_draws


@pytest.mark.parametrize("noise", ["group", "group8", "none", 3])
@pytest.mark.parametrize("call", [flash_sample, screened_sample, truncated_sample, describe])
def test_other_noise_than_that_of_tokens_is_refused(call, noise):
    hidden, weight = problem(4, 200, 64, torch.bfloat16)
    seed = {} if call is describe else {"seed": SEED}
    with pytest.raises((InvalidArgument, InvalidType), match="noise: expected ") as refusal:
        call(hidden, prepare_head(weight), noise=noise, **seed)
    assert noise != "group" or "pass the weight itself (head.weight)" in str(refusal.value)


HEAD = prepare_head(problem(3, 50, 16, torch.bfloat16)[1])


def values(**changes: object) -> dict[str, Any]:
    """Return the arguments of the operator."""
    request = {"hidden": torch.ones(3, 16).bfloat16(), "weight": HEAD.weight, "seed": counter(5)}
    request |= {"temperature": 1.0, "vocab_size": 50, "num_samples": 1, "noise": "token"}
    return {**request, "merge_later": False, "head": HEAD, **changes}


EVERYTHING = {
    "seed": counter(1, 2, 3),
    "offset": counter(9),
    "temperature": torch.tensor([0.0, 1.0, 2.0]),
    "soft_cap": 30.0,
    "bias": torch.linspace(-1, 1, 50),
    "mask": torch.ones(3, 2, dtype=torch.int32),
    "screen": ScreenConfig(16, 128, 64, 64, False, False, 4, 1, 1, 4, 64, 128),
    "resolve": ResolveConfig(16, 64, 16, 128, 64, 4, 1, 1),
}


@pytest.mark.parametrize("more", [{}, EVERYTHING], ids=["least", "everything"])
def test_opcheck(more):
    results = {
        "tokens": torch.zeros(3, dtype=torch.int64),
        "valid": torch.zeros(3, dtype=torch.bool),
        "found": torch.zeros(3, dtype=torch.int32),
    }
    operator = torch.ops.fsbench.screened_sample.default
    torch.library.opcheck(operator, arguments_of(values(**more), results))


def test_fake_tensors_have_the_shapes_and_launch_nothing(screened_draws):
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden = torch.zeros(3, 16, dtype=torch.bfloat16)
        sample = screened_sample(
            hidden, HEAD, seed=counter(1), configs=default_configs(3, 16, hidden.device)
        )
    assert sample.tokens.shape == (3,) and sample.found is not None
    assert not screened_draws


def screened_call(hidden: Tensor, head, offset: Tensor) -> Tensor:
    return screened_sample(hidden, head, seed=SEED, offset=offset).tokens


def chosen_call(hidden: Tensor, head, offset: Tensor) -> Tensor:
    return flash_sample(hidden, head, seed=SEED, offset=offset).tokens


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize("call", [screened_call, chosen_call])
def test_compiled_without_a_break_and_a_changed_weight_is_refused(call, screened_draws):
    hidden, weight = problem(3, 50, 16, torch.bfloat16)
    head = prepare_head(weight)
    compiled = torch.compile(call, fullgraph=True)
    for step in range(3):
        assert torch.equal(compiled(hidden, head, counter(step)), call(hidden, head, counter(step)))
    assert len(screened_draws) == 6
    weight[0] = 1.0
    with pytest.raises(InvalidArgument, match="head: expected an unchanged weight"):
        compiled(hidden, head, counter(4))
    head.refresh()
    assert torch.equal(compiled(hidden, head, counter(4)), call(hidden, head, counter(4)))
