"""What flash_sample refuses: every argument, by type, dtype, shape, device, layout and range."""

from __future__ import annotations

import pytest
import torch
from flash_sample_cases import TILES, counter
from torch._subclasses.fake_tensor import FakeTensorMode

from fsbench.errors import FsbenchError, InvalidArgument, InvalidType
from fsbench.kernels import Sample, flash_sample
from fsbench.kernels.fused import op as _flash_sample_op

B, V, D = 4, 100, 32
HIDDEN = torch.zeros(B, D)


def out(**fields) -> Sample:
    """Outputs that fit one sample per row, except for the fields given."""
    fitting = {
        "tokens": torch.zeros(B, dtype=torch.int64),
        "valid": torch.zeros(B, dtype=torch.bool),
        "logprob": None,
        "logz": None,
    }
    return Sample(**{**fitting, **fields})


TYPE, VALUE = InvalidType, InvalidArgument

# (arguments that replace good ones, error, what the message says: name, expected, got)
BAD = [
    # hidden
    ({"hidden": [[0.0]]}, TYPE, "hidden: expected a tensor; got list"),
    ({"hidden": HIDDEN.double()}, TYPE, "hidden: expected dtype .*float32; got torch.float64"),
    ({"hidden": HIDDEN[0]}, VALUE, r"hidden: expected a non-empty matrix; got \[32\]"),
    ({"hidden": HIDDEN[:0]}, VALUE, r"hidden: expected a non-empty matrix; got \[0, 32\]"),
    ({"hidden": HIDDEN[:, :0]}, VALUE, r"hidden: expected a non-empty matrix; got \[4, 0\]"),
    ({"hidden": HIDDEN.to("meta")}, VALUE, "hidden: expected it on cuda or cpu; got meta"),
    ({"hidden": torch.zeros(D, B).T}, VALUE, r"hidden: expected it contiguous; got strides \(1, 4"),
    # weight
    ({"weight": 3.0}, TYPE, "weight: expected a tensor; got float"),
    ({"weight": torch.zeros(V, D).half()}, TYPE, "weight: expected dtype .*32; got .*float16"),
    ({"weight": torch.zeros(0, D)}, VALUE, r"weight: expected a non-empty matrix; got \[0, 32\]"),
    ({"weight": torch.zeros(V, 16)}, VALUE, r"weight: expected shape \[100, 32\]; got \[100, 16\]"),
    ({"weight": torch.zeros(V, D).to("meta")}, VALUE, "weight: expected it on cpu.*; got meta"),
    ({"weight": torch.zeros(D, V).T}, VALUE, r"weight: expected it contiguous; got strides"),
    # temperature
    ({"temperature": "1"}, TYPE, "temperature: expected a number or a tensor; got str"),
    ({"temperature": True}, TYPE, "temperature: expected a number or a tensor; got bool"),
    ({"temperature": -0.1}, VALUE, "temperature: expected a finite number >= 0; got -0.1"),
    ({"temperature": float("nan")}, VALUE, "temperature: expected a finite number .*; got nan"),
    ({"temperature": float("inf")}, VALUE, "temperature: expected a finite number .*; got inf"),
    ({"temperature": torch.ones(B).double()}, TYPE, "temperature: expected dtype .*float64"),
    ({"temperature": torch.ones(B, 1)}, VALUE, r"temperature: expected shape \[4\]; got \[4, 1\]"),
    ({"temperature": torch.ones(1)}, VALUE, r"temperature: expected shape \[4\]; got \[1\]"),
    ({"temperature": torch.ones(B).to("meta")}, VALUE, "temperature: expected it on cpu.*; got me"),
    ({"temperature": torch.ones(2 * B)[::2]}, VALUE, "temperature: expected it contiguous; got"),
    # bias
    ({"bias": 0.5}, TYPE, "bias: expected a tensor; got float"),
    ({"bias": torch.zeros(V).double()}, TYPE, "bias: expected dtype .*; got torch.float64"),
    ({"bias": torch.zeros(V + 1)}, VALUE, r"bias: expected shape \[100\] or \[4, 100\]; got \[101"),
    ({"bias": torch.zeros(1, V)}, VALUE, r"bias: expected shape .*; got \[1, 100\]"),
    ({"bias": torch.zeros(V), "vocab_size": 99}, VALUE, r"bias: expected shape \[99\] .*; got"),
    ({"bias": torch.zeros(V).to("meta")}, VALUE, "bias: expected it on cpu.*; got meta"),
    ({"bias": torch.zeros(V, B).T}, VALUE, "bias: expected it contiguous; got strides"),
    # mask
    ({"mask": "all"}, TYPE, "mask: expected a tensor; got str"),
    ({"mask": torch.ones(B, V)}, TYPE, "mask: expected dtype .*; got torch.float32"),
    ({"mask": torch.ones(V).bool()}, VALUE, r"mask: expected shape \[4, 100\]; got \[100\]"),
    ({"mask": torch.ones(B, V - 1).bool()}, VALUE, r"mask: expected shape \[4, 100\]; got \[4, 99"),
    ({"mask": torch.ones(B, 3).int()}, VALUE, r"mask: expected shape \[4, 4\]; got \[4, 3\]"),
    ({"mask": torch.ones(3, 4).int()}, VALUE, r"mask: expected shape \[4, 4\]; got \[3, 4\]"),
    ({"mask": torch.ones(B, V).bool().to("meta")}, VALUE, "mask: expected it on cpu.*; got meta"),
    ({"mask": torch.ones(V, B).bool().T}, VALUE, "mask: expected it contiguous; got strides"),
    # seed and offset
    ({"seed": 5}, TYPE, "seed: expected a tensor; got int"),
    ({"seed": torch.zeros(1)}, TYPE, "seed: expected dtype torch.int64; got torch.float32"),
    ({"seed": counter(0, 0)}, VALUE, r"seed: expected shape \[1\] or \[4\]; got \[2\]"),
    ({"seed": counter(0).to("meta")}, VALUE, "seed: expected it on cpu as the others; got meta"),
    ({"seed": counter(*range(8))[::2]}, VALUE, r"seed: expected it contiguous; got strides \(2,\)"),
    ({"offset": 0}, TYPE, "offset: expected a tensor; got int"),
    ({"offset": counter(0).int()}, TYPE, "offset: expected dtype torch.int64; got torch.int32"),
    ({"offset": counter(0)[None]}, VALUE, r"offset: expected shape \[1\] or .*; got \[1, 1\]"),
    (
        {"offset": counter(0).to("meta")},
        VALUE,
        "offset: expected it on cpu as the others; got meta",
    ),
    ({"offset": counter(*range(8))[::2]}, VALUE, "offset: expected it contiguous; got strides"),
    # num_samples, soft_cap, vocab_size
    ({"num_samples": 0}, VALUE, "num_samples: expected 1 to 65535; got 0"),
    ({"num_samples": 2**16}, VALUE, "num_samples: expected 1 to 65535; got 65536"),
    ({"num_samples": True}, TYPE, "num_samples: expected an integer; got bool"),
    ({"num_samples": 2.0}, TYPE, "num_samples: expected an integer; got float"),
    ({"soft_cap": -1.0}, VALUE, "soft_cap: expected a finite number > 0; got -1.0"),
    ({"soft_cap": float("nan")}, VALUE, "soft_cap: expected a finite number > 0; got nan"),
    ({"soft_cap": float("inf")}, VALUE, "soft_cap: expected a finite number > 0; got inf"),
    ({"soft_cap": "30"}, TYPE, "soft_cap: expected a number; got str"),
    ({"soft_cap": True}, TYPE, "soft_cap: expected a number; got bool"),
    ({"vocab_size": 0}, VALUE, "vocab_size: expected 1 to 100; got 0"),
    ({"vocab_size": V + 1}, VALUE, "vocab_size: expected 1 to 100; got 101"),
    ({"vocab_size": True}, TYPE, "vocab_size: expected an integer; got bool"),
    # return_logprob, return_logz, noise, config
    ({"return_logprob": 1}, TYPE, "return_logprob: expected True or False; got int"),
    ({"return_logz": 1}, TYPE, "return_logz: expected True or False; got int"),
    ({"noise": 5}, TYPE, "noise: expected a string; got int"),
    ({"noise": "gumbel"}, VALUE, "noise: expected auto or token or group; got 'gumbel'"),
    ({"config": "b16v128"}, TYPE, "config: expected a TileConfig or HopperConfig; got str"),
    # out
    ({"out": torch.zeros(B)}, TYPE, "out: expected a Sample; got Tensor"),
    ({"out": out(tokens=None)}, TYPE, "out.tokens: expected a tensor; got NoneType"),
    ({"out": out(tokens=torch.zeros(B).int())}, TYPE, "out.tokens: expected dtype .*int64; got"),
    ({"out": out(tokens=counter(*range(5)))}, VALUE, r"out.tokens: expected shape \[4\]; got \[5"),
    ({"out": out(), "num_samples": 3}, VALUE, r"out.tokens: expected shape \[4, 3\]; got \[4\]"),
    (
        {"out": out(tokens=counter(*range(8))[::2])},
        VALUE,
        "out.tokens: expected it contiguous; got",
    ),
    (
        {"out": out(tokens=counter(*range(4)).to("meta"))},
        VALUE,
        "out.tokens: .* on cpu.*; got meta",
    ),
    ({"out": out(valid=torch.zeros(B).byte())}, TYPE, "out.valid: expected dtype torch.bool; got"),
    ({"out": out(valid=torch.zeros(3).bool())}, VALUE, r"out.valid: expected shape \[4\]; got \[3"),
    ({"out": out(), "return_logprob": True}, TYPE, "out.logprob: expected a tensor; got NoneType"),
    ({"out": out(), "return_logz": True}, TYPE, "out.logz: expected a tensor; got NoneType"),
    ({"out": out(logprob=torch.zeros(B))}, VALUE, "out.logprob: expected None .*; got a tensor"),
    ({"out": out(logz=torch.zeros(B))}, VALUE, "out.logz: expected None .*; got a tensor"),
    (
        {"out": out(logprob=torch.zeros(B).half()), "return_logprob": True},
        TYPE,
        "out.logprob: expected dtype torch.float32; got torch.float16",
    ),
    (
        {"out": out(logprob=torch.zeros(B, 1)), "return_logprob": True},
        VALUE,
        r"out.logprob: expected shape \[4\]; got \[4, 1\]",
    ),
    (
        {"out": out(logz=torch.zeros(1)), "return_logz": True},
        VALUE,
        r"out.logz: expected shape \[4\]; got \[1\]",
    ),
]


