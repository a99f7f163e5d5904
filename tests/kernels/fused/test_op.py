"""flash_sample as an operator of torch: its schema, fake tensors, torch.compile."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from flash_sample_cases import CPU, SEED, TILES, check, counter, normal_logits, problem
from torch._subclasses.fake_tensor import FakeTensorMode

from fsbench.errors import InvalidType
from fsbench.kernels import Sample, flash_sample, score
from fsbench.kernels.launch.operator import arguments_of, pack, unpack

pytestmark = pytest.mark.usefixtures("one_thread")
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")


def values(**changes) -> dict[str, Any]:
    """Return arguments of the operator, in bf16, so that the reference runs."""
    hidden, weight = problem(3, 50, 16, torch.bfloat16)
    request = {"hidden": hidden, "weight": weight, "seed": counter(5), "temperature": 1.0}
    request |= {"vocab_size": 50, "num_samples": 1, "noise": "group", "merge_later": False}
    return {**request, "kernel": "auto", **changes}


def results(n: int = 1, *extras: str) -> dict[str, torch.Tensor]:
    shape = (3,) if n == 1 else (3, n)
    tensors = {"tokens": torch.zeros(shape, dtype=torch.int64)}
    tensors["valid"] = torch.zeros(3, dtype=torch.bool)
    return tensors | {name: torch.zeros(shape if name == "logprob" else 3) for name in extras}


EVERYTHING: dict[str, Any] = {
    "num_samples": 3,
    "seed": counter(1, 2, 3),
    "offset": counter(9),
    "temperature": torch.tensor([0.0, 1.0, 2.0]),
    "soft_cap": 30.0,
    "bias": normal_logits(1, 50)[0],
    "mask": torch.ones(3, 2, dtype=torch.int32),
    "config": TILES,
}


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (values(), results()),
        (values(**EVERYTHING), results(3, "logprob", "logz")),
        (values(noise="token", mask=torch.ones(3, 50, dtype=torch.bool)), results(1, "logz")),
        (values(weight=torch.ones(50, 16).to(torch.int8), scale=torch.ones(50)), results()),
    ],
    ids=["least", "everything", "log-z-only", "quantized"],
)
def test_opcheck(arguments, written):
    operator = torch.ops.fsbench.flash_sample.default
    torch.library.opcheck(operator, arguments_of(arguments, written))


def test_values_come_back_by_their_names():
    arguments = values(**EVERYTHING)
    assert unpack(*pack(arguments | {"shard": None})) == arguments
    other = dict(reversed(arguments.items()))
    assert unpack(*pack(other)) == arguments


def test_no_result_has_a_default():
    """torch 2.11 leaves defaults out of what it hands on, and then misses the tensors it counts."""
    schema = torch.ops.fsbench.flash_sample.default._schema
    assert not [each.name for each in schema.arguments if each.has_default_value()]


def call(hidden, weight, temperature, mask, offset) -> Sample:
    """Make the call that is compiled: checks, allocation and the operator."""
    return flash_sample(
        hidden,
        weight,
        seed=SEED,
        offset=offset,
        temperature=temperature,
        mask=mask,
        num_samples=2,
        return_logprob=True,
        return_logz=True,
        config=TILES,
    )


def inputs_of_call(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    hidden, weight = problem(4, 100, 16, dtype)
    return {
        "hidden": hidden,
        "weight": weight,
        "temperature": torch.tensor([0.0, 0.5, 1.0, 2.0]),
        "mask": normal_logits(4, 100) > -1,
        "offset": counter(2),
    }


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        pytest.param(torch.bfloat16, "inductor", marks=[needs_compiler, pytest.mark.full]),
        pytest.param(torch.float32, "aot_eager", marks=pytest.mark.interpreter),
    ],
    ids=str,
)
def test_compiled_calls_equal_eager_ones(dtype, backend):
    arguments = inputs_of_call(dtype)
    arguments["weight"].requires_grad_()
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for step in (2, 3):  # the second call reuses the compiled code
        arguments["offset"].fill_(step)
        eager = call(**arguments)
        for field, expected in zip(compiled(**arguments), eager, strict=True):
            assert field is expected is None or torch.equal(field, expected)


def test_compiled_calls_write_to_out_and_to_nothing_else():
    hidden, weight = problem(4, 100, 16, torch.bfloat16)

    def advance(hidden, weight, tokens, valid, offset):
        flash_sample(hidden, weight, seed=SEED, offset=offset, out=Sample(tokens, valid))
        offset.add_(1)
        return tokens + 1

    compiled = torch.compile(advance, fullgraph=True, backend="aot_eager")
    tokens, valid, offset = torch.full((4,), -777), torch.zeros(4, dtype=torch.bool), counter(7)
    eager = flash_sample(hidden, weight, seed=SEED, offset=offset).tokens
    following = compiled(hidden, weight, tokens, valid, offset)
    assert tokens.tolist() == eager.tolist() and valid.all()
    assert following.tolist() == (eager + 1).tolist()
    assert offset.tolist() == [8]


def test_one_compiled_call_serves_any_batch_size():
    """Also with a module's weight, whose shape stays static where others are dynamic."""
    hidden, weight = problem(8, 50, 16, torch.bfloat16)
    head = torch.nn.Parameter(weight)
    T, seeds = torch.linspace(0, 2, 8), counter(*range(8))

    def draw(hidden, T, seeds):
        return flash_sample(hidden, head, seed=seeds, temperature=T, return_logz=True)

    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds to load

    counting = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(draw, fullgraph=True, backend=counting)
    for B in (2, 3, 5):
        rows = (hidden[:B], T[:B], seeds[:B])
        assert compiled(*rows).tokens.tolist() == draw(*rows).tokens.tolist()
    assert counting.frame_count <= 2


