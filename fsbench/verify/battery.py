"""Which checks a sampler faces, and with how many draws, by tier and device.

The tiers: `gate`, what `fsbench run` asks before it times (seconds); `ci`, every check within two
minutes for all samplers that run on a CPU; `full`, with the draws that a claim of exactness needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch import Tensor

from fsbench.errors import (
    ProviderUnavailable,
    UnsupportedProblem,
    describe,
    is_out_of_memory,
    unknown_name,
)
from fsbench.provider import Capabilities, Kind, Provider
from fsbench.verify import (
    call,
    distribution,
    invariance,
    joint,
    noise,
    pathwise,
    support,
    truncation,
)
from fsbench.verify.check import Check, Setting
from fsbench.verify.drawing import Draws
from fsbench.verify.pathwise import SHAPES, Shapes

_SIZES_B = (1, 3, 16, 17, 64, 65, 256, 300)
_SIZES_V = (1, 2, 127, 128, 129, 1000, 50257, 151936)
_COSTS = ("group", "token", "stored", "chunks")


@dataclass(frozen=True)
class Effort:
    """How much each check does.

    vocabulary: V of the large problem. fit_draws: draws of `fit`, also for `rows` and `steps`: of
        at least 256 launches. block_draws: of `blocks`.
    seeds, seed_draws: of `fit of seeds`, draws each.
    variation_draws: of `variation`, by what a draw costs (`cost`).
    gaps, tail_tokens: of `tail`, random numbers spent on each gap.
    joint_steps, other_steps: launches of 256 equal rows, of the seed and of each other seed.
    call_steps: launches of `call`. filtered, filter_steps: (B, V) of `filters`, launches of each
        filter. codes: of `noise map`. maxima: rows of `maximum`.
    truncated_draws: of each law of `truncation`, and of `truncated draws`.
    shapes: of `oracle`, `greedy` and `edges`. sizes: batches of `invariance`.
    any_shapes, any_sizes: the same for samplers with noise of their own, which may take seconds to
        compile for each.
    """

    vocabulary: int
    fit_draws: int
    block_draws: int
    seeds: int
    seed_draws: int
    variation_draws: dict[str, int]
    gaps: tuple[float, ...]
    tail_tokens: int
    joint_steps: int
    other_steps: int
    call_steps: int
    filtered: tuple[int, int]
    filter_steps: int
    truncated_draws: int
    codes: int
    maxima: dict[str, int]
    shapes: Shapes
    sizes: tuple[int, ...]
    any_shapes: Shapes
    any_sizes: tuple[int, ...]


_CPU_CI = Effort(
    vocabulary=9001,  # a part of a tile at the end, and more than one chunk of the online samplers
    fit_draws=300 * 264,
    block_draws=2**15,
    seeds=8,
    seed_draws=2**13,
    variation_draws=dict.fromkeys(_COSTS, 2**13),
    gaps=(10, 12),
    tail_tokens=2**25,
    joint_steps=48,
    other_steps=12,
    call_steps=32,
    filtered=(256, 300),
    filter_steps=54,
    truncated_draws=2**12,
    codes=2**18,
    maxima={"token": 2**9, "group": 2**12},
    shapes=(*SHAPES, (64, 128), (300, 2)),
    sizes=(1, 2, 16, 17, 65, 257),
    any_shapes=((1, 1000), (3, 1), (16, 129), (17, 2)),
    any_sizes=(1, 17, 64),
)
_CPU_FULL = Effort(
    vocabulary=151_936,
    fit_draws=2**20,
    block_draws=2**25,
    seeds=64,
    seed_draws=2**16,
    variation_draws=dict.fromkeys(_COSTS, 2**15),
    gaps=(16, 18, 20),
    tail_tokens=2**31,
    joint_steps=64,
    other_steps=16,
    call_steps=256,
    filtered=(256, 300),
    filter_steps=256,
    truncated_draws=2**16,
    codes=2**22,
    maxima={"token": 2**10, "group": 2**14},
    shapes=(*SHAPES, *zip(_SIZES_B, reversed(_SIZES_V), strict=True)),
    sizes=(1, 2, 3, 15, 16, 17, 33, 64, 65, 129, 255, 256, 257),
    any_shapes=tuple(zip(_SIZES_B, reversed(_SIZES_V), strict=True)),
    any_sizes=(1, 17, 64, 256),
)
_CUDA_FULL = Effort(
    vocabulary=151_936,
    fit_draws=2**20,
    block_draws=2**27,
    seeds=64,
    seed_draws=2**18,
    # What half a minute to a minute buys. 25 million bound the total variation by 0.002.
    variation_draws={
        "group": 10**8,
        "token": 25 * 10**6,
        "stored": 25 * 10**6,
        "chunks": 2**21,
    },
    gaps=(16, 18, 20),
    tail_tokens=2**36,
    joint_steps=4096,
    other_steps=1024,
    call_steps=1024,
    filtered=(256, 151_936),
    filter_steps=1024,
    truncated_draws=2**20,
    codes=2**32,
    maxima={"token": 2**14, "group": 2**16},
    shapes=tuple((B, V) for B in _SIZES_B for V in _SIZES_V),
    sizes=tuple(range(1, 258)),
    any_shapes=tuple(zip(_SIZES_B, reversed(_SIZES_V), strict=True)),
    any_sizes=(1, 17, 64, 256),
)
_CUDA_CI = replace(
    _CUDA_FULL,
    block_draws=2**25,
    seeds=8,
    variation_draws={"group": 2**24, "token": 2**21, "stored": 2**21, "chunks": 2**19},
    tail_tokens=2**34,
    joint_steps=512,
    other_steps=128,
    call_steps=128,
    filter_steps=128,
    truncated_draws=2**16,
    codes=2**26,
    maxima={"token": 2**11, "group": 2**14},
    shapes=(*SHAPES, *zip(_SIZES_B, reversed(_SIZES_V), strict=True)),
    sizes=(1, 2, 16, 17, 65, 257),
    any_shapes=_CPU_CI.any_shapes,
    any_sizes=_CPU_CI.any_sizes,
)
EFFORTS = {
    ("ci", "cpu"): _CPU_CI,
    ("ci", "cuda"): _CUDA_CI,
    ("full", "cpu"): _CPU_FULL,
    ("full", "cuda"): _CUDA_FULL,
}
TIERS = ("gate", "ci", "full")
GATE_DRAWS = {"cuda": 2**20, "cpu": 2**16}
"""Draws of the gate's goodness-of-fit test by device type: a few seconds on either."""
GATE_TRUNCATED_DRAWS = {"cuda": 2**16, "cpu": 2**12}
"""Draws of each law of the gate's test of filters."""

