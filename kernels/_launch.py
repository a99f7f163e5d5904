"""Host side of the fused kernel: tile shapes, operands, scratch memory, one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fsbench.kernels._arguments import Request
from fsbench.kernels._device import launching_on, multiprocessors
from fsbench.kernels._flash_sample import Sample
from fsbench.kernels._flash_sampling_config import TileConfig, config_for
from fsbench.kernels._flash_sampling_kernel import SMALLEST_TEMPERATURE, flash_sampling_kernel
from fsbench.kernels._pack_mask import pack_mask
from fsbench.kernels._workspace import workspace

SAMPLES_AT_ONCE = 4
"""Samples whose candidates a program keeps in registers; more take further launches."""


def tma_possible(matrix: Tensor) -> bool:
    """Whether TMA can load it: base address and rows are multiples of 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and matrix.shape[1] * matrix.element_size() % 16 == 0


def default_config(B: int, D: int, device: torch.device, element_bytes: int) -> TileConfig:
    """The shipped tile shapes for [B, D] hidden states on a device, fitted to its shared memory."""
    if device.type == "cpu":
        return TileConfig(16, 256, 64, 128, False, False, 4, 1, 1)
    properties = torch.cuda.get_device_properties(device)
    config = config_for(B, D, properties.name)
    limit = properties.shared_memory_per_block_optin // config.ctas_per_sm
    return config.fitted(limit - 1024, element_bytes)


class Operands(NamedTuple):
    """The matrices as a kernel takes them, and the programs that share the work.

    hidden, weight: descriptors if TMA can load both, else the tensors.
    grid: blocks of rows times programs_v, the programs that walk over the vocabulary.
    tiles: what a kernel must be compiled with for it.
    """

    hidden: Tensor | TensorDescriptor
    weight: Tensor | TensorDescriptor
    programs_v: int
    grid: tuple[int]
    tiles: dict[str, int]


def load_operands(hidden: Tensor, weight: Tensor, V: int, config: TileConfig) -> Operands:
    """How a config's programs load hidden [B, D] and the first V rows of weight."""
    use_tma = tma_possible(hidden) and tma_possible(weight)
    blocks_b = triton.cdiv(hidden.shape[0], config.block_b)
    programs = multiprocessors(hidden.device) * config.ctas_per_sm
    programs_v = max(1, min(programs // blocks_b, triton.cdiv(V, config.block_v)))
    return Operands(
        _matrix(hidden, config.block_b, config.block_d, use_tma),
        _matrix(weight, config.block_v, config.block_d, use_tma),
        programs_v,
        (blocks_b * programs_v,),
        {
            "BLOCK_B": config.block_b,
            "BLOCK_V": config.block_v,
            "BLOCK_D": config.block_d,
            "V_ON_M": config.v_on_m,
            "USE_TMA": use_tma,
            "FLATTEN": config.flatten,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        },
    )


def _matrix(matrix: Tensor, rows: int, cols: int, use_tma: bool) -> Tensor | TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, cols]) if use_tma else matrix


def launch(request: Request, tiles: Sequence[int] | None, out: Sample) -> None:
    """Run the kernel on a request; tiles are the fields of a TileConfig, None the shipped one.

    One launch draws up to SAMPLES_AT_ONCE samples, which share everything but their noise.
    """
    hidden, temperature, samples = request.hidden, request.temperature, request.num_samples
    B, D = hidden.shape
    device = hidden.device
    config = (
        default_config(B, D, device, hidden.element_size()) if tiles is None else TileConfig(*tiles)
    )
    operands = load_operands(hidden, request.weight, request.vocab_size, config)
    at_once = min(samples, SAMPLES_AT_ONCE)
    work = workspace(B * at_once, device)
    winners = masses = None
    if out.logprob is not None:
        winners = torch.empty(operands.programs_v, B, at_once, dtype=torch.float32, device=device)
    if out.logprob is not None or out.logz is not None:
        masses = torch.empty(2, operands.programs_v, B, dtype=torch.float32, device=device)
    bias = row_bias = None
    if request.bias is not None:
        bias, row_bias = (request.bias, None) if request.bias.ndim == 1 else (None, request.bias)
    mask = request.mask
    if mask is not None and mask.dtype == torch.bool:
        mask = pack_mask(mask)
    per_row = isinstance(temperature, Tensor)
    greedy = not per_row and temperature < SMALLEST_TEMPERATURE.value
    with launching_on(device):
        for first_sample in range(0, samples, at_once):
            flash_sampling_kernel[operands.grid](
                operands.hidden,
                operands.weight,
                request.seed,
                request.offset,
                temperature,
                request.soft_cap,
                bias,
                row_bias,
                mask,
                work.keys,
                work.arrivals,
                winners,
                masses,
                *out,
                B,
                request.vocab_size,
                D,
                0 if mask is None else mask.shape[1],
                samples,
                first_sample,
                N=min(at_once, samples - first_sample),
                NOISE="none" if greedy else request.noise,
                SEED_PER_ROW=request.seed.numel() > 1,
                OFFSET_PER_ROW=request.offset is not None and request.offset.numel() > 1,
                TEMPERATURE_PER_ROW=per_row,
                SLICE=config.slice,
                **operands.tiles,
            )
