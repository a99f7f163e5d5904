"""Host side of the fused kernels: operands, scratch memory, one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from fsbench.kernels.call.operands import (
    Operands,
    Processing,
    greedy,
    load_operands,
    per_row,
    processing,
    scale_per_row,
)
from fsbench.kernels.call.prepared import PreparedLaunch, kind_of, launch_kernel, prepared
from fsbench.kernels.call.request import SAMPLES_AT_ONCE, TENSORS, Request
from fsbench.kernels.call.result import Sample
from fsbench.kernels.call.standing import launch_standing
from fsbench.kernels.call.workspace import workspace
from fsbench.kernels.configs.gpu import launching_on, multiprocessors
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.device.quantised import PTX
from fsbench.kernels.device.stored_logits import StoredLogits, allocate
from fsbench.kernels.fused import hopper
from fsbench.kernels.fused.portable import flash_sampling_kernel
from fsbench.kernels.fused.targets import TARGETS_AT_ONCE, target_logits_kernel

_MOVING = (
    *("hidden", "weight", "seed_ptr", "offset_ptr", "temperature"),
    *("keys_ptr", "arrivals_ptr", "tokens_ptr", "valid_ptr", "first_sample"),
    *("logits_ptr", "largest_ptr"),
)
"""Arguments that move in plain draws, in this order."""


def launch(
    request: Request,
    config: TileConfig | HopperConfig,
    out: Sample,
    stored: StoredLogits | None = None,
) -> Tensor | None:
    """Run the kernel of a config on a request.

    One launch draws up to SAMPLES_AT_ONCE samples, which share everything but their noise.
    stored: where the logits are written, too. Ranks of drawn tokens, and the largest logits, are
    found in it afterwards, by a launch of its own.

    Returns the masses that its programs left (mass_of_programs), if log-probabilities, logz or
    entropy are asked for.
    """
    given = request.noise == "given"
    looked_at = out.top_tokens is not None or (out.rank is not None and not given)
    if looked_at and stored is None:
        stored = allocate(len(request.hidden), request.vocab_size, request.hidden.device, True)
    hidden, weight, samples = request.hidden, request.weight, request.num_samples
    B, device = hidden.shape[0], hidden.device
    at_once = min(samples, SAMPLES_AT_ONCE)
    logits = processing(request)
    stride = 0 if stored is None else stored.logits.shape[1]
    scale = {} if request.scale is None else {"scale_ptr": request.scale}
    line = None if request.shard is None or request.merge_later else request.shard.line
    kind = (
        config,
        (hidden.data_ptr() | weight.data_ptr()) % 16 == 0,  # else TMA cannot load them
        out.logprob is None,
        out.logz is None,
        out.entropy is None,
        out.top_tokens is None,
        stride,
        *kind_of(request),
    )
    with launching_on(device):
        work = workspace(max(B * at_once, _counters(B, config, device)), device)
        limits = _target_logits(request, logits, out.rank) if given else None
        for first_sample in range(0, samples, at_once):
            n = min(at_once, samples - first_sample)
            operands, run = prepared((n, *kind), _prepare, request, config, n, logits, stride)
            if first_sample == 0:
                loaded_hidden, loaded_weight = operands.load(hidden, weight)
                winners, masses = _partial_sums(operands.programs_v, B, at_once, out)
                handed = _handed_over(operands, device)
            run(
                hidden=loaded_hidden,
                weight=loaded_weight,
                seed_ptr=request.seed,
                offset_ptr=request.offset,
                temperature=request.temperature,
                soft_cap=request.soft_cap,
                bias_ptr=logits.bias,
                row_bias_ptr=logits.row_bias,
                mask_ptr=logits.mask,
                keys_ptr=work.keys,
                arrivals_ptr=work.arrivals,
                winners_ptr=winners,
                masses_ptr=masses,
                tokens_ptr=out.tokens,
                valid_ptr=out.valid,
                logprob_ptr=out.logprob,
                logz_ptr=out.logz,
                entropy_ptr=out.entropy,
                rank_ptr=None if limits is None else out.rank,
                limits_ptr=limits,
                logits_ptr=None if stored is None else stored.logits,
                largest_ptr=None if stored is None else stored.largest,
                buffers_ptr=None if line is None else line.buffers,
                counts_ptr=None if line is None else line.counts,
                first_sample=first_sample,
                **scale,
                **handed,
            )
        if looked_at and stored is not None:
            launch_standing(request, stored, masses, out._replace(logprob=None))
    return masses


def plain(
    request: Request, config: TileConfig | HopperConfig, stride: int = 0
) -> Callable[..., Sample]:
    """The launch of a request without options, for all that differ by addresses or by a float.

    It takes hidden, weight, seed, offset and temperature, and keeps none of the request's alive.
    stride: of the logits that are stored, too; where to is one more argument.
    """
    (B, _), device = request.hidden.shape, request.hidden.device
    operands, run = _prepare(request, config, 1, processing(request), stride)
    run.fixed = {**dict.fromkeys(run.kernel.arg_names), **run.fixed}  # None for what it has not

    known: Callable[[list[Any]], None] | None = None

    def again(
        hidden: Tensor,
        weight: Tensor,
        seed: Tensor,
        offset: Tensor | None,
        temperature: float | Tensor,
        stored: StoredLogits | tuple[None, None] = (None, None),
    ) -> Sample:
        nonlocal known
        tokens = torch.empty(B, dtype=torch.int64, device=device)
        valid = torch.empty(B, dtype=torch.bool, device=device)
        with launching_on(device):
            work = workspace(max(B, _counters(B, config, device)), device)
            sums = _handed_over(operands, device)
            given = (*operands.load(hidden, weight), seed, offset, temperature)
            own = (work.keys, work.arrivals, tokens, valid, 0, *stored, *sums.values())
            moving: tuple[Any, ...] = (*given, *own)
            if known is None:
                arguments = dict(zip((*_MOVING, *sums), moving, strict=True))
                run(**arguments)
                known = run.ready(**arguments)
            else:  # in what Triton compiles for, all calls of a kind are alike
                known([x.data_ptr() if type(x) in TENSORS else x for x in moving if x is not None])
        return Sample(tokens, valid)

    return again


def _counters(B: int, config: TileConfig | HopperConfig, device: torch.device) -> int:
    """Arrivals that a launch needs at least: one, and where blocks are split a flag a program."""
    if isinstance(config, HopperConfig) and config.one_byte:
        return triton.cdiv(B, config.block_b) + 2 * multiprocessors(device)
    if isinstance(config, HopperConfig) and config.split:
        return 1 + multiprocessors(device)
    return 1


def _handed_over(operands: Operands, device: torch.device) -> dict[str, Tensor]:
    """Memory for the sums that programs hand over, as an argument, where blocks are split."""
    if not operands.handed:
        return {}
    return {"sums_ptr": torch.empty(operands.handed, dtype=torch.float32, device=device)}


def _partial_sums(
    programs_v: int, B: int, samples: int, out: Sample
) -> tuple[Tensor | None, Tensor | None]:
    """What each program leaves for log-probabilities: its winners, and its masses; or None."""
    winners = masses = None
    if out.logprob is not None:
        winners = out.logprob.new_empty(programs_v, B, samples)
    if any(x is not None for x in (out.logprob, out.logz, out.entropy, out.top_tokens)):
        device, numbers = out.tokens.device, 3 if out.entropy is None else 5
        masses = torch.empty(numbers, programs_v, B, dtype=torch.int64, device=device)
    return winners, masses


def _target_logits(request: Request, logits: Processing, rank: Tensor | None) -> Tensor | None:
    """The targets' logits, fp32 [B, n], and 0 to count from in `rank`; None without it."""
    if rank is None:
        return None
    hidden, count = request.hidden, request.seed.numel()
    limits = torch.empty(*request.seed.shape, dtype=torch.float32, device=hidden.device)
    launch_kernel(
        target_logits_kernel,
        hidden.device,
        (triton.cdiv(count, TARGETS_AT_ONCE.value),),
        hidden_ptr=hidden,
        weight_ptr=request.weight,
        scale_ptr=request.scale,
        targets_ptr=request.seed,
        soft_cap=request.soft_cap,
        bias_ptr=logits.bias,
        row_bias_ptr=logits.row_bias,
        mask_ptr=logits.mask,
        limits_ptr=limits,
        rank_ptr=rank,
        count=count,
        V=request.vocab_size,
        D=hidden.shape[1],
        mask_words=logits.mask_words,
        samples=request.num_samples,
        SCALE_PER_ROW=scale_per_row(request),
        STEP=64,
        num_warps=4,
    )
    return limits


