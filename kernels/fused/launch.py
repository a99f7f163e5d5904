"""Host side of the fused kernels: operands, scratch memory, one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fsbench.kernels.configs.choice import choose
from fsbench.kernels.configs.gpu import launching_on, multiprocessors
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.device.quantized import PTX
from fsbench.kernels.device.stored_logits import StoredLogits, allocate
from fsbench.kernels.fused import hopper
from fsbench.kernels.fused.portable import (
    TARGETS_AT_ONCE,
    flash_sampling_kernel,
    target_logits_kernel,
)
from fsbench.kernels.launch.launch_cache import Launch, cached, launch_kernel, launch_key
from fsbench.kernels.launch.operands import (
    Operands,
    Processing,
    greedy,
    load_operands,
    per_row,
    processing,
    scale_per_row,
)
from fsbench.kernels.launch.ranks import launch_ranks
from fsbench.kernels.launch.request import SAMPLES_AT_ONCE, Request, changes_logits
from fsbench.kernels.launch.result import Sample
from fsbench.kernels.launch.workspace import workspace


class _Prepared(NamedTuple):
    """What launches of one key have in common.

    operands: how the matrices are loaded. run: the kernel, with the arguments that stay.
    counters: arrivals that a launch needs at least. is_plain: no option is asked for that has an
    argument of its own, so all of these are None.
    """

    operands: Operands
    run: Launch
    counters: int
    is_plain: bool


def launch(
    request: Request,
    kernel: str,
    config: TileConfig | HopperConfig | None,
    out: Sample,
    stored: StoredLogits | None = None,
) -> Tensor | None:
    """Run one of the fused kernels on a request.

    One launch draws up to SAMPLES_AT_ONCE samples, which share everything but their noise.

    Args:
        kernel, config: as `configs.choice.choose` takes them.
        stored: where the logits are written, too. Ranks of drawn tokens, and the largest logits,
            are found in it afterwards, by a launch of its own.

    Returns the masses that its programs left (mass_of_programs), if log-probabilities, logz or
    entropy are asked for.
    """
    given = request.noise == "given"
    looked_at = out.top_tokens is not None or (out.rank is not None and not given)
    hidden, weight, samples = request.hidden, request.weight, request.num_samples
    B, device = hidden.shape[0], hidden.device
    if looked_at and stored is None:
        stored = allocate(B, request.vocab_size, device, True)
    at_once = min(samples, SAMPLES_AT_ONCE)
    logits = processing(request)
    stride = 0 if stored is None else stored.logits.shape[1]
    key = launch_key(request, out, kernel, config, stride)
    line = None if request.shard is None or request.merge_later else request.shard.line
    winners = masses = limits = sums = loaded_hidden = loaded_weight = None
    with launching_on(device):
        if given:
            limits = _target_logits(request, logits, out.rank)
        for first_sample in range(0, samples, at_once):
            n = min(at_once, samples - first_sample)
            operands, run, counters, is_plain = cached(
                (n, key), _prepare, request, kernel, config, n, logits, stride, out
            )
            if first_sample == 0:
                work = workspace(max(B * at_once, counters), device)
                loaded_hidden, loaded_weight = operands.load(hidden, weight)
                if not is_plain:
                    winners, masses = _partial_sums(operands.programs_v, B, at_once, out)
                if operands.handed:
                    sums = torch.empty(operands.handed, dtype=torch.float32, device=device)
            moving: dict[str, Any] = {
                "hidden": loaded_hidden,
                "weight": loaded_weight,
                "seed_ptr": request.seed,
                "offset_ptr": request.offset,
                "temperature": request.temperature,
                "keys_ptr": work.keys,
                "arrivals_ptr": work.arrivals,
                "sums_ptr": sums,
                "tokens_ptr": out.tokens,
                "valid_ptr": out.valid,
                "first_sample": first_sample,
            }
            if not is_plain:
                moving |= {
                    "scale_ptr": request.scale,
                    "soft_cap": request.soft_cap,
                    "bias_ptr": logits.bias,
                    "row_bias_ptr": logits.row_bias,
                    "mask_ptr": logits.mask,
                    "winners_ptr": winners,
                    "masses_ptr": masses,
                    "logprob_ptr": out.logprob,
                    "logz_ptr": out.logz,
                    "entropy_ptr": out.entropy,
                    "rank_ptr": None if limits is None else out.rank,
                    "limits_ptr": limits,
                    "logits_ptr": None if stored is None else stored.logits,
                    "largest_ptr": None if stored is None else stored.largest,
                    "buffers_ptr": None if line is None else line.buffers,
                    "counts_ptr": None if line is None else line.counts,
                }
            run(moving)
        if looked_at and stored is not None:
            launch_ranks(request, stored, masses, out._replace(logprob=None))
    return masses


def _counters(B: int, config: TileConfig | HopperConfig, device: torch.device) -> int:
    """Arrivals that a launch needs at least: one, and where blocks are split a flag a program."""
    if isinstance(config, HopperConfig) and config.one_byte:
        return triton.cdiv(B, config.block_b) + 2 * multiprocessors(device)
    if isinstance(config, HopperConfig) and config.split:
        return 1 + multiprocessors(device)
    return 1


def _partial_sums(
    programs_v: int, B: int, samples: int, out: Sample
) -> tuple[Tensor | None, Tensor | None]:
    """What each program leaves for log-probabilities: its winners, and its masses; or None."""
    winners = masses = None
    if out.logprob is not None:
        winners = out.logprob.new_empty(programs_v, B, samples)
    if not (out.logprob is out.logz is out.entropy is out.top_tokens is None):
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
    kernel: str,
    config: TileConfig | HopperConfig | None,
    n: int,
    logits: Processing,
    stride: int,
    out: Sample,
) -> _Prepared:
    """Choose a kernel and bring together all that is alike in launches of n samples and one key.

    stride: of the logits that are stored, too; 0 if they are not.
    """
    hidden, weight, shard = request.hidden, request.weight, request.shard
    config = choose(hidden, weight, request.noise, kernel, config, changes_logits(request))
    B, D = hidden.shape
    tokens = request.vocab_size if shard is None else shard.num_tokens
    ranks = 0 if request.merge_later else 1 if shard is None else shard.ranks
    code: Any
    if isinstance(config, HopperConfig):
        code = hopper.operands.hopper_kernel
        operands = hopper.operands.operands(hidden, weight, tokens, config)
    else:
        code = flash_sampling_kernel
        operands = load_operands(hidden, weight, tokens, config)
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
    counters = _counters(B, config, hidden.device)
    options = (request.scale, request.soft_cap, shard, *logits[:3], *out[2:])
    is_plain = stride == 0 and all(option is None for option in options)
    return _Prepared(operands, Launch(code, operands.grid, fixed), counters, is_plain)
