"""The host side of the fused kernels: operands, workspace and launch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
from torch import Tensor

from fsbench.kernels.configs.choice import choose
from fsbench.kernels.configs.epilogue import Epilogue
from fsbench.kernels.configs.gpu import launching_on
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.device.quantized import PTX
from fsbench.kernels.device.stored_logits import StoredLogits, allocate, stride_for
from fsbench.kernels.device.team_mass import TEAM
from fsbench.kernels.fused import hopper
from fsbench.kernels.fused.portable import (
    TARGETS_AT_ONCE,
    flash_sampling_kernel,
    target_logits_kernel,
)
from fsbench.kernels.launch.launch_cache import Launch, cached, launch_kernel, launch_key
from fsbench.kernels.launch.operands import (
    Processing,
    load_operands,
    per_row,
    processing,
    scale_per_row,
    with_absent_rows,
)
from fsbench.kernels.launch.ranks import launch_ranks
from fsbench.kernels.launch.request import SAMPLES_AT_ONCE, Request, changes_logits, greedy
from fsbench.kernels.launch.result import Sample
from fsbench.kernels.launch.workspace import workspace

_REQUIRED = {
    *("hidden", "weight", "seed", "offset", "temperature", "vocab_size", "num_samples", "noise"),
    *("shard", "merge_later", "mask_words"),
}
"""Inputs that are not options: every launch has them, or the host code handles them."""


def launch(
    request: Request,
    kernel: str,
    config: TileConfig | HopperConfig | None,
    out: Sample,
    stored: StoredLogits | None = None,
    key: Hashable = None,
) -> Tensor | None:
    """Run one of the fused kernels on a request.

    Args:
        kernel, config: as `configs.choice.choose` takes them.
        stored: buffers to which the logits are written as well.
        key: the key of the launch cache; by default made of the request and these arguments.

    Returns:
        The masses of teams of programs (see `arrive_in_team`) if `out` has log-probabilities,
        logz or entropy; else None.
    """
    stride = 0 if stored is None else stored.logits.shape[1]
    if key is None:
        key = launch_key(request, out, kernel, config, stride)
    return cached(key, FusedLaunch, request, kernel, config, out, stride)(request, out, stored)


class FusedLaunch:
    """A launch for all requests of one key: the kernel and its constant arguments.

    One kernel launch draws up to SAMPLES_AT_ONCE samples, which share everything but their noise.
    """

    def __init__(
        self,
        request: Request,
        kernel: str,
        config: TileConfig | HopperConfig | None,
        out: Sample,
        stride: int,
    ):
        """Choose the kernel and bind its constant arguments.

        Args:
            request: a checked request.
            kernel, config: as `configs.choice.choose` takes them.
            out: the results; only which fields it has, and their shapes, are used.
            stride: the stride of the logits that the caller wants stored, or 0.
        """
        hidden, weight, shard = request.hidden, request.weight, request.shard
        self.device, self.samples, self.V = hidden.device, request.num_samples, request.vocab_size
        self.B, D = hidden.shape
        self.scores = request.noise == "target"
        # Ranks of drawn tokens and the largest logits are read from stored logits.
        self.ranks = out.top_tokens is not None or (out.rank is not None and not self.scores)
        stride = stride_for(self.V) if self.ranks else stride
        self.needs_masses = not (out.logprob is out.logz is out.entropy is out.top_tokens is None)
        if request.noise == "token" and self.samples > 1 and kernel == "auto" and config is None:
            kernel = "portable"  # the Hopper kernel was timed for one sample
        config = choose(
            hidden,
            weight,
            "none" if greedy(request) and not self.scores else request.noise,
            kernel,
            config,
            Epilogue(changes_logits(request), self.needs_masses, stride > 0),
        )
        tokens = self.V if shard is None else shard.num_tokens
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
        self.operands = operands
        logits = processing(request)
        fixed = {
            "stride": stride,
            "B": self.B,
            "V": self.V,
            "D": D,
            "mask_words": logits.mask_words,
            "samples": self.samples,
            "SCALE_PER_ROW": scale_per_row(request),
            "NOISE": "none" if greedy(request) and not self.scores else request.noise,
            "RANKS": ranks,
            "WATCH": self.device.type == "cuda",
            "first_token": 0 if shard is None else shard.first_token,
            "num_tokens": tokens,
            "rank": 0 if shard is None else shard.rank,
            "area": shard.slots if shard is not None and ranks > 1 else 0,
            **per_row(request),
            **operands.tiles,
        }
        self.first_samples = range(0, self.samples, SAMPLES_AT_ONCE)
        counts = {min(SAMPLES_AT_ONCE, self.samples - first) for first in self.first_samples}
        self.runs = {n: Launch(code, operands.grid, {**fixed, "N": n}) for n in counts}
        programs, blocks = operands.grid[0], config.blocks(self.B)
        self.teams = triton.cdiv(programs // blocks, TEAM.value)
        counters = _counters(config, blocks, programs)
        counters += blocks * self.teams if self.needs_masses else 0
        self.slots = max(self.B * max(counts), counters)
        # (name of the kernel's argument, name of the field), of what the requests of this key have.
        inputs: dict[str, Any] = {**request._asdict(), **logits._asdict()}
        self.inputs = _present({name: x for name, x in inputs.items() if name not in _REQUIRED})
        summed = ("logprob", "logz", "entropy", *(["rank"] if self.scores else []))
        self.results = _present({name: getattr(out, name) for name in summed})
        self.is_plain = not (stride or self.inputs or self.results) and shard is None
        self.fields = [None if x is None else (x.shape, x.dtype) for x in out]

    def empty_sample(self) -> Sample:
        """Allocate a Sample with the fields of this launch."""
        fields = [
            None if field is None else torch.empty(*field[0], dtype=field[1], device=self.device)
            for field in self.fields
        ]
        return Sample(*fields)  # type: ignore[arg-type]  # tokens and valid are never None

    def __call__(
        self, request: Request, out: Sample, stored: StoredLogits | None = None
    ) -> Tensor | None:
        """Launch for a request of the same key, checked or not; see `launch`."""
        operands = self.operands
        optional: dict[str, Any] = {}
        sums = None
        with launching_on(self.device):
            work = workspace(self.slots, self.device)
            if operands.handed:
                sums = torch.empty(operands.handed, dtype=torch.float32, device=self.device)
            if not self.is_plain:
                if self.ranks and stored is None:
                    stored = allocate(self.B, self.V, self.device, True)
                optional = self._optional_arguments(request, out, stored)
            masses = optional.get("team_masses_ptr")
            rows = with_absent_rows(request.hidden, request.noise, operands)
            hidden, weight = operands.load(rows, request.weight)
            for first_sample in self.first_samples:
                n = min(SAMPLES_AT_ONCE, self.samples - first_sample)
                self.runs[n](
                    {
                        "hidden": hidden,
                        "weight": weight,
                        "seed_ptr": request.seed,
                        "offset_ptr": request.offset,
                        "temperature": request.temperature,
                        "keys_ptr": work.keys,
                        "arrivals_ptr": work.arrivals,
                        "sums_ptr": sums,
                        "tokens_ptr": out.tokens,
                        "valid_ptr": out.valid,
                        "first_sample": first_sample,
                        **optional,
                    }
                )
            if self.ranks and stored is not None:
                launch_ranks(request, stored, masses, out._replace(logprob=None))
        return masses

    def _optional_arguments(
        self, request: Request, out: Sample, stored: StoredLogits | None
    ) -> dict[str, Any]:
        """Return the arguments of options that are not None, by the kernel's names."""
        logits = processing(request)
        programs, device = self.operands.programs_v, self.device
        arguments: dict[str, Any] = {
            argument: getattr(logits if name in Processing._fields else request, name)
            for argument, name in self.inputs
        }
        for argument, name in self.results:
            arguments[argument] = getattr(out, name)
        if self.scores and out.rank is not None:
            arguments["limits_ptr"] = _target_logits(request, logits, out.rank)
        if out.logprob is not None:
            shape = (programs, self.B, min(self.samples, SAMPLES_AT_ONCE))
            arguments["winners_ptr"] = torch.empty(*shape, dtype=torch.float32, device=device)
        if self.needs_masses:
            numbers = 3 if out.entropy is None else 5
            masses = torch.empty(numbers, programs, self.B, dtype=torch.int64, device=device)
            arguments["masses_ptr"] = masses
            arguments["team_masses_ptr"] = masses.new_empty(numbers, self.teams, self.B)
        if stored is not None:
            arguments |= {"logits_ptr": stored.logits, "largest_ptr": stored.largest}
        line = None if request.merge_later or request.shard is None else request.shard.line
        if line is not None:
            arguments |= {"buffers_ptr": line.buffers, "counts_ptr": line.counts}
        return arguments


def _present(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name of the kernel's argument, name) of each value that is not None.

    The argument of a tensor ends with _ptr.
    """
    return [
        (f"{name}_ptr" if isinstance(x, Tensor) else name, name)
        for name, x in values.items()
        if x is not None
    ]


def _counters(config: TileConfig | HopperConfig, blocks: int, programs: int) -> int:
    """Return how many counters a launch needs: one per block, and flags if blocks are split."""
    if isinstance(config, HopperConfig) and config.one_byte:
        return blocks + 2 * programs
    if isinstance(config, HopperConfig) and config.split:
        return blocks + programs
    return blocks


def _target_logits(request: Request, logits: Processing, rank: Tensor) -> Tensor:
    """Compute the targets' logits, fp32 [B, n], and set `rank` to 0."""
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
