"""Host side of the fused kernels: operands, scratch memory, one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fsbench.kernels._arguments import Request
from fsbench.kernels._choice import tma_possible
from fsbench.kernels._device import launching_on, multiprocessors
from fsbench.kernels._flash_sample import Sample
from fsbench.kernels._flash_sampling_config import TileConfig
from fsbench.kernels._flash_sampling_kernel import flash_sampling_kernel
from fsbench.kernels._helper import SMALLEST_TEMPERATURE
from fsbench.kernels._hopper_config import CHUNK, HopperConfig
from fsbench.kernels._pack_mask import pack_mask
from fsbench.kernels._stored_logits import StoredLogits
from fsbench.kernels._workspace import workspace

SAMPLES_AT_ONCE = 4
"""Samples whose candidates a program keeps in registers; more take further launches."""


class Operands(NamedTuple):
    """The matrices as a kernel takes them, and the programs that share the work.

    hidden, weight: descriptors if TMA can load both, else the tensors.
    programs_v: that share the vocabulary, for each block of rows.
    grid: blocks of rows times programs_v.
    tiles: what a kernel must be compiled with for it.
    """

    hidden: Any
    weight: Any
    programs_v: int
    grid: tuple[int]
    tiles: dict[str, Any]


def load_operands(hidden: Tensor, weight: Tensor, V: int, config: TileConfig) -> Operands:
    """How the portable kernel loads hidden [B, D] and the first V rows of weight."""
    use_tma = tma_possible(hidden) and tma_possible(weight)
    blocks_b = triton.cdiv(hidden.shape[0], config.block_b)
    programs_v = vocab_programs(blocks_b, V, config.block_v, hidden.device, config.ctas_per_sm)
    return Operands(
        matrix_operand(hidden, config.block_b, config.block_d, use_tma),
        matrix_operand(weight, config.block_v, config.block_d, use_tma),
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


def vocab_programs(
    blocks_b: int, V: int, block_v: int, device: torch.device, per_sm: int = 1
) -> int:
    """Programs that share the vocabulary, for each block of rows: one wave, none without a tile."""
    programs = multiprocessors(device) * per_sm
    return max(1, min(programs // blocks_b, triton.cdiv(V, block_v)))


def matrix_operand(
    matrix: Tensor, rows: int, cols: int, use_tma: bool
) -> Tensor | TensorDescriptor:
    """A descriptor for boxes [rows, cols], or the tensor where TMA cannot load it."""
    return TensorDescriptor.from_tensor(matrix, [rows, cols]) if use_tma else matrix


class Processing(NamedTuple):
    """What a request does to the logits, as the kernels take it; mask is packed."""

    bias: Tensor | None
    row_bias: Tensor | None
    mask: Tensor | None
    mask_words: int


def processing(request: Request) -> Processing:
    """The biases and the mask of a request."""
    bias, mask = request.bias, request.mask
    if mask is not None and mask.dtype == torch.bool:
        mask = pack_mask(mask)
    whole = bias is not None and bias.ndim == 2
    return Processing(
        None if whole else bias, bias if whole else None, mask, 0 if mask is None else mask.shape[1]
    )


def per_row(request: Request) -> dict[str, bool]:
    """Which numbers of a request are of each row, as the kernels are compiled for it."""
    return {
        "SEED_PER_ROW": request.seed.numel() > 1,
        "OFFSET_PER_ROW": request.offset is not None and request.offset.numel() > 1,
        "TEMPERATURE_PER_ROW": isinstance(request.temperature, Tensor),
    }


def greedy(request: Request) -> bool:
    """Whether all rows are: none of them needs noise."""
    temperature = request.temperature
    return not isinstance(temperature, Tensor) and temperature < SMALLEST_TEMPERATURE.value


def _hopper_operands(hidden: Tensor, weight: Tensor, V: int, config: HopperConfig) -> Operands:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SwizzledDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    B = hidden.shape[0]
    blocks_b = triton.cdiv(B, config.block_b)
    programs_v = vocab_programs(blocks_b, V, config.block_v, hidden.device)
    return Operands(
        SwizzledDescriptor.from_tensor(hidden, [config.box_rows(B), CHUNK], layout),
        SwizzledDescriptor.from_tensor(weight, [128, CHUNK], layout),
        programs_v,
        (blocks_b * programs_v,),
        {
            "WARPGROUPS": config.warpgroups,
            "BLOCK_V": config.block_v,
            "CONTIGUOUS": config.contiguous,
            "BLOCK_D": config.block_d,
            "STAGES": config.num_stages,
            "num_warps": 4,
        },
    )


def _kernel_and_operands(
    request: Request, config: TileConfig | HopperConfig
) -> tuple[Any, Operands]:
    hidden, weight = request.hidden, request.weight
    V = _part(request)[1].num_tokens
    if isinstance(config, HopperConfig):
        # Imported here: the language it is written in is an experimental part of Triton.
        from fsbench.kernels._hopper_kernel import hopper_kernel

        return hopper_kernel, _hopper_operands(hidden, weight, V, config)
    operands = load_operands(hidden, weight, V, config)
    return flash_sampling_kernel, operands._replace(tiles={**operands.tiles, "SLICE": config.slice})


class _Part(NamedTuple):
    """This GPU's part of the vocabulary, and its line to the other ranks: arguments of a kernel."""

    first_token: int
    num_tokens: int
    buffers: Tensor | None
    counts: Tensor | None
    rank: int
    area: int


def _part(request: Request) -> tuple[int, _Part]:
    """(RANKS of the kernel, the part)."""
    shard = request.shard
    if shard is None:
        return int(not request.merge_later), _Part(0, request.vocab_size, None, None, 0, 0)
    ranks = 0 if request.merge_later else shard.ranks
    first, tokens, rank = shard.first_token, shard.num_tokens, shard.rank
    if ranks <= 1:
        return ranks, _Part(first, tokens, None, None, rank, 0)
    assert shard.line is not None
    return ranks, _Part(first, tokens, shard.line.buffers, shard.line.counts, rank, shard.slots)


def launch(
    request: Request,
    config: TileConfig | HopperConfig,
    out: Sample,
    stored: StoredLogits | None = None,
) -> None:
    """Run the kernel of a config on a request.

    One launch draws up to SAMPLES_AT_ONCE samples, which share everything but their noise.
    stored: where the logits are written, too.
    """
    hidden, temperature, samples = request.hidden, request.temperature, request.num_samples
    B, D = hidden.shape
    device = hidden.device
    kernel, operands = _kernel_and_operands(request, config)
    at_once = min(samples, SAMPLES_AT_ONCE)
    work = workspace(B * at_once, device)
    winners = masses = None
    if out.logprob is not None:
        winners = torch.empty(operands.programs_v, B, at_once, dtype=torch.float32, device=device)
    if out.logprob is not None or out.logz is not None:
        masses = torch.empty(2, operands.programs_v, B, dtype=torch.float32, device=device)
    bias, row_bias, mask, mask_words = processing(request)
    ranks, part = _part(request)
    with launching_on(device):
        for first_sample in range(0, samples, at_once):
            kernel[operands.grid](
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
                *(stored or (None, None)),
                0 if stored is None else stored.logits.shape[1],
                B,
                request.vocab_size,
                D,
                mask_words,
                samples,
                first_sample,
                *part,
                N=min(at_once, samples - first_sample),
                NOISE="none" if greedy(request) else request.noise,
                **per_row(request),
                RANKS=ranks,
                WATCH=device.type == "cuda",
                **operands.tiles,
            )
