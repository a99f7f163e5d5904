"""What the samplers with kernels share as providers: their launches, and the full contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fsbench.problem import Problem
from fsbench.provider import Capabilities, Launch, Provider, QuantizedWeight, Shard

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
"""What flash_sample can do, with group noise."""


CANDIDATES_ONLY = Capabilities(
    noise="group",
    zero_temperature=True,
    fused=True,
    host_sync_free=True,
    batch_invariant=True,
)
"""Of a launch that leaves packed candidates for another step (MergedLater): no options."""


def public_head(weight: Any) -> Any:
    """A head as the public calls take it: of a QuantizedWeight a QuantizedHead, others as given."""
    from fsbench.kernels.launch.quantized import QuantizedHead

    if isinstance(weight, QuantizedWeight):
        return QuantizedHead(weight.weight, weight.scale)
    return weight


def empty_hidden(problem: Problem, device: torch.device) -> Tensor:
    """[B, D] of the problem's dtype."""
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return torch.empty(problem.B, problem.D, dtype=dtypes[problem.dtype], device=device)


def flash_sample(hidden: Tensor, weight: Any, **named: Any) -> Sample:
    """fsbench.kernels.flash_sample, loaded when it is called."""
    from fsbench.kernels.fused.api import flash_sample

    return flash_sample(hidden, public_head(weight), **named)


def accept(sampled: Tensor, drafts: Tensor) -> Verified:
    """fsbench.kernels.verify_drafts, loaded when it is called."""
    from fsbench.kernels.fused.drafts import verify_drafts

    return verify_drafts(sampled, drafts)


def noise_map(codes: Tensor) -> tuple[Tensor, Tensor]:
    """See Provider: the map of kernels/noise, which all of these samplers use."""
    from fsbench.kernels.noise.map import noise_map

    return noise_map(codes)


def vocab_shard(shard: Shard) -> VocabShard:
    """A rank's rows as flash_sample takes them."""
    from fsbench.kernels.shard.vocab_shard import VocabShard

    return VocabShard(shard.weight, shard.group)


def matrix(weight: Tensor | VocabShard | QuantizedHead) -> Tensor:
    """The rows themselves: of a whole weight, of a shard, or of a quantized head its numbers."""
    import torch

    return weight if isinstance(weight, torch.Tensor) else weight.weight


class WorkspaceLaunch:
    """See Launch: one whose kernel needs a workspace. A subclass defines the call.

    The kernel is compiled, or loaded from Triton's cache, at the first call.
    """

    def __init__(self, problem: Problem, weight: Tensor):
        self._weight = weight
        self._temperature = problem.temperature

    @property
    def shared_bytes(self) -> int:
        """Memory that outlives a launch and serves all of them: the workspaces."""
        from fsbench.kernels.launch.workspace import held_bytes

        return held_bytes(self._weight.device)


class CallLaunch(WorkspaceLaunch):
    """A public call with fixed options, at the problem's temperature unless the options have one.

    call: (hidden, head, *, temperature, seed, offset, ...) -> a result with tokens, [B] or [B, n];
        of several samples the first is returned. seed and offset are those of the step unless the
        options have them.
    """

    def __init__(self, call: Callable[..., Any], problem: Problem, head: Any, **options: Any):
        super().__init__(problem, matrix(head))
        self._call, self._head = call, head
        self._options = {"temperature": problem.temperature, **options}

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        step = {"seed": seed, "offset": offset, **self._options}
        tokens: Tensor = self._call(hidden, self._head, **step).tokens
        return tokens if tokens.ndim == 1 else tokens[:, 0]


class FlashSampling(WorkspaceLaunch):
    """flash_sample with a form of noise and a kernel, at the problem's temperature or another.

    config: of the kernel, in place of the one that is looked up.
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

        self._head = public_head(weight)
        super().__init__(problem, matrix(self._head))
        if temperature is not None:
            self._temperature = temperature
        self._noise = noise
        self._kernel = kernel
        self._config = config
        hidden = empty_hidden(problem, self._weight.device)
        head = self._weight if problem.tp > 1 else self._head
        self.config = describe(hidden, head, noise=noise, kernel=kernel, config=config)

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return flash_sample(
            hidden,
            self._head,
            temperature=self._temperature,
            seed=seed,
            offset=offset,
            noise=self._noise,
            kernel=self._kernel,
            config=self._config,
        ).tokens


def build_sharded(problem: Problem, shard: Shard, **options: Any) -> FlashSampling:
    """See Provider: FlashSampling with these options, on a rank's rows."""
    return FlashSampling(problem, vocab_shard(shard), **options)


def matmul_form(problem: Problem, weight: Tensor, noise: str = "group") -> Launch:
    """See Provider."""
    from fsbench.kernels.providing.matmul_form import build_matmul_form

    return build_matmul_form(problem, weight, noise)


class MergedLater(WorkspaceLaunch):
    """flash_sample's kernel, which leaves packed candidates [B], and a step that makes tokens.

    merge: int64 [B], this rank's packed candidates -> int64 [B], tokens.
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
    """int64 [B] packed candidates -> int64 [B] tokens."""
    from fsbench.kernels.shard.merge_keys import merge_keys

    return merge_keys(keys[None])


def variant(
    provider: Provider,
    name: str,
    label: str,
    build: Callable[[Problem, Any], Launch],
    supports: Callable[[Problem], str | None],
) -> Provider:
    """Return a sampler like `provider` with another build, for a file of cases.

    It is in no preset, has no public call, and runs on one GPU.
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