def _prepare(
    request: Request,
    config: TileConfig | HopperConfig,
    n: int,
    logits: Processing,
    stride: int,
) -> tuple[Operands, PreparedLaunch]:
    """The kernel of a config, with all that is alike in calls of one kind; n samples a launch.

    stride: of the logits that are stored, too; 0 if they are not.
    """
    hidden, shard = request.hidden, request.shard
    B, D = hidden.shape
    tokens = request.vocab_size if shard is None else shard.num_tokens
    ranks = 0 if request.merge_later else 1 if shard is None else shard.ranks
    kernel: Any
    if isinstance(config, HopperConfig):
        kernel = hopper.operands.hopper_kernel
        operands = hopper.operands.operands(hidden, request.weight, tokens, config)
    else:
        kernel = flash_sampling_kernel
        operands = load_operands(hidden, request.weight, tokens, config)
        operands.tiles["SLICE"] = config.slice
        if request.scale is not None and config.ctas_per_sm > 1 and PTX.value:
            operands.tiles["maxnreg"] = config.most_registers()
    fixed = {
        "stride": stride,
        "B": B,
        "V": request.vocab_size,
        "D": D,
        "mask_words": logits.mask_words,
        "samples": request.num_samples,
        "N": n,
        "scale_ptr": None,
        "SCALE_PER_ROW": scale_per_row(request),
        "NOISE": "none" if greedy(request) and request.noise != "given" else request.noise,
        "RANKS": ranks,
        "WATCH": hidden.device.type == "cuda",
        "first_token": 0 if shard is None else shard.first_token,
        "num_tokens": tokens,
        "rank": 0 if shard is None else shard.rank,
        "area": shard.slots if shard is not None and ranks > 1 else 0,
        **per_row(request),
        **operands.tiles,
    }
    return operands, PreparedLaunch(kernel, operands.grid, fixed)