def test_a_bad_argument_is_refused_under_compilation_too():
    compiled = torch.compile(
        lambda hidden, weight: flash_sample(hidden, weight, seed=SEED, temperature=-1.0),
        backend="eager",
    )
    with pytest.raises(Exception, match="temperature: expected a finite number"):
        compiled(*problem(3, 50, 16, torch.bfloat16))


def test_fake_tensors_have_the_shapes_and_run_nothing():
    with FakeTensorMode() as mode:
        hidden = torch.empty(5, 4096, dtype=torch.bfloat16)
        weight = torch.empty(200_000, 4096, dtype=torch.bfloat16)
        seed = torch.empty(5, dtype=torch.int64)
        sample = flash_sample(hidden, weight, seed=seed, num_samples=3, return_logprob=True)
    assert all(field.fake_mode is mode for field in sample[:3])
    assert (sample.tokens.shape, sample.tokens.dtype) == ((5, 3), torch.int64)
    assert (sample.valid.shape, sample.logprob.shape) == ((5,), (5, 3))
    assert sample.tokens.device == CPU


def test_export():
    class Head(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.register_buffer("weight", weight)

        def forward(self, hidden, offset):
            return flash_sample(hidden, self.weight, seed=SEED, offset=offset).tokens

    hidden, weight = problem(3, 50, 16, torch.bfloat16)
    exported = torch.export.export(Head(weight), (hidden, counter(0)))
    names = [node.name for node in exported.graph.nodes]
    assert any("flash_sample" in str(node.target) for node in exported.graph.nodes), names
    tokens = exported.module()(hidden, counter(4))
    eager = flash_sample(hidden, weight, seed=SEED, offset=counter(4)).tokens
    assert tokens.tolist() == eager.tolist()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.interpreter)], ids=str
)
def test_parameters_that_require_grad_do_not_matter(dtype):
    hidden, weight = problem(3, 50, 16, dtype)
    plain = check(hidden=hidden, weight=weight, return_logprob=True)
    sample = check(
        hidden=hidden.requires_grad_(),
        weight=torch.nn.Parameter(weight),
        return_logprob=True,
    )
    assert sample.tokens.tolist() == plain.tokens.tolist()
    assert not sample.logprob.requires_grad


@pytest.mark.parametrize("name", ["flash_sample", "score"])
def test_a_call_inside_vmap_is_refused_by_name(name):
    hidden, weight = problem(3, 50, 16, torch.bfloat16)
    calls = {
        "flash_sample": lambda row: flash_sample(row[None], weight, seed=counter(5)).tokens,
        "score": lambda row: score(row[None], weight, counter(5)).logprob,
    }
    with pytest.raises(InvalidType, match=r"torch\.vmap"):
        torch.vmap(calls[name])(hidden)
