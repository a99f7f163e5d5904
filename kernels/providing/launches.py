"""Launches and capabilities of the samplers with kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fsbench.problem import QUANTIZED, Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, QuantizedWeight, Shard

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fsbench.kernels.configs.hopper import HopperConfig
    from fsbench.kernels.configs.portable import TileConfig
    from fsbench.kernels.fused.drafts import Verified
    from fsbench.kernels.launch.quantized import QuantizedHead
    from fsbench.kernels.launch.result import Sample
    from fsbench.kernels.shard.vocab_shard import VocabShard

FULL_CONTRACT = Capabilities(
    noise="group",
    zero_temperature=True,
    fused=True,
    host_sync_free=True,
    batch_invariant=True,
    per_row_temperature=True,
    greedy_rows=True,
    bias=True,
    mask=True,
    per_request_seed=True,
    logprob=True,
    entropy=True,
    rank=True,
    top=True,
    num_samples=True,
)
"""Capabilities of flash_sample with group noise."""

CANDIDATES_ONLY = Capabilities(
    noise="group",
    zero_temperature=True,
    fused=True,
    host_sync_free=True,
    batch_invariant=True,
)
"""Capabilities of a launch that leaves packed candidates for another step (MergedLater)."""


def public_head(weight: Any) -> Any:
    """Return a head as the public calls take it: a QuantizedHead for a QuantizedWeight."""
    from fsbench.kernels.launch.quantized import QuantizedHead

    if isinstance(weight, QuantizedWeight):
        return QuantizedHead(weight.weight, weight.scale)
    return weight


def empty_hidden(problem: Problem, device: torch.device) -> Tensor:
    """Return hidden [B, D] of the problem's dtype, without values."""
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return torch.empty(problem.B, problem.D, dtype=dtypes[problem.dtype], device=device)


def flash_sample(hidden: Tensor, weight: Any, **options: Any) -> Sample:
    """Import fsbench.kernels.flash_sample and call it."""
    from fsbench.kernels.fused.api import flash_sample

    return flash_sample(hidden, public_head(weight), **options)


def accept(sampled: Tensor, drafts: Tensor) -> Verified:
    """Import fsbench.kernels.verify_drafts and call it."""
    from fsbench.kernels.fused.drafts import verify_drafts

    return verify_drafts(sampled, drafts)


def noise_map(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Map Philox codes to noise, as all samplers with kernels do (Provider.noise_map)."""
    from fsbench.kernels.noise.map import noise_map

    return noise_map(codes)


def vocab_shard(shard: Shard) -> VocabShard:
    """Return the VocabShard of a rank's rows."""
    from fsbench.kernels.shard.vocab_shard import VocabShard

    return VocabShard(shard.weight, shard.group)


def matrix(weight: Tensor | VocabShard | QuantizedHead) -> Tensor:
    """Return the matrix of a head: a weight, the rows of a shard, or the numbers of a head."""
    import torch

    return weight if isinstance(weight, torch.Tensor) else weight.weight


class WorkspaceLaunch:
    """A Launch whose kernel needs a workspace. A subclass defines the call.

    The first call compiles the kernel, or loads it from Triton's cache.
    """

    def __init__(self, problem: Problem, weight: Tensor):
        self._weight = weight
        self._temperature = problem.temperature

    @property
    def shared_bytes(self) -> int:
        """Bytes of the workspaces, which all launches share."""
        from fsbench.kernels.launch.workspace import held_bytes

        return held_bytes(self._weight.device)


class CallLaunch(WorkspaceLaunch):
    """A public call with fixed options, at the problem's temperature unless the options have one.

    Args:
        call: Called as call(hidden, head, temperature=, seed=, offset=, **options); seed and offset
            are those of the step unless the options have them. Its result has tokens, [B] or
            [B, n]; the launch returns the first of several samples.
    """

    def __init__(self, call: Callable[..., Any], problem: Problem, head: Any, **options: Any):
        super().__init__(problem, matrix(head))
        self._call, self._head = call, head
        self._options = {"temperature": problem.temperature, **options}

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        step = {"seed": seed, "offset": offset, **self._options}
        tokens: Tensor = self._call(hidden, self._head, **step).tokens
        return tokens if tokens.ndim == 1 else tokens[:, 0]


class FlashSampling(CallLaunch):
    """flash_sample with a form of noise and a kernel.

    Args:
        temperature: None for the problem's.
        config: Tile shapes of the kernel; None for the default.
    """

    def __init__(
        self,
        problem: Problem,
        weight: Tensor | VocabShard | QuantizedWeight,
        noise: str = "auto",
        kernel: str = "auto",
        temperature: float | None = None,
        config: TileConfig | HopperConfig | None = None,
    ):
        from fsbench.kernels.fused.api import describe

        T = problem.temperature if temperature is None else temperature
        options: dict[str, Any] = {"noise": noise, "kernel": kernel, "config": config}
        super().__init__(flash_sample, problem, public_head(weight), temperature=T, **options)
        head = self._weight if problem.tp > 1 else self._head
        self.config = describe(empty_hidden(problem, self._weight.device), head, **options)


def build_sharded(problem: Problem, shard: Shard, **options: Any) -> FlashSampling:
    """Build FlashSampling with these options on a rank's rows (Provider.build_sharded)."""
    return FlashSampling(problem, vocab_shard(shard), **options)


def flash_sampler(name: str, label: str, kernel: str) -> Provider:
    """Return the sampler that is flash_sample with this kernel, on one GPU and on several."""
    return Provider(
        name=name,
        label=label,
        kind=Kind.EXACT,
        requires=("triton",),
        noise_map=noise_map,
        capabilities=replace(FULL_CONTRACT, quantized=QUANTIZED),
        build=partial(FlashSampling, kernel=kernel),
        build_sharded=partial(build_sharded, kernel=kernel),
        sample=partial(flash_sample, kernel=kernel),
        accept=accept,
        call="flash_sample",
        presets=("paper", "quick", "lean", "tp"),
    )


def matmul_form(problem: Problem, weight: Tensor, noise: str = "group") -> Launch:
    """Build the portable kernel without sampling (Provider.matmul_form)."""
    from fsbench.kernels.providing.matmul_form import build_matmul_form

    return build_matmul_form(problem, weight, noise)


class MergedLater(WorkspaceLaunch):
    """The kernel of flash_sample, which leaves packed candidates, then a step that decodes them.

    Args:
        merge: Maps this rank's packed candidates, int64 [B], to tokens, int64 [B].
    """

    def __init__(
        self, problem: Problem, head: Tensor | VocabShard, merge: Callable[[Tensor], Tensor]
    ):
        super().__init__(problem, matrix(head))
        self._head = head
        self._merge = merge

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        from fsbench.kernels.fused.api import local_draw

        drawn = local_draw(hidden, self._head, seed, offset, self._temperature)
        return self._merge(drawn.tokens)


def decode(keys: Tensor) -> Tensor:
    """Return the tokens, int64 [B], of packed candidates, int64 [B]."""
    from fsbench.kernels.shard.merge_keys import merge_keys

    return merge_keys(keys[None])


def variant(
    provider: Provider,
    name: str,
    label: str,
    build: Callable[[Problem, Any], Launch],
    supports: Callable[[Problem], str | None],
) -> Provider:
    """Return a copy of `provider` with another build, for a file of cases.

    The copy is in no preset, has no public call, and runs on one GPU.
    """
    return replace(
        provider,
        name=name,
        label=label,
        build=build,
        supports=supports,
        build_sharded=None,
        presets=(),
        call="",
        tuning=None,
        matmul_form=None,
    )
