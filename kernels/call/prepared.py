"""Launches that are prepared once: the next call of the same kind goes past Triton's binder.

Triton binds, specializes and looks up some forty arguments at every launch, which takes the host
longer than everything else of an eager call. What decides the compiled kernel, though, is the same
for all calls of a kind: shapes, dtypes, options. So the kernel that the first call compiled is kept
with the arguments that stay, and later calls fill in the ones that move: tensors and floats.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsbench.kernels.call.operands import greedy
from fsbench.kernels.call.request import Request
from fsbench.kernels.call.straight import straight
from fsbench.kernels.configs.gpu import bind_and_launch

_MOST = 4096  # kinds, and alignments of one kind: a server sees far fewer

_STAY = (int, bool, str)  # types of what a launch of launch_kernel is compiled for by its value
_by_kind: dict[Hashable, Any] = {}


@dataclass
class PreparedLaunch:
    """A kernel, its grid, and the arguments that stay for calls of one kind.

    Calling it with the arguments that move launches the kernel on the current device and stream.
    """

    kernel: Any
    grid: tuple[int, ...]
    fixed: dict[str, Any]
    _compiled: dict[Hashable, Callable[[list[Any]], None]] = field(default_factory=dict)

    def __call__(self, **moving: Any) -> None:
        """Launch. moving: tensors, descriptors, floats, None, or integers other than 1."""
        key, values = _looked_at(moving)
        known = self._compiled.get(key)
        if known is None:
            self._first(key, moving)
        else:
            known(values)

    def ready(self, **moving: Any) -> Callable[[list[Any]], None] | None:
        """The launch of arguments that are like these in all that Triton compiles for, if known.

        It takes those that are not None in this order, addresses in place of tensors.
        """
        return self._compiled.get(_looked_at(moving)[0])

    def _first(self, key: Hashable, moving: dict[str, Any]) -> None:
        known = _compiled(self.kernel, self.grid, {**self.fixed, **moving}, list(moving))
        if known is not None:
            _keep(self._compiled, key, known)


def _keep(kept: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    """Note it; a table that is full begins anew."""
    if len(kept) >= _MOST:
        kept.clear()
    kept[key] = value


def _compiled(
    kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], moving: list[str]
) -> Callable[[list[Any]], None] | None:
    """Launch by the binder, and how to launch what it compiled; None in the interpreter.

    moving: names of the arguments that are given anew at each launch, in this order, but for those
        that are None.
    """
    compiled = bind_and_launch(kernel, grid, **arguments)
    if not hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
        return None
    given = [name for name in moving if arguments[name] is not None]
    # Keeps no tensor alive.
    stay = {name: None if isinstance(x, Tensor) else x for name, x in arguments.items()}
    names = kernel.arg_names
    return straight(
        compiled, grid, [stay[name] for name in names], [names.index(name) for name in given]
    )


def _looked_at(
    arguments: dict[str, Any], stay: tuple[type, ...] = ()
) -> tuple[Hashable, list[Any]]:
    """What Triton compiles for of arguments, and those that move and are not None as it takes them.

    It is dtypes, which addresses and integers are multiples of 16, and the values of the types that
    stay.
    """
    values: list[Any] = []
    kinds: list[Any] = []
    for value in arguments.values():
        kind = type(value)
        if value is None:  # as most are
            kinds.append(None)
        elif kind in stay:
            kinds.append(value)
        elif kind is Tensor or (kind is not float and isinstance(value, Tensor)):
            address = value.data_ptr()
            values.append(address)
            kinds.append(value.dtype)
            kinds.append(address % 16 == 0)
        else:
            values.append(value)
            kinds.append(value % 16 == 0 if kind is int else kind)
    return tuple(kinds), values


def prepared(kind: Hashable, prepare: Callable[..., Any], *arguments: Any) -> Any:
    """What calls of a kind have in common: what prepare(*arguments) returned the first time."""
    found = _by_kind.get(kind)
    if found is None:
        found = prepare(*arguments)
        _keep(_by_kind, kind, found)
    return found


def launch_kernel(
    kernel: Any, device: torch.device, grid: tuple[int, ...], **arguments: Any
) -> None:
    """kernel[grid](**arguments), from the second time on past the binder.

    What is compiled for by its value is an int, a bool or a string; everything else moves.
    """
    kinds, values = _looked_at(arguments, _STAY)
    kind = (kernel, device, grid, kinds)
    known = _by_kind.get(kind)
    if known is not None:
        known(values)
        return
    moving = [name for name, value in arguments.items() if type(value) not in _STAY]
    known = _compiled(kernel, grid, arguments, moving)
    if known is not None:
        _keep(_by_kind, kind, known)


def kind_of(request: Request) -> tuple[Hashable, ...]:
    """What decides how a request is launched: all of it but addresses and the size of a float."""
    shard, bias, mask = request.shard, request.bias, request.mask
    temperature, offset = request.temperature, request.offset
    return (
        request.hidden.shape,
        request.hidden.dtype,
        request.hidden.device,
        request.weight.shape,
        request.seed.shape,
        offset if offset is None else offset.shape,
        None if isinstance(temperature, Tensor) else greedy(request),
        request.soft_cap is None,
        bias if bias is None else (bias.shape, bias.dtype),
        mask if mask is None else (mask.shape, mask.dtype),
        request.vocab_size,
        request.num_samples,
        request.noise,
        shard
        if shard is None
        else (shard.rank, shard.ranks, shard.first_token, shard.num_tokens, shard.slots),
        request.merge_later,
        request.scale if request.scale is None else (request.scale.shape, request.weight.dtype),
    )