CHECKS = (
    *("philox", "noise map", "maximum", "oracle", "undefined rows", "greedy", "edges", "filters"),
    *("call", "invariance", "fit", "fit of seeds", "blocks", "tiles", "collisions", "rows"),
    *("steps", "seeds", "samples", "tail", "variation", "truncated oracle", "truncation"),
    "truncated draws",
)
"""Every check by name; there is a `tail` for each gap."""

Todo = Iterator[tuple[str, Callable[[], Check]]]


def verify(
    provider: Provider, setting: Setting, tier: str = "gate", only: Collection[str] = ()
) -> Iterator[Check]:
    """The checks that apply to a provider, run one by one as they are asked for.

    Args:
        tier: one of TIERS.
        only: names of CHECKS to run, `tail 18` for one gap; empty means all.

    An exception in a check is a failed check: a sampler that crashes is not verified. Three say
    nothing about the sampler and are raised: UnsupportedProblem (it cannot do what the checks
    ask), ProviderUnavailable and lack of memory.
    """
    require_names("--tier", [tier], TIERS)
    require_names("--check", only, CHECKS)
    todo = _gate(provider, setting) if tier == "gate" else _Battery(provider, setting, tier).todo()
    for name, check in todo:
        if only and name not in only and not (name.startswith("tail") and "tail" in only):
            continue
        try:
            yield check()
        except (UnsupportedProblem, ProviderUnavailable):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            yield Check(name, False, describe(error))


def require_names(option: str, given: Collection[str], known: Collection[str] = CHECKS) -> None:
    """Raise InvalidArgument unless all are known; what is near to a wrong one is named."""
    for name in given:
        if name not in known and not name.startswith("tail "):
            raise unknown_name(option, name, known)


def takes_greedy(provider: Provider) -> bool:
    """Whether the provider can be asked for the argmax."""
    able = provider.capabilities
    return provider.kind is Kind.GREEDY or (draws(provider) and able.zero_temperature)


def draws(provider: Provider) -> bool:
    """Whether the provider draws tokens: without filters, from the softmax."""
    return provider.kind in (Kind.EXACT, Kind.TRUNCATED)


def cost(able: Capabilities) -> str:
    """What a draw costs: noise for groups of tokens or for each; else stored logits, or chunks.

    Without noise of the contract, only a loop over chunks of the vocabulary keeps no logits: many
    small launches.
    """
    return able.noise or ("chunks" if able.fused else "stored")


def _gate(provider: Provider, setting: Setting) -> Todo:
    if provider.capabilities.noise is not None:
        yield "oracle", lambda: pathwise.check_oracle(provider, setting)
        yield "undefined rows", lambda: pathwise.check_undefined_rows(provider, setting)
    if takes_greedy(provider):
        yield "greedy", lambda: support.check_greedy(provider, setting)
    if draws(provider):
        yield "fit", lambda: _gate_fit(provider, setting)
    if provider.capabilities.filters and setting.truncated:
        wanted = GATE_TRUNCATED_DRAWS[setting.device]
        yield from _truncated(provider, setting, pathwise.SHAPES, truncation.GATE, wanted)


