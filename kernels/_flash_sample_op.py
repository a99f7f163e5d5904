"""torch.ops.fsbench.flash_sample: what flash_sample launches, as an operator that torch knows.

As an operator it is one opaque node to torch.compile and to fake tensors; its arguments have been
checked by flash_sample, and its results are written to tensors of the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fsbench import reference
from fsbench.kernels._device import launching_on, multiprocessors
from fsbench.kernels._flash_sampling_config import TileConfig, config_for
from fsbench.kernels._flash_sampling_kernel import flash_sampling_kernel
from fsbench.kernels._workspace import workspace

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
    tiles: Optional[Sequence[int]],  # noqa: UP045
    tokens: Tensor,
    valid: Tensor,
    logprob: Optional[Tensor],  # noqa: UP045
    logz: Optional[Tensor],  # noqa: UP045
) -> None:
    """See flash_sample. temperatures, if given, is used in place of temperature."""
    arguments = (
        hidden, weight, seed, offset, temperature if temperatures is None else temperatures,
        soft_cap, bias, mask, vocab_size, num_samples, noise,
    )  # fmt: skip
    interpretable = triton.knobs.runtime.interpret and hidden.dtype != torch.bfloat16
    if hidden.device.type == "cuda" or interpretable:
        _launch(*arguments, tiles, tokens, valid, logprob, logz)
    else:
        _compute(*arguments, tokens, valid, logprob, logz)


@flash_sample_op.register_fake
def _(*arguments: object) -> None:
    """Shapes need no inference: the results are the caller's tensors."""


def tma_possible(matrix: Tensor) -> bool:
    """Whether TMA can load it: base address and rows are multiples of 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and matrix.shape[1] * matrix.element_size() % 16 == 0


def default_config(B: int, D: int, device: torch.device, element_bytes: int) -> TileConfig:
    """The shipped tile shapes for [B, D] hidden states on a device, fitted to its shared memory."""
    if device.type == "cpu":
        return TileConfig(16, 256, 64, 256, False, False, 4, 1, 1)
    properties = torch.cuda.get_device_properties(device)
    config = config_for(B, D, properties.name)
    limit = properties.shared_memory_per_block_optin // config.ctas_per_sm
    return config.fitted(limit - 1024, element_bytes)


def _launch(
    hidden: Tensor,
    weight: Tensor,
    seed: Tensor,
    offset: Tensor | None,
    temperature: float | Tensor,
    soft_cap: float | None,
    bias: Tensor | None,
    mask: Tensor | None,
    V: int,
    n: int,
    noise: str,
    tiles: Sequence[int] | None,
    tokens: Tensor,
    valid: Tensor,
    logprob: Tensor | None,
    logz: Tensor | None,
) -> None:
    B, D = hidden.shape
    device = hidden.device
    config = (
        default_config(B, D, device, hidden.element_size()) if tiles is None else TileConfig(*tiles)
    )
    work = workspace(B * n, device)
    use_tma = tma_possible(hidden) and tma_possible(weight)
    blocks_b = triton.cdiv(B, config.block_b)
    tiles_v = triton.cdiv(V, config.block_v)
    programs = multiprocessors(device) * config.ctas_per_sm
    programs_v = max(1, min(programs // blocks_b, tiles_v))
    winners = masses = None
    if logprob is not None:
        sources = programs_v if n == 1 else tiles_v
        winners = torch.empty(sources, B, n, dtype=torch.float32, device=device)
    if logprob is not None or logz is not None:
        masses = torch.empty(2, programs_v, B, dtype=torch.float32, device=device)
    per_row = isinstance(temperature, Tensor)
    with launching_on(device):
        flash_sampling_kernel[(blocks_b * programs_v,)](
            _matrix(hidden, config.block_b, config.block_d, use_tma),
            _matrix(weight, config.block_v, config.block_d, use_tma),
            seed,
            offset,
            temperature,
            soft_cap,
            bias,
            mask,
            work.keys,
            work.arrivals,
            winners,
            masses,
            tokens,
            valid,
            logprob,
            logz,
            B,
            V,
            D,
            N=n,
            NOISE="none" if not per_row and temperature == 0 else noise,
            SEED_PER_ROW=seed.numel() > 1,
            OFFSET_PER_ROW=offset is not None and offset.numel() > 1,
            TEMPERATURE_PER_ROW=per_row,
            BIAS_PER_ROW=bias is not None and bias.ndim == 2,
            BLOCK_B=config.block_b,
            BLOCK_V=config.block_v,
            BLOCK_D=config.block_d,
            SLICE=config.slice,
            V_ON_M=config.v_on_m,
            USE_TMA=use_tma,
            FLATTEN=config.flatten,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def _matrix(matrix: Tensor, rows: int, cols: int, use_tma: bool) -> Tensor | TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, cols]) if use_tma else matrix


def _compute(
    hidden: Tensor,
    weight: Tensor,
    seed: Tensor,
    offset: Tensor | None,
    temperature: float | Tensor,
    soft_cap: float | None,
    bias: Tensor | None,
    mask: Tensor | None,
    V: int,
    n: int,
    noise: str,
    tokens: Tensor,
    valid: Tensor,
    logprob: Tensor | None,
    logz: Tensor | None,
) -> None:
    """The same by fsbench.reference, on logits accumulated in fp32."""
    logits = reference.processed_logits(
        hidden.float() @ weight[:V].float().T, soft_cap=soft_cap, bias=bias, mask=mask
    )
    step = torch.zeros(1, dtype=torch.int64) if offset is None else offset
    for sample in range(n):
        drawn = reference.expect(logits, seed, step, temperature, noise, sample=sample).tokens
        tokens.view(-1, n)[:, sample] = drawn
        valid.copy_(drawn >= 0)
        if logprob is not None:
            value = reference.log_probability(logits, drawn.clamp_min(0), temperature)
            logprob.view(-1, n)[:, sample] = torch.where(valid, value, torch.nan)
    if logz is not None:
        value = reference.log_partition(logits, temperature)
        logz.copy_(torch.where(valid, value, torch.nan))
