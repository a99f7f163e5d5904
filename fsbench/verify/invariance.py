"""What a token must not depend on: bitwise equality of calls that should agree.

All logits are exact, so two matmuls of another order cannot disagree about them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fsbench.graphs import capture
from fsbench.problem import Problem
from fsbench.provider import Provider
from fsbench.verify.check import Check, Setting
from fsbench.verify.drawing import (
    exact_head,
    launched_tokens,
    random_logits,
    require_form,
    require_support,
    scalar,
)

_WHOLE = 300  # rows of the batch that all others are compared with
_FILTERS: dict[str, Any] = {"top_k": 20, "top_p": 0.9, "min_p": 0.02}
_VOCABULARY = 5003
_SHARDS = (0, 1280, 2560, 3840, _VOCABULARY)  # multiples of 128: no group of tokens is divided


class _Differs(Exception):
    """Two calls that should agree do not; says which."""


def check_invariance(provider: Provider, setting: Setting, sizes: Sequence[int]) -> Check:
    """Tokens of a row are the same in batches of other sizes, other neighbours, graph or eager.

    Of what is claimed, also: a request that moves with its seed to another row of another batch;
    neighbours with filters, a mask or a temperature of their own; a shard of the vocabulary alone,
    where the winner is in it.
    """
    able = provider.capabilities
    T = setting.sampled_temperature
    problem = setting.problem(_WHOLE, _VOCABULARY, T)
    require_support(provider, problem)
    hidden, weight, _ = exact_head(problem, min(T, 1e3) * random_logits(problem, 3))
    compared = 0
    try:
        for part in (_batches, _graph, _mixed):
            compared += part(provider, setting, hidden, weight, sizes)
        if provider.sample is not None:
            # Seeds that differ in their low and in their high bits.
            seeds = torch.arange(_WHOLE, device=hidden.device) * 0x0123456789ABCD - 7
            call = _call(provider, weight, seeds if able.per_request_seed else None, T)
            if able.per_request_seed:
                compared += _moved(call, hidden, sizes)
            compared += _neighbours(provider, call, hidden, T)
    except _Differs as difference:
        return Check("invariance", False, str(difference), compared)
    told = f"{compared} tokens unchanged, in batches of {len(sizes)} sizes up to {max(sizes)}"
    return Check("invariance", True, told, compared)


def _require_equal(what: str, tokens: Tensor, wanted: Tensor) -> int:
    if not torch.equal(tokens.long(), wanted.long()):
        at = int((tokens != wanted).nonzero()[0])
        raise _Differs(f"{what}: row {at} expected {int(wanted[at])}; got {int(tokens[at])}")
    return len(tokens)


def _launched(
    provider: Provider, setting: Setting, hidden: Tensor, weight: Tensor
) -> tuple[Callable[..., Tensor], Tensor]:
    problem = setting.problem(len(hidden), len(weight), setting.sampled_temperature)
    launch = provider.build(problem, weight)
    torch.manual_seed(0)
    return launch, launched_tokens(launch, hidden, 21, 4).clone()


def _tokens(provider: Provider, problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
    torch.manual_seed(0)
    return launched_tokens(provider.build(problem, weight), hidden, 21, 4).clone()


def _batches(
    provider: Provider, setting: Setting, hidden: Tensor, weight: Tensor, sizes: Sequence[int]
) -> int:
    launch, whole = _launched(provider, setting, hidden, weight)
    compared = 0
    for B in sizes:
        _, part = _launched(provider, setting, hidden[:B].contiguous(), weight)
        compared += _require_equal(f"batch of {B} instead of {_WHOLE}", part, whole[:B])
    kept = [0, _WHOLE // 2, _WHOLE - 1]
    changed = hidden.roll(1, 0)
    changed[kept] = hidden[kept]
    torch.manual_seed(0)
    others = launched_tokens(launch, changed, 21, 4)
    return compared + _require_equal("other neighbours", others[kept], whole[kept])


def _graph(
    provider: Provider, setting: Setting, hidden: Tensor, weight: Tensor, sizes: Sequence[int]
) -> int:
    if setting.device != "cuda" or not provider.capabilities.graph_safe:
        return 0
    compared = 0
    for B in {min(sizes), max(sizes)}:
        part = hidden[:B].contiguous()
        launch, eager = _launched(provider, setting, part, weight)
        seed, offset = scalar(21, "cuda"), scalar(4, "cuda")  # the graph reads them: keep them
        replay = capture(launch, part, seed, offset)
        compared += _require_equal(f"graph of {B} rows instead of eager", replay(), eager)
    return compared


def _mixed(
    provider: Provider, setting: Setting, hidden: Tensor, weight: Tensor, sizes: Sequence[int]
) -> int:
    """Rows of a mixed batch take turns in filters: the tokens of batches with each turn's alone."""
    able = provider.capabilities
    filters = {name: value for name, value in _FILTERS.items() if name in able.filters}
    if not (filters and able.mixed_filters):
        return 0
    compared, T = 0, setting.sampled_temperature
    problem = replace(setting.problem(len(hidden), len(weight), T), **filters)
    mixed = _tokens(provider, replace(problem, mixed=True), hidden, weight)
    for turn, own in enumerate(replace(problem, mixed=True).row_filters()[:4]):
        values: dict[str, Any] = dict(zip(_FILTERS, own, strict=True))
        alone = _tokens(provider, replace(problem, **values), hidden, weight)
        what = f"neighbours with other filters than {values}"
        compared += _require_equal(what, mixed[turn::4], alone[turn::4])
    return compared


