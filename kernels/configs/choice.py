"""Choose the fused kernel and its tile shapes for given matrices."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.configs import hopper
from fsbench.kernels.configs.epilogue import DRAW, TILES_FOR, UNTIMED, Epilogue, Rows, TilesOfGpu
from fsbench.kernels.configs.gpu import is_hopper, multiprocessors, operations_per_byte
from fsbench.kernels.configs.hopper import BLOCK_TOKENS, MANY_ROWS, ONE_BYTE, ROWS, HopperConfig
from fsbench.kernels.configs.portable import BUCKETS, TileConfig
from fsbench.kernels.configs.tables import Row, row_for

WORTH_SPLITTING = 64_000_000
"""Idle bytes of the last round from which splitting blocks is faster; see idle_bytes.

An H200 reads them in 14 us. Five heads with 69 MB or more gain 1 to 7 us at every batch size; five
with 57 MB or less gain or lose up to 4 us (results/h200/split-20261128).
"""
NO_ADDRESS = (
    "hidden, weight: expected tensors with memory; got one without, as inside "
    "torch.vmap: give all rows as one hidden [B, D]"
)
_USUAL_ROWS = 64  # portable_rows without known clocks
_FEW_ROWS = 32  # up to which the portable kernel is faster with weights of one byte


@cache
def has_tma(device: torch.device) -> bool:
    """Return whether a device has TMA; the interpreter has it.

    Without TMA, Triton replaces descriptors by pointers, too late to load ahead of the matmul.
    """
    if device.type == "cpu":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def tma_possible(*matrices: Tensor) -> bool:
    """Return whether TMA can load all matrices: addresses and rows are multiples of 16 bytes.

    Raises:
        InvalidType: A matrix has no address.
    """
    try:
        aligned = all(
            (matrix.data_ptr() | matrix.shape[1] * matrix.element_size()) % 16 == 0
            for matrix in matrices
        )
    except RuntimeError as error:
        raise InvalidType(NO_ADDRESS) from error
    return aligned and has_tma(matrices[0].device)


@cache
def portable_rows(device: torch.device) -> int:
    """Return the largest batch for which the portable kernel is at least as fast as Hopper's.

    This is for batches that fill its tiles; see hopper_is_faster for others. Its epilogue hides
    behind the stream of the weight as long as the rows that it computes, a power of two, are at
    most half of those at which the matmul takes as long as the stream: one row is one operation per
    byte of a bf16 weight. That gives 64 on an H200 and 128 on an H100, as measured
    (docs/results/index.md).
    """
    balanced = operations_per_byte(device)
    if not balanced:
        return _USUAL_ROWS
    return max(rows for rows in BUCKETS if rows <= max(balanced / 2, BUCKETS[0]))


def hopper_is_faster(
    B: int, D: int, device: torch.device, element_bytes: int = 2, epilogue: Epilogue = DRAW
) -> bool:
    """Return whether the Hopper kernel is the faster one for B rows.

    With weights of one byte it is faster above 32 rows. With others it is faster above
    portable_rows, and at fewer rows that need tiles of portable_rows and do not fill them: the
    portable kernel loads and computes the absent rows, too (33 to 63 rows on an H200, 65 to 127 on
    an H100: results/h200/sweep-20261128, results/h100/sweep-20261128).

    With log-probabilities or stored logits it is the slower one at some rows (TILES_FOR).
    """
    if element_bytes == 1:
        return B > _FEW_ROWS
    if _portable_with(epilogue, B, D, device):
        return False
    most = portable_rows(device)
    return most < B or most // 2 < B < most


def _portable_with(epilogue: Epilogue, B: int, D: int, device: torch.device) -> Rows | None:
    """Return the rows at which this epilogue makes the portable kernel the faster one, or None."""
    unprocessed = epilogue._replace(processed=False)  # which is faster does not depend on it
    return _range_of(_tiles_of_gpu(device).portable.get(unprocessed, ()), B, D)


def _hopper_with_token_noise(B: int, D: int, device: torch.device) -> Rows | None:
    """Return the rows at which token noise makes the Hopper kernel the faster one, or None."""
    return _range_of(_tiles_of_gpu(device).token, B, D)


def _tiles_of_gpu(device: torch.device) -> TilesOfGpu:
    return TILES_FOR.get(portable_rows(device), UNTIMED)


def _range_of(ranges: tuple[Rows, ...], B: int, D: int) -> Rows | None:
    return next((x for x in ranges if x.first <= B <= x.last and x.least_d <= D), None)


def idle_bytes(D: int, V: int, device: torch.device) -> int:
    """Return the bytes of a 16-bit weight that idle programs could read in the last round."""
    programs, blocks = multiprocessors(device), -(-V // BLOCK_TOKENS)
    return -blocks % programs * BLOCK_TOKENS * D * 2


# Cached by the facts of a launch, so that its cost is one look-up.
@cache
def default_config(
    B: int, D: int, device: torch.device, element_bytes: int, noise: str = "group"
) -> TileConfig:
    """Return the portable kernel's tile shapes, fitted to the device's shared memory.

    Args:
        element_bytes: Bytes of a number of the weight.
    """
    if device.type == "cpu":
        return TileConfig(16, 256, 64, 128, False, False, 4, 1, 1)
    config: TileConfig = _row(_table(noise, element_bytes), B, D, device).config
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types lack a property
    limit = properties.shared_memory_per_block_optin // config.ctas_per_sm
    return config.fitted(limit - 1024, element_bytes)


@cache
def hopper_row(B: int, D: int, V: int, device: torch.device, epilogue: Epilogue = DRAW) -> Row:
    """Return the row of the Hopper kernel's tile shapes, before blocks are split.

    Beyond the last bucket, batches are cut into blocks of rows such that the busiest program has
    least work. With a bias or a mask, tiles of up to 192 rows are narrow, since wide tiles of three
    warpgroups spill, and those of two, up to 128 rows, are slower, too (by 6 % at 128 rows); larger
    batches are not cut.
    """
    row = _row("hopper", B, D, device)
    if epilogue.processed:
        return row._replace(config=row.config.narrowed()) if B <= 3 * ROWS else row
    config = _config_for(epilogue, B, D, device)
    if config:
        return row._replace(config=config, record=_tiles_of_gpu(device).record)
    if hopper.BUCKETS[-1] >= B:
        return row
    programs = multiprocessors(device)
    cut = min(row.config.cuts(), key=lambda config: config.busiest(B, V, programs))
    return row._replace(config=cut)


def _config_for(epilogue: Epilogue, B: int, D: int, device: torch.device) -> HopperConfig | None:
    """Return the config that is faster than that of plain calls with this epilogue, or None."""
    for tiles in _tiles_of_gpu(device).tiles.get(epilogue, ()):
        if tiles.first <= B <= tiles.last and tiles.max_d >= D:
            return tiles.config
    return None


def hopper_config(
    B: int, D: int, V: int, device: torch.device, epilogue: Epilogue = DRAW
) -> HopperConfig:
    """Return the config of hopper_row."""
    config: HopperConfig = hopper_row(B, D, V, device, epilogue).config
    return config


def blocks_are_split(B: int, D: int, V: int, device: torch.device, element_bytes: int = 2) -> bool:
    """Return whether programs of the Hopper kernel share blocks and are faster by it.

    See fused.hopper.split. With weights of one byte programs always share blocks, and are faster
    by it where those of 16-bit weights would be.
    """
    if B > ROWS or BLOCK_TOKENS * multiprocessors(device) >= V:  # at most a block for each program
        return False
    worth = idle_bytes(D, V, device) >= WORTH_SPLITTING
    return worth and (element_bytes == 1 or hopper_config(B, D, V, device).can_split)


def _hopper_wins(
    B: int, D: int, V: int, device: torch.device, element_bytes: int, epilogue: Epilogue = DRAW
) -> bool:
    """Return whether the Hopper kernel is the faster one, by splitting blocks or otherwise."""
    split = blocks_are_split(B, D, V, device, element_bytes)
    return split or hopper_is_faster(B, D, device, element_bytes, epilogue)


def _table(noise: str, element_bytes: int) -> str:
    if element_bytes == 1:
        return "portable-byte"
    return "portable-token" if noise == "token" else "portable"


def _row(table: str, B: int, D: int, device: torch.device) -> Row:
    """Return the row of a table for a GPU."""
    name = torch.cuda.get_device_properties(device).name
    return row_for(table, B, D, name, torch.cuda.get_device_capability(device))


def why_not_hopper(device: torch.device, by_tma: bool) -> str | None:
    """Return why the Hopper kernel cannot run on this device, or None.

    Args:
        by_tma: Whether TMA can load both matrices.
    """
    if not is_hopper(device):
        return "it needs a GPU of compute capability 9.0"
    if not by_tma:
        return "it loads by TMA: addresses and rows of multiples of 16 bytes"
    return None


def choose(
    hidden: Tensor,
    weight: Tensor,
    noise: str,
    kernel: str = "auto",
    config: TileConfig | HopperConfig | None = None,
    epilogue: Epilogue = DRAW,
) -> TileConfig | HopperConfig:
    """Return the config to launch with; its type decides the kernel.

    Args:
        kernel: "hopper", "portable" or "auto": the Hopper kernel where it can run and is the
            faster one (hopper_is_faster).
        config: A config of that kernel; with "auto" it decides the kernel.
        epilogue: The work of the launch besides drawing.

    Raises:
        InvalidArgument: The Hopper kernel is requested and cannot run, or fp8 on such a GPU.
    """
    by_tma = tma_possible(hidden, weight)
    if weight.dtype == torch.float8_e4m3fn and hidden.is_cuda:
        _check_fp8(hidden.device)
    facts = (*hidden.shape, len(weight), hidden.device, weight.element_size())
    return config_for(*facts, by_tma, noise, kernel, config, epilogue)


@cache
def _check_fp8(device: torch.device) -> None:
    """Refuse GPUs for which Triton has no conversion of e4m3."""
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < (8, 9):
        raise InvalidArgument(
            "weight: expected int8 on a GPU of compute capability "
            f"{capability[0]}.{capability[1]}; got float8_e4m3fn, which needs 8.9"
        )


@cache
def config_for(
    B: int,
    D: int,
    V: int,
    device: torch.device,
    element_bytes: int,
    by_tma: bool,
    noise: str,
    kernel: str,
    config: TileConfig | HopperConfig | None,
    epilogue: Epilogue = DRAW,
) -> TileConfig | HopperConfig:
    """Return the config of `choose` for the facts that it depends on."""
    reason = why_not_hopper(device, by_tma)
    if kernel == "hopper" and reason:
        raise InvalidArgument(f"kernel: expected auto or portable here; got hopper, but {reason}")
    use_hopper = kernel == "hopper" or isinstance(config, HopperConfig)
    if not use_hopper and not reason:
        if noise == "token":
            plain = epilogue == DRAW and element_bytes > 1
            use_hopper = plain and _hopper_with_token_noise(B, D, device) is not None
        else:
            use_hopper = _hopper_wins(B, D, V, device, element_bytes, epilogue)
    if isinstance(config, HopperConfig):
        _check_fits(config, B, element_bytes)
    if kernel == "portable" or reason or not use_hopper:
        return config or default_config(B, D, device, element_bytes, noise)
    if config is not None:
        return config
    if element_bytes == 1:
        return ONE_BYTE if B <= ROWS else MANY_ROWS
    config = hopper_config(B, D, V, device, epilogue)
    return replace(config, split=blocks_are_split(B, D, V, device))


def _check_fits(config: HopperConfig, B: int, element_bytes: int) -> None:
    """Raise InvalidArgument unless a kernel with this config takes B rows and such a weight."""
    if config.split and B > ROWS:
        raise InvalidArgument(f"config: expected at most {ROWS} rows with split; got {B}")
    if config.one_byte != (element_bytes == 1):
        raise InvalidArgument(
            f"config: expected one_byte={not config.one_byte} for this weight; got {config}"
        )
    if config.too_small(B):
        raise InvalidArgument(
            f"config: expected at most {ROWS} rows with {config.num_stages} stages; got {B}"
        )


def explanation(
    B: int,
    D: int,
    V: int,
    device: torch.device,
    element_bytes: int = 2,
    *,
    by_tma: bool,
    noise: str,
    kernel: str,
    config: TileConfig | HopperConfig | None,
    epilogue: Epilogue = DRAW,
) -> str:
    """Explain the choice of `config_for`: the rule, and the row of the tile shapes."""
    facts = (B, D, V, device, element_bytes)
    chosen = config_for(*facts, by_tma, noise, kernel, config, epilogue)
    name = "hopper" if isinstance(chosen, HopperConfig) else "portable"
    reason = why_not_hopper(device, by_tma)
    if kernel != "auto" or config is not None:
        rule = f"the {name} kernel, as requested"
    elif reason:
        rule = f"the portable kernel: the hopper kernel cannot run, {reason}"
    elif noise == "token" and (rows := _hopper_with_token_noise(B, D, device)) and name == "hopper":
        first, last = rows.first, rows.last
        rule = f"the hopper kernel: B = {B} is between {first} and {last}, with token noise"
    elif noise == "token" and _hopper_wins(B, D, V, device, element_bytes):
        rule = "the portable kernel: the hopper kernel is not chosen here with token noise"
    elif name == "hopper" and blocks_are_split(B, D, V, device, element_bytes):
        rule = (
            f"the hopper kernel: it splits blocks of {BLOCK_TOKENS} tokens, as programs could read "
            f"{idle_bytes(D, V, device) * element_bytes / 2e6:.0f} MB more in the last round"
        )
    else:
        most = _FEW_ROWS if element_bytes == 1 else portable_rows(device)
        reason = f"is above {most} rows" if most < B else f"is at most {most} rows"
        if most > B and hopper_is_faster(B, D, device, element_bytes):
            reason = f"is less than {most} rows, which the portable kernel would compute"
        rows = _portable_with(epilogue, B, D, device) if element_bytes > 1 else None
        if rows:
            reason = f"is between {rows.first} and {rows.last}, with {epilogue}"
        rule = f"the {name} kernel: B = {B} {reason}"
    if config is not None:
        return f"{rule}; tile shapes as given"
    if device.type == "cpu":
        return f"{rule}; tile shapes for the interpreter"
    if element_bytes == 1 and name == "hopper":
        return f"{rule}; the tile shapes for weights of one byte"
    if name == "hopper":
        row = hopper_row(B, D, V, device, epilogue)
        if row.config == _config_for(epilogue, B, D, device):
            return f"{rule}; the tile shapes for {epilogue} (record: {row.record})"
    else:
        row = _row(_table(noise, element_bytes), B, D, device)
    limit = "" if row.max_d == sys.maxsize else f", D <= {row.max_d}"
    cut = ""
    if name == "hopper" and hopper.BUCKETS[-1] < B:
        blocks, rows = row.config.blocks(B), row.config.block_b
        cut = f"{blocks} blocks of {rows} rows give the busiest program least work; "
    fitted = ", with fewer stages to fit the shared memory"
    if name == "hopper" or row.config == chosen:
        fitted = ""
    return (
        f"{rule}; {cut}tile shapes for B <= {row.bucket}{limit} on GPUs {row.gpu!r}{fitted} "
        f"(record: {row.record})"
    )
