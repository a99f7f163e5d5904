"""Bad arguments of flash_sample: each by type, dtype, shape, device, layout and range."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton
from flash_sample_cases import TILES, counter
from torch._subclasses.fake_tensor import FakeTensorMode

from fsbench.errors import FsbenchError, InvalidArgument, InvalidType
from fsbench.kernels import Sample, flash_sample
from fsbench.kernels.fused import api
from fsbench.kernels.fused.launch import FusedLaunch
from fsbench.kernels.launch.launch_cache import LAUNCHES

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

TENSORS = {
    "hidden": HIDDEN,
    "weight": torch.zeros(V, D),
    "temperature": torch.ones(B),
    "bias": torch.zeros(B, V),
    "mask": torch.ones(B, V).bool(),
    "seed": counter(*range(B)),
    "offset": counter(*range(B)),
    "out.tokens": torch.zeros(B, dtype=torch.int64),
    "out.valid": torch.zeros(B).bool(),
    "out.logprob": torch.zeros(B),
    "out.logz": torch.zeros(B),
}
"""Arguments that fit, and the fields of `out`."""


def instead(name: str, value: object) -> dict[str, object]:
    """Arguments with another value for one of TENSORS."""
    if not name.startswith("out."):
        return {name: value}
    field = name.removeprefix("out.")
    request = {f"return_{field}": True} if field.startswith("log") else {}
    return {"out": out(**{field: value}), **request}


def bad_tensors() -> Iterator[tuple[dict[str, object], type, str]]:
    """Every tensor of another type, dtype, shape, layout or device."""
    for name, fits in TENSORS.items():
        strided = torch.stack([fits, fits], -1)[..., 0]
        empty = fits[:, :0] if name == "hidden" else fits[:0]  # B may be 0
        for wrong, error, message in (
            ("1", TYPE, r"expected an? (number or a |integer or a )?tensor; got str"),
            (fits.to(torch.complex64), TYPE, r"expected dtype .*; got torch.complex64"),
            (fits[None], VALUE, r"expected (shape|a non-empty matrix).*; got \[1, 4|\[1, 100"),
            (empty, VALUE, r"expected (shape|a non-empty matrix).*; got \[(0|4, 0)"),
            (strided, VALUE, r"expected it contiguous; got strides"),
            (fits.to("meta"), VALUE, r"expected it on c.*; got meta"),
        ):
            yield instead(name, wrong), error, f"{name}: {message}"


# (arguments that replace good ones, error, what the message says: name, expected, got)
BAD = [
    *bad_tensors(),
    ({"weight": torch.zeros(V, D).half()}, TYPE, "weight: expected dtype .*32; got .*float16"),
    ({"weight": torch.zeros(V, 16)}, VALUE, r"weight: expected shape \[100, 32\]; got \[100, 16\]"),
    ({"temperature": True}, TYPE, "temperature: expected a number or a tensor; got bool"),
    ({"temperature": -0.1}, VALUE, "temperature: expected a finite number >= 0; got -0.1"),
    ({"temperature": float("nan")}, VALUE, "temperature: expected a finite number .*; got nan"),
    ({"temperature": float("inf")}, VALUE, "temperature: expected a finite number .*; got inf"),
    ({"bias": torch.zeros(V + 1)}, VALUE, r"bias: expected shape \[100\] or \[4, 100\]; got \[101"),
    ({"bias": torch.zeros(V), "vocab_size": 99}, VALUE, r"bias: expected shape \[99\] .*; got"),
    ({"mask": torch.ones(B, V - 1).bool()}, VALUE, r"mask: expected shape \[4, 100\]; got \[4, 99"),
    ({"mask": torch.ones(B, 3).int()}, VALUE, r"mask: expected shape \[4, 4\]; got \[4, 3\]"),
    ({"seed": counter(0, 0)}, VALUE, r"seed: expected shape \[1\] or \[4\]; got \[2\]"),
    ({"seed": 2**64}, VALUE, f"seed: expected an integer of at most 64 bits; got {2**64}"),
    ({"offset": -(2**63) - 1}, VALUE, "offset: expected an integer of at most 64 bits; got -"),
    ({"seed": True}, TYPE, "seed: expected an integer or a tensor; got bool"),
    ({"offset": 1.0}, TYPE, "offset: expected an integer or a tensor; got float"),
    ({"seed": torch.zeros(1)}, TYPE, "seed: expected dtype torch.int64; got torch.float32"),
    ({"num_samples": 0}, VALUE, "num_samples: expected 1 to 65535; got 0"),
    ({"num_samples": 2**16}, VALUE, "num_samples: expected 1 to 65535; got 65536"),
    ({"num_samples": True}, TYPE, "num_samples: expected an integer; got bool"),
    ({"soft_cap": -1.0}, VALUE, "soft_cap: expected a finite number > 0; got -1.0"),
    ({"soft_cap": "30"}, TYPE, "soft_cap: expected a number; got str"),
    ({"soft_cap": True}, TYPE, "soft_cap: expected a number; got bool"),
    ({"vocab_size": 0}, VALUE, "vocab_size: expected 1 to 100; got 0"),
    ({"vocab_size": V + 1}, VALUE, "vocab_size: expected 1 to 100; got 101"),
    ({"return_logprob": 1}, TYPE, "return_logprob: expected True or False; got int"),
    ({"return_logz": 1}, TYPE, "return_logz: expected True or False; got int"),
    ({"noise": 5}, TYPE, "noise: expected a string; got int"),
    ({"noise": "gumbel"}, VALUE, "noise: expected auto or token or group; got 'gumbel'"),
    ({"config": "b16v128"}, TYPE, "config: expected a TileConfig or HopperConfig; got str"),
    ({"out": torch.zeros(B)}, TYPE, "out: expected a Sample; got Tensor"),
    ({"out": out(), "num_samples": 3}, VALUE, r"out.tokens: expected shape \[4, 3\]; got \[4\]"),
    ({"out": out(), "return_logprob": True}, TYPE, "out.logprob: expected a tensor; got NoneType"),
    ({"out": out(logz=torch.zeros(B))}, VALUE, "out.logz: expected None .*; got a tensor"),
]


def good() -> dict:
    return {"hidden": HIDDEN, "weight": torch.zeros(V, D), "seed": counter(0), "offset": counter(0)}


@pytest.fixture(scope="module")
def cached_calls():
    """Valid launches in the cache that a bad argument could be mistaken for."""
    if not triton.knobs.runtime.interpret:
        return
    options = [{name: x} for name, x in TENSORS.items() if not name.startswith("out.")]
    options += [{}, {"num_samples": 1}, {"soft_cap": 1.0}, {"vocab_size": 1}, {"out": out()}]
    options += [{"return_logprob": True}, {"return_logz": True}, {"noise": "token"}]
    before = len(LAUNCHES)
    for option in options:
        flash_sample(**good() | option)
    assert len(LAUNCHES) > before


@pytest.fixture
def nothing_runs(cached_calls, monkeypatch):
    """Fails the test if anything is allocated or launched."""

    def forbidden(*arguments, **options):
        pytest.fail("a refused call went on")

    monkeypatch.setattr(api, "draw", forbidden)
    monkeypatch.setattr(FusedLaunch, "__call__", forbidden)
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