def _call(
    provider: Provider, weight: Tensor, seeds: Tensor | None, temperature: float
) -> Callable[..., Tensor]:
    """A function of (hidden, rows, options): tokens of the full call; rows choose the seeds."""

    def call(hidden: Tensor, rows: Tensor | None = None, **options: object) -> Tensor:
        device = hidden.device
        seed = scalar(21, device) if seeds is None else seeds
        if seeds is not None and rows is not None:
            seed = seeds[rows]
        arguments = {"temperature": temperature, **options}
        torch.manual_seed(0)
        assert provider.sample is not None
        result = provider.sample(hidden, weight, seed=seed, offset=scalar(4, device), **arguments)
        return require_form(result.tokens, (len(hidden),)).clone()

    return call


def _moved(call: Callable[..., Tensor], hidden: Tensor, sizes: Sequence[int]) -> int:
    whole, compared = call(hidden), 0
    order = torch.randperm(_WHOLE, generator=torch.Generator().manual_seed(1)).to(hidden.device)
    for B in sizes:
        rows = order[:B]
        part = call(hidden[rows].contiguous(), rows)
        compared += _require_equal(f"requests moved to a batch of {B}", part, whole[rows])
    return compared


def _neighbours(
    provider: Provider, call: Callable[..., Tensor], hidden: Tensor, temperature: float
) -> int:
    able = provider.capabilities
    device = hidden.device
    whole, compared = call(hidden), 0
    # At random, so that no exchange of rows, such as b with b xor 8, keeps the pattern.
    changed = (torch.rand(_WHOLE, generator=torch.Generator().manual_seed(2)) < 0.5).to(device)
    if able.per_row_temperature:
        T = torch.full((_WHOLE,), temperature, device=device)
        T[changed] = 0.0 if able.greedy_rows else temperature / 2
        tokens = call(hidden, temperature=T)
        compared += _require_equal("neighbours of another T", tokens[~changed], whole[~changed])
    if able.mask:
        mask = torch.ones(_WHOLE, _VOCABULARY, dtype=torch.bool, device=device)
        mask[changed, 100:] = False
        tokens = call(hidden, mask=mask)
        compared += _require_equal("neighbours with a mask", tokens[~changed], whole[~changed])
        for first, end in pairwise(_SHARDS):
            mask = torch.zeros(_WHOLE, _VOCABULARY, dtype=torch.bool, device=device)
            mask[:, first:end] = True
            mine = (whole >= first) & (whole < end)
            tokens = call(hidden, mask=mask)
            compared += _require_equal(f"tokens {first} to {end} alone", tokens[mine], whole[mine])
    return compared