def _truncated(
    provider: Provider,
    setting: Setting,
    shapes: Shapes,
    cases: Sequence[truncation.Filters],
    wanted: int,
) -> Todo:
    """The checks of a sampler that has filters."""
    if provider.capabilities.noise is not None:
        yield (
            "truncated oracle",
            lambda: truncation.check_truncated_oracle(provider, setting, shapes),
        )
    yield "truncation", lambda: truncation.check_truncation(provider, setting, cases, wanted)


def _gate_fit(provider: Provider, setting: Setting) -> Check:
    draws = distribution.small_draws(provider, setting)
    tokens = distribution.fit_tokens(draws, GATE_DRAWS[setting.device])
    return distribution.check_fit(draws, tokens)


class _Battery:
    """The checks of one provider, and the draws that several of them share, made when needed."""

    def __init__(self, provider: Provider, setting: Setting, tier: str):
        self.provider, self.setting = provider, setting
        # A step that the host takes part in costs what it costs on a CPU.
        device = setting.device if provider.capabilities.graph_safe else "cpu"
        self.effort = EFFORTS[tier, device]

    @cached_property
    def small(self) -> Draws:
        return distribution.small_draws(self.provider, self.setting)

    @cached_property
    def tokens(self) -> Tensor:
        return distribution.fit_tokens(self.small, self.effort.fit_draws)

    @cached_property
    def large(self) -> Draws:
        V, gaps = self.effort.vocabulary, self.effort.gaps
        return distribution.large_draws(self.provider, self.setting, V, gaps)

    @cached_property
    def flat(self) -> Tensor:
        return joint.flat_tokens(self.large, self.effort.joint_steps)

    def todo(self) -> Todo:
        """Cheap and sharp checks first."""
        provider, setting, effort = self.provider, self.setting, self.effort
        able, form = provider.capabilities, provider.capabilities.noise
        shapes, sizes = (effort.any_shapes, effort.any_sizes)
        if form is not None:
            shapes, sizes = effort.shapes, effort.sizes
            V, rows = effort.vocabulary, effort.maxima[form]
            yield "philox", lambda: noise.check_philox(setting.device)
            if provider.noise_map is not None:
                yield "noise map", lambda: noise.check_noise_map(provider, setting, effort.codes)
            yield "maximum", lambda: noise.check_maximum(setting, form, V, rows)
            yield "oracle", lambda: pathwise.check_oracle(provider, setting, shapes)
            yield "undefined rows", lambda: pathwise.check_undefined_rows(provider, setting)
        if takes_greedy(provider):
            yield "greedy", lambda: support.check_greedy(provider, setting, shapes)
        if provider.kind is not Kind.LOWER_BOUND:
            yield "edges", lambda: support.check_edges(provider, setting, shapes)
            if able.mask or able.bias:
                yield (
                    "filters",
                    lambda: call.check_filters(
                        provider, setting, effort.filtered, effort.filter_steps
                    ),
                )
            asked = able.per_row_temperature or able.per_request_seed or able.logprob
            if draws(provider) and asked:
                yield "call", lambda: call.check_call(provider, setting, effort.call_steps)
            if able.batch_invariant:
                yield "invariance", lambda: invariance.check_invariance(provider, setting, sizes)
        if draws(provider):
            yield from self._drawn()
        if able.filters:
            wanted = effort.truncated_draws
            yield from _truncated(provider, setting, shapes, truncation.CASES, wanted)
            yield (
                "truncated draws",
                lambda: truncation.check_truncated_draws(provider, setting, wanted),
            )

    def _drawn(self) -> Todo:
        effort, able = self.effort, self.provider.capabilities
        seeds, seed_draws = effort.seeds, effort.seed_draws
        yield "fit", lambda: distribution.check_fit(self.small, self.tokens)
        yield (
            "fit of seeds",
            lambda: distribution.check_fit_of_seeds(self.small, seeds, seed_draws),
        )
        yield "blocks", lambda: distribution.check_blocks(self.small, effort.block_draws)
        yield "tiles", lambda: joint.check_tiles(self.large, self.flat)
        yield "collisions", lambda: joint.check_collisions(self.large, self.flat)
        yield "rows", lambda: joint.check_rows(self.large, self.flat, self.small, self.tokens)
        yield "steps", lambda: joint.check_steps(self.large, self.flat, self.small, self.tokens)
        steps = effort.other_steps
        yield "seeds", lambda: joint.check_seeds(self.large, self.flat, self.small, steps)
        if able.num_samples:
            yield "samples", lambda: joint.check_samples(self.provider, self.large, steps)
        for gap in effort.gaps:
            yield f"tail {gap:g}", partial(self._tail, gap)
        wanted = effort.variation_draws[cost(able)]
        yield "variation", lambda: distribution.check_variation(self.large, wanted)

    def _tail(self, gap: float) -> Check:
        return distribution.check_tail(self.large, gap, self.effort.tail_tokens)