def good() -> dict:
    return {"hidden": HIDDEN, "weight": torch.zeros(V, D), "seed": counter(0), "offset": counter(0)}


@pytest.fixture
def nothing_runs(monkeypatch):
    """Fails the test if anything is allocated or launched."""

    def forbidden(*arguments, **options):
        pytest.fail("a refused call went on")

    monkeypatch.setattr(_flash_sample_op, "flash_sample_op", forbidden)
    monkeypatch.setattr(torch, "empty", forbidden)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    BAD,
    ids=[f"{number}-{case[2]}" for number, case in enumerate(BAD)],
)
def test_a_bad_argument_is_named_before_anything_runs(change, error, message, nothing_runs, capfd):
    with pytest.raises(FsbenchError, match=f"^{message}") as caught:
        flash_sample(**{**good(), **change})
    assert type(caught.value) is error
    assert isinstance(caught.value, TypeError if error is InvalidType else ValueError)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_vocabulary_that_int32_cannot_count():
    with FakeTensorMode():  # sizes without memory
        hidden, seed = torch.empty(1, 16), torch.empty(1, dtype=torch.int64)
        weight = torch.empty(2**31 - 256, 16)
        with pytest.raises(InvalidArgument, match="weight: expected fewer than"):
            flash_sample(hidden, weight, seed=seed)


@pytest.mark.interpreter
def test_the_good_arguments_are_good():
    """Else the cases above could be refused for another reason than theirs."""
    sample = flash_sample(**good(), config=TILES, noise="token", out=out())
    assert sample.valid.all()
    assert flash_sample(
        **good(), num_samples=1, soft_cap=1, vocab_size=1, temperature=0
    ).valid.all()
