"""`screened_sample`: flash_sample with token noise by way of an int8 screen; its host side.

Not public yet: no GPU has run the kernels (docs/screened-head.md says what is missing).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsbench import reference
from fsbench.errors import InvalidArgument
from fsbench.kernels import _arguments as check
from fsbench.kernels import _screen
from fsbench.kernels._screened_head import ScreenedHead

SMALLEST_TEMPERATURE = reference.logits.SMALLEST_TEMPERATURE


@dataclass(frozen=True)
class ScreenConfig:
    """Tile shapes of the screen, and of the exact computation of single tokens.

    block_b, block_v, block_d: rows, tokens and columns of a tile.
    slice: tokens whose noise is in registers at once.
    v_on_m: the vocabulary is on the M side of the instruction, else the rows.
    flatten: loads of the next tile start under the epilogue of this one.
    num_warps, num_stages: as in Triton. ctas_per_sm: persistent programs per multiprocessor.
    room: records of four tokens each that a program can keep for a row, and row_room: those that
        may be left of a row at the end; a row that needs more is computed in full.
    at_once: tokens that are computed together, four of each record. rows: of the instruction, 64
        for the one that the fused kernels use on Hopper, and at least at_once. step: columns at a
        time; a power of two that divides 256.
    """

    block_b: int
    block_v: int
    block_d: int
    slice: int
    v_on_m: bool
    flatten: bool
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1
    room: int = 64
    row_room: int = 4096
    at_once: int = 16
    rows: int = 64
    step: int = 128


def default_config(B: int, device: torch.device) -> ScreenConfig:
    """A guess until it is measured."""
    if device.type == "cpu":
        return ScreenConfig(
            16, 128, 64, 64, False, False, 4, 1, room=32, row_room=64, rows=16, step=64
        )
    if B <= 16:
        return ScreenConfig(16, 128, 128, 128, True, True, 8, 8)
    if B <= 32:
        return ScreenConfig(32, 128, 128, 128, True, False, 8, 8, at_once=32)
    return ScreenConfig(64, 128, 128, 64, False, False, 8, 6, at_once=64)


class Screened(NamedTuple):
    """What screened_sample returns.

    tokens, valid: as in Sample. found: int32 [B], tokens whose exact logits were computed; -1 in a
    row whose logits were all computed.
    """

    tokens: Tensor
    valid: Tensor
    found: Tensor


def screened_sample(
    hidden: Tensor,
    head: ScreenedHead,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    seed: Tensor,
    offset: Tensor | None = None,
    soft_cap: float | None = None,
    vocab_size: int | None = None,
    config: ScreenConfig | None = None,
) -> Screened:
    """The tokens of flash_sample(hidden, head.weight, noise="token"), at about half of the bytes.

    Arguments are those of flash_sample, with `head` from prepare_head or load_head in place of the
    weight. Log-probabilities are not offered: log Z would need all logits exactly, and the screen
    bounds it only. One sample per row.

    Three launches, which the host does not wait for, and nothing to clear between calls: all that
    is not an output is scratch memory of this call. On CPU tensors it runs in torch, or under
    TRITON_INTERPRET=1 the kernels (but not in bf16).

    Raises:
        InvalidType, InvalidArgument: as flash_sample.
    """
    hidden, weight = check.check_matrices(hidden, head.weight)
    B, device = hidden.shape[0], hidden.device
    if head.codes.shape != weight.shape or head.codes.device != device:
        raise InvalidArgument(
            f"head: expected codes of the weight's shape and device; got {list(head.codes.shape)} "
            f"on {head.codes.device}"
        )
    V = weight.shape[0]
    if vocab_size is not None:
        V = check.check_integer("vocab_size", vocab_size, 1, V)
    check.check_temperature(temperature, B, device)
    if bias is not None:
        check.check_bias(bias, B, V, device)
    if mask is not None:
        check.check_mask(mask, B, V, device)
    check.check_counter("seed", seed, B, device)
    if offset is not None:
        check.check_counter("offset", offset, B, device)
    if soft_cap is not None:
        soft_cap = check.check_number("soft_cap", soft_cap, positive=True)
    request = check.Request(
        hidden, weight, seed, offset, temperature, soft_cap, bias, mask, V, 1, "token"
    )
    out = Screened(
        torch.empty(B, dtype=torch.int64, device=device),
        torch.empty(B, dtype=torch.bool, device=device),
        torch.empty(B, dtype=torch.int32, device=device),
    )
    if device.type == "cuda" or _interpretable(hidden):
        _launch(request, head, config or default_config(B, device), out)
    else:
        _compute(request, head, out)
    return out


def _interpretable(hidden: Tensor) -> bool:
    try:
        import triton
    except ModuleNotFoundError:  # it exists for Linux only
        return False
    return triton.knobs.runtime.interpret and hidden.dtype != torch.bfloat16


def _compute(request: check.Request, head: ScreenedHead, out: Screened) -> None:
    """By torch: only the logits of candidates are computed, in fp32."""
    hidden, V = request.hidden, request.vocab_size
    B = hidden.shape[0]
    T = torch.as_tensor(request.temperature).float().reshape(-1, 1).expand(B, 1)
    T = torch.where(T < SMALLEST_TEMPERATURE, 0.0, T)
    step = torch.zeros(1, dtype=torch.int64) if request.offset is None else request.offset
    rows = torch.arange(B) * (request.seed.numel() == 1)
    head = ScreenedHead(*(part[:V] for part in head))
    allowed = None
    if request.mask is not None:
        allowed = reference.logits.unpacked(request.mask, V)
    z, bound = _screen.screen_logits(head, _screen.screen_hidden(hidden))
    lower, upper = _screen.score_bounds(
        z,
        bound,
        reference.token_noise(V, request.seed, step, rows),
        T,
        soft_cap=request.soft_cap,
        bias=request.bias,
        allowed=allowed,
    )
    chosen = _screen.candidates(lower, upper)
    # What no row may draw is left out; a row's other tokens count as forbidden.
    tokens = chosen.any(0).nonzero()[:, 0]
    logits = torch.full((B, V), -torch.inf)
    logits[:, tokens] = hidden.float() @ head.weight[tokens].float().T
    logits = reference.processed_logits(
        logits, soft_cap=request.soft_cap, bias=request.bias, mask=chosen
    )
    out.tokens.copy_(
        reference.expect(logits, request.seed, step, request.temperature, "token").tokens
    )
    out.valid.copy_(out.tokens >= 0)
    out.found.copy_(chosen.sum(1))


def _launch(
    request: check.Request, head: ScreenedHead, config: ScreenConfig, out: Screened
) -> None:
    import triton

    from fsbench.kernels import _choice, _screened_kernel
    from fsbench.kernels._device import launching_on, multiprocessors
    from fsbench.kernels._launch import (
        greedy,
        load_operands,
        matrix_operand,
        per_row,
        processing,
        vocab_programs,
    )

    hidden, weight, V = request.hidden, request.weight, request.vocab_size
    temperature, device = request.temperature, hidden.device
    B, D = hidden.shape
    blocks_b = triton.cdiv(B, config.block_b)
    programs_v = vocab_programs(blocks_b, V, config.block_v, device, config.ctas_per_sm)
    use_tma = _choice.tma_possible(head.codes)
    copy = matrix_operand(head.codes, config.block_v, config.block_d, use_tma)

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    codes = scratch(blocks_b * 2 * config.block_b, D, dtype=torch.int8)
    codes_operand = matrix_operand(codes, config.block_b, config.block_d, use_tma)
    numbers = scratch(3, B, dtype=torch.float32)
    lower, overflow, arrivals = scratch(B), scratch(B), scratch(1)
    keys = scratch(B, dtype=torch.int64)
    records = scratch(2, programs_v, B, config.room)
    listed, lists = scratch(B), scratch(2, B, config.row_room)
    resolvers = triton.cdiv(multiprocessors(device), B)  # for each row
    bias, row_bias, mask, mask_words = processing(request)
    options: dict[str, Any] = {
        "NOISE": "none" if greedy(request) else "token",
        **per_row(request),
        "LIST": config.row_room,
    }
    whole = _choice.default_config(B, D, device, weight.element_size(), "token")
    operands = load_operands(hidden, weight, V, whole)
    tiles = {name: value for name, value in operands.tiles.items() if name != "FLATTEN"}
    with launching_on(device):
        _screened_kernel.screen_hidden_kernel[(B,)](
            hidden,
            codes,
            numbers,
            lower,
            overflow,
            keys,
            listed,
            out.found,
            arrivals,
            B,
            D,
            _screen.accumulation_error(D),
            1 + (D + 4) * 2.0**-24,
            D**0.5,
            BLOCK_B=config.block_b,
            BLOCK_D=min(2048, triton.next_power_of_2(D)),
        )
        _screened_kernel.screen_kernel[(blocks_b * programs_v,)](
            codes_operand,
            copy,
            head.scale,
            head.residual,
            head.norm,
            numbers,
            request.seed,
            request.offset,
            temperature,
            request.soft_cap,
            bias,
            row_bias,
            mask,
            lower,
            overflow,
            records,
            listed,
            lists,
            B,
            V,
            D,
            mask_words,
            0,
            ROOM=config.room,
            BLOCK_B=config.block_b,
            BLOCK_V=config.block_v,
            BLOCK_D=config.block_d,
            SLICE=config.slice,
            V_ON_M=config.v_on_m,
            USE_TMA=use_tma,
            FLATTEN=config.flatten,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **options,
        )
        _screened_kernel.resolve_kernel[(B * resolvers,)](
            operands.hidden,
            operands.weight,
            hidden,
            weight,
            request.seed,
            request.offset,
            temperature,
            request.soft_cap,
            bias,
            row_bias,
            mask,
            lower,
            overflow,
            listed,
            lists,
            keys,
            out.found,
            arrivals,
            out.tokens,
            out.valid,
            B,
            V,
            D,
            mask_words,
            0,
            resolvers,
            AT_ONCE=config.at_once,
            ROWS=config.rows,
            STEP=config.step,
            SLICE=whole.slice,
            **options,
            **tiles,
        )
