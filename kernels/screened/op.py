"""torch.ops.fsbench.screened_sample: a screened draw as an operator; see fused.op.

The head is named by its key, as an operator takes tensors and numbers only; so each call of a
compiled program still finds out whether the head's weight has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import Any, Optional

import torch
from torch import Tensor

from fsbench.kernels.call.request import Request
from fsbench.kernels.call.result import Screened
from fsbench.kernels.checks.keys import by_key
from fsbench.kernels.checks.values import ScreenConfigs
from fsbench.kernels.configs.screen import HopperScreenConfig, ResolveConfig, ScreenConfig
from fsbench.kernels.screened.copied import HeadCopy, check_copy
from fsbench.kernels.screened.draw import draw
from fsbench.kernels.shard import vocab_shard


def _carry_out(
    hidden: Tensor,
    weight: Tensor,
    head: str,
    seed: Tensor,
    offset: Optional[Tensor],  # noqa: UP045 (torch reads the schema from these)
    temperature: float,
    temperatures: Optional[Tensor],  # noqa: UP045
    soft_cap: Optional[float],  # noqa: UP045
    bias: Optional[Tensor],  # noqa: UP045
    mask: Optional[Tensor],  # noqa: UP045
    vocab_size: int,
    noise: str,
    screen: Optional[Sequence[int]],  # noqa: UP045
    resolve: Optional[Sequence[int]],  # noqa: UP045
    tokens: Tensor,
    valid: Tensor,
    found: Tensor,
    shard: Optional[str] = None,  # noqa: UP045
) -> None:
    """See screened_sample. temperatures, if given, is used in place of temperature.

    head, shard: keys of the ScreenedHead and the VocabShard that weight is of. screen, resolve: the
    fields of the configs.
    """
    request = Request(
        hidden=hidden,
        weight=weight,
        seed=seed,
        offset=offset,
        temperature=temperature if temperatures is None else temperatures,
        soft_cap=soft_cap,
        bias=bias,
        mask=mask,
        vocab_size=vocab_size,
        num_samples=1,
        noise=noise,
        shard=None if shard is None else vocab_shard.by_key(shard),
    )
    out = Screened(tokens, valid, found=found)
    draw(request, check_copy(by_key(head, HeadCopy)), _configs(screen, resolve), out)


screened_sample_op = torch.library.custom_op(
    "fsbench::screened_sample", mutates_args=("tokens", "valid", "found")
)(_carry_out)


def through_operator(
    request: Request, key: str, configs: ScreenConfigs | None, out: Screened
) -> None:
    """Draw as `draw` does, by the operator. key: of the head."""
    given = request.temperature
    by_tensor = isinstance(given, Tensor)
    assert out.found is not None
    screened_sample_op(
        request.hidden,
        request.weight,
        key,
        request.seed,
        request.offset,
        1.0 if by_tensor else given,
        given if by_tensor else None,
        request.soft_cap,
        request.bias,
        request.mask,
        request.vocab_size,
        request.noise,
        None if configs is None else [int(value) for value in astuple(configs[0])],
        None if configs is None else [int(value) for value in astuple(configs[1])],
        out.tokens,
        out.valid,
        out.found,
        None if request.shard is None else request.shard.key,
    )


def carry_out(
    request: Request, head: HeadCopy, configs: ScreenConfigs | None, out: Screened
) -> None:
    """What a checked request asks for, into `out`: at once, or as an operator if torch traces."""
    real = type(request.hidden) in (torch.Tensor, torch.nn.Parameter)  # and not a fake one
    if real and not torch.compiler.is_compiling():
        draw(request, head, configs, out)
    else:
        through_operator(request, head.key, configs, out)


def _configs(screen: Sequence[Any] | None, resolve: Sequence[Any] | None) -> ScreenConfigs | None:
    if screen is None or resolve is None:
        return None
    hopper = len(screen) == len(fields(HopperScreenConfig))
    return (HopperScreenConfig if hopper else ScreenConfig)(*screen), ResolveConfig(*resolve)


@screened_sample_op.register_fake
def _(*arguments: object) -> None:
    """Shapes need no inference: the results are the caller's tensors."""
