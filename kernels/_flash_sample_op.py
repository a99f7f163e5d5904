"""torch.ops.fsbench.flash_sample: what flash_sample launches, as an operator that torch knows.

As an operator it is one opaque node to torch.compile and to fake tensors; its arguments have been
checked by flash_sample, and its results are written to tensors of the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from fsbench import reference
from fsbench.kernels._arguments import Request
from fsbench.kernels._choice import choose
from fsbench.kernels._flash_sample import Sample
from fsbench.kernels._flash_sampling_config import TileConfig
from fsbench.kernels._hopper_config import HopperConfig

MUTATED = ("tokens", "valid", "logprob", "logz")


@torch.library.custom_op("fsbench::flash_sample", mutates_args=MUTATED)
def flash_sample_op(
    hidden: Tensor,
    weight: Tensor,
    seed: Tensor,
    offset: Optional[Tensor],  # noqa: UP045 (torch reads the schema from these)
    temperature: float,
    temperatures: Optional[Tensor],  # noqa: UP045
    soft_cap: Optional[float],  # noqa: UP045
    bias: Optional[Tensor],  # noqa: UP045
    mask: Optional[Tensor],  # noqa: UP045
    vocab_size: int,
    num_samples: int,
    noise: str,
    kernel: str,
    tiles: Optional[Sequence[int]],  # noqa: UP045
    tokens: Tensor,
    valid: Tensor,
    logprob: Optional[Tensor],  # noqa: UP045
    logz: Optional[Tensor],  # noqa: UP045
) -> None:
    """See flash_sample. temperatures, if given, is used in place of temperature.

    tiles: the fields of the config of `kernel`, which is not "auto" then.
    """
    choice = choose(hidden, weight, noise, kernel, _config(kernel, tiles))
    request = Request(
        hidden=hidden,
        weight=weight,
        seed=seed,
        offset=offset,
        temperature=temperature if temperatures is None else temperatures,
        soft_cap=soft_cap,
        bias=bias,
        mask=mask,
        vocab_size=vocab_size,
        num_samples=num_samples,
        noise=noise,
    )
    out = Sample(tokens, valid, logprob, logz)
    if hidden.device.type == "cuda" or _interpretable(hidden):
        from fsbench.kernels._launch import launch

        launch(request, choice, out)
    else:
        _compute(request, out)


def _config(kernel: str, tiles: Sequence[int] | None) -> TileConfig | HopperConfig | None:
    if tiles is None:
        return None
    return HopperConfig(*tiles) if kernel == "hopper" else TileConfig(*tiles)


@flash_sample_op.register_fake
def _(*arguments: object) -> None:
    """Shapes need no inference: the results are the caller's tensors."""


def _interpretable(hidden: Tensor) -> bool:
    """Whether Triton's interpreter runs the kernel on these CPU tensors."""
    try:
        import triton
    except ModuleNotFoundError:  # it exists for Linux only
        return False
    return triton.knobs.runtime.interpret and hidden.dtype != torch.bfloat16


def _compute(request: Request, out: Sample) -> None:
    """The same by fsbench.reference, on logits accumulated in fp32."""
    n, temperature = request.num_samples, request.temperature
    logits = reference.processed_logits(
        request.hidden.float() @ request.weight[: request.vocab_size].float().T,
        soft_cap=request.soft_cap,
        bias=request.bias,
        mask=request.mask,
    )
    step = torch.zeros(1, dtype=torch.int64) if request.offset is None else request.offset
    for sample in range(n):
        drawn = reference.expect(
            logits, request.seed, step, temperature, request.noise, sample=sample
        ).tokens
        out.tokens.view(-1, n)[:, sample] = drawn
        out.valid.copy_(drawn >= 0)
        if out.logprob is not None:
            value = reference.log_probability(logits, drawn.clamp_min(0), temperature)
            out.logprob.view(-1, n)[:, sample] = torch.where(out.valid, value, torch.nan)
    if out.logz is not None:
        value = reference.log_partition(logits, temperature)
        out.logz.copy_(torch.where(out.valid, value, torch.nan))
