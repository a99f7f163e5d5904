"""Problems that the tests of flash_sample share, and the comparison of a call with the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import pad

from fsbench import reference
from fsbench.kernels import Sample, flash_sample
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.launch import workspace as _workspace
from fsbench.reference import Expected

CPU = torch.device("cpu")
NOISE = ("group", "token")
SEED = torch.tensor([0x0123456789ABCDEF])
TILES = TileConfig(16, 128, 64, 128, False, False, 4, 1, 1)
"""The smallest that group noise takes: the quickest in the interpreter up to V = 128."""


def counter(*values: int) -> Tensor:
    """A seed or an offset."""
    return torch.tensor(values, dtype=torch.int64)


def problem(
    B: int, V: int, D: int, dtype: torch.dtype = torch.float32, sigma: float = 2.0
) -> tuple[Tensor, Tensor]:
    """hidden and weight whose logits have a standard deviation of about sigma."""
    generator = torch.Generator().manual_seed(B * 7919 + V * 31 + D)
    hidden = torch.randn(B, D, generator=generator).to(dtype)
    weight = (sigma * torch.randn(V, D, generator=generator) / D**0.5).to(dtype)
    return hidden, weight


def loose_problem(B: int, V: int, D: int, unused: float) -> tuple[Tensor, Tensor]:
    """Return (hidden, weight) whose bounds are wide: weight has `unused` where hidden has 0."""
    hidden, weight = problem(B, V, D)
    hidden[:, 0], weight[:, 0] = 0.0, unused
    return hidden, weight


def normal_logits(B: int, V: int, sigma: float = 2.0) -> Tensor:
    return sigma * torch.randn(B, V, generator=torch.Generator().manual_seed(B + V))


def stored(logits: Tensor) -> dict[str, Tensor]:
    """Arguments whose logits are exactly these [B, V], infinities and NaN included: a bias."""
    B, V = logits.shape
    return {"hidden": torch.zeros(B, 16), "weight": torch.zeros(V, 16), "bias": logits}


def packed(mask: Tensor, padding: bool = False) -> Tensor:
    """The int32 form of a bool mask [B, V]; padding is what the bits beyond V are."""
    bits = pad(mask, (0, -mask.shape[1] % 32), value=padding).unflatten(1, (-1, 32)).long()
    return (bits << torch.arange(32, device=mask.device)).sum(2).to(torch.int32)


def exact_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    vocab_size: int | None = None,
    **_: object,
) -> Tensor:
    """Return the logits that a call samples from, float64 [B, V]."""
    raw = hidden.double() @ weight[:vocab_size].double().T
    return reference.processed_logits(raw, soft_cap=soft_cap, bias=bias, mask=mask)


def logits_error(
    hidden: Tensor,
    weight: Tensor,
    *,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    **_: object,
) -> float:
    """How far a kernel's logits may be from exact_logits."""
    error = reference.matmul_error(hidden, weight[:vocab_size])
    if soft_cap is not None:
        error += soft_cap * 2.0**-21
    if bias is not None and error > 0:
        finite = bias.float().nan_to_num(0.0, 0.0, 0.0)
        error += float(finite.abs().max()) * 2.0**-23
    return error


def expected_samples(
    *,
    seed: Tensor = SEED,
    offset: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    noise: str = "group",
    num_samples: int = 1,
    **arguments,
) -> list[Expected]:
    """Return the oracle's result of a call for each sample."""
    step = counter(0) if offset is None else offset
    logits, error = exact_logits(**arguments), logits_error(**arguments)
    return [
        reference.expect(logits, seed, step, temperature, noise, sample=sample, logits_error=error)
        for sample in range(num_samples)
    ]


def poisoned(valid: Tensor, n: int, logprob: bool, logz: bool) -> Sample:
    """Outputs in which every value is wrong."""
    shape = (len(valid),) if n == 1 else (len(valid), n)
    return Sample(
        torch.full(shape, -777),
        ~valid,
        torch.full(shape, 777.0) if logprob else None,
        torch.full((len(valid),), 777.0) if logz else None,
    )


@contextmanager
def guarded_memory() -> Iterator[None]:
    """Fill tensors of torch.empty with poison; check that nothing is written after their end."""
    handed_out = []

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        poison = torch.nan if dtype.is_floating_point else 77
        size = math.prod(shape)
        memory = torch.full((size + 4096,), poison, dtype=dtype, device=device)
        handed_out.append((memory[size:], memory[size:].clone()))
        return memory[:size].view(shape)

    with mock.patch.object(torch, "empty", empty):
        yield
    for behind, before in handed_out:
        torch.testing.assert_close(behind, before, rtol=0, atol=0, equal_nan=True)


def check(**arguments) -> Sample:
    """Call flash_sample with poisoned outputs and compare everything it returns with the oracle.

    Takes flash_sample's arguments, with a default for seed and noise.
    """
    arguments = {"seed": SEED, "noise": "group", **arguments}
    n = arguments.get("num_samples", 1)
    expected = expected_samples(**arguments)
    valid = expected[0].tokens >= 0
    out = poisoned(
        valid,
        n,
        arguments.get("return_logprob", False),
        arguments.get("return_logz", False),
    )
    with guarded_memory():
        assert flash_sample(**arguments, out=out) is out
    for each, tokens in zip(expected, out.tokens.view(-1, n).T, strict=True):
        assert each.accepts(tokens).all(), (
            f"flash_sample drew {tokens.tolist()}, the reference {each.tokens.tolist()}"
        )
    assert out.valid.tolist() == valid.tolist()
    assert_log_probabilities(out, arguments)
    assert_at_rest(len(valid) * n)
    return out


def assert_log_probabilities(out: Sample, arguments: dict) -> None:
    """logprob and logz are those of the tokens that were drawn; NaN in rows without a draw."""
    logits = exact_logits(**arguments)
    T = arguments.get("temperature", 1.0)
    if out.logz is not None:
        assert_near(out.logz, reference.log_partition(logits, T).where(out.valid, torch.nan))
    if out.logprob is not None:
        for tokens, logprob in zip(columns(out.tokens), columns(out.logprob), strict=True):
            expected = reference.log_probability(logits, tokens.clamp_min(0), T)
            assert_near(logprob, expected.where(out.valid, torch.nan))


def columns(values: Tensor) -> Tensor:
    """[B] or [B, n] -> [n, B]."""
    return values.view(len(values), -1).T


def assert_near(values: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(values.double(), expected, atol=1e-4, rtol=1e-6, equal_nan=True)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two fp32 tensors have equal bits; all NaN are equal."""
    return torch.equal(a.nan_to_num(7.0).view(torch.int32), b.nan_to_num(7.0).view(torch.int32))


def assert_at_rest(rows: int) -> None:
    """Assert that the workspace for this many rows is ready for a launch."""
    work = _workspace.workspace(rows, CPU)
    assert (work.keys == _workspace.LOWEST_KEY).all()
    assert (work.arrivals == 0).all()
