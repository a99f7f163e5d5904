"""The launch cache: a kernel is bound by Triton once for a kind of call, then launched directly.

Triton binds, specializes and looks up some forty arguments at every launch, which takes the host
longer than everything else of an eager call. What decides the compiled kernel is the same for all
calls of a kind: shapes, dtypes, options, and which addresses are multiples of 16. A key has all of
that. Behind it stand the compiled kernel and the arguments that do not change, and a later call of
the same key fills in tensors, descriptors and floats.

Triton 3.6 also asks for device and stream at each launch, makes metadata for hooks that nobody has
set, goes through all arguments for descriptors, and encodes these again: a third of an eager call's
time on the host. `direct_launch` lays out what stays as the C function takes it, and keeps encoded
descriptors. Where Triton's launcher is another one, `compiled[grid]` launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from importlib import import_module
from inspect import getclosurevars, isfunction
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument
from fsbench.kernels.checks.values import LARGEST_NUMBER
from fsbench.kernels.configs.gpu import bind_and_launch, runs_kernels
from fsbench.kernels.launch.request import SMALLEST, Request

try:
    import triton
except ModuleNotFoundError:  # it exists for Linux only; then nothing is launched
    triton = None

MAX_KEYS = 4096
"""Keys of the cache, and encoded descriptors of a launch: a server sees far fewer of either."""
_BY_VALUE = (int, bool, str)  # types of what launch_kernel compiles for by its value
_NUMBERS = frozenset((int, float))
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_BASE = "iiiKKppOOOOOO"
"""Format of what the C function takes before a kernel's arguments: that of Triton 3.6.

Grid, stream, function, cooperative, PDL, two scratch memories, metadata, that of hooks, two hooks.
"""
_STREAM = 3

LAUNCHES: dict[Hashable, Any] = {}
"""The cache: key -> what was prepared for it."""


def find(key: Hashable) -> Any:
    """Return what is cached for a key; None if nothing is, or if there is no key."""
    try:
        return None if key is None else LAUNCHES.get(key)
    except TypeError:  # an option that cannot be hashed, which the checks are about to refuse
        return None


def cached(key: Hashable, prepare: Callable[..., Any], *arguments: Any) -> Any:
    """Return what prepare(*arguments) returned the first time that this key came.

    A full cache is emptied. What raises is not kept, and what has no key is prepared again.
    """
    value = find(key)
    if value is None:
        value = prepare(*arguments)
        if key is not None:
            _keep(key, value)
    return value


def _keep(key: Hashable, value: Any) -> None:
    if len(LAUNCHES) >= MAX_KEYS:
        LAUNCHES.clear()
    LAUNCHES[key] = value


def launch_key(
    request: Request, results: Iterable[Tensor | None], *choices: object
) -> tuple[Hashable, ...] | None:
    """Return all that decides whether a request is valid, and how it is launched.

    That is everything but addresses and the sizes of floats, so a request need not be checked if
    another of the same key was.

    Args:
        request: checked or not.
        results: tensors that the launch writes to, or reads besides; a missing one is None.
        choices: what else decides, such as the kernel and the tile shapes that are asked for.

    Returns:
        The key; or None if nothing may be cached: torch traces the call, no kernel runs here, a
        number is out of range, or what should be a tensor is none, or has no memory of its own.
    """
    if torch.compiler.is_compiling():
        return None
    (hidden, weight, seed, offset, temperature, soft_cap, bias, mask, vocab_size, num_samples,
     noise, shard, merge_later, scale) = request  # fmt: skip
    by_row: Any = None
    is_greedy = None
    if type(temperature) not in _NUMBERS:
        by_row = temperature
    elif 0 <= temperature <= LARGEST_NUMBER:
        is_greedy = temperature < SMALLEST
    else:
        return None
    if soft_cap is not None and (
        type(soft_cap) not in _NUMBERS or not 0 < soft_cap <= LARGEST_NUMBER
    ):
        return None
    values = (vocab_size, num_samples, noise, merge_later, *choices)
    # 1, 1.0 and True are equal, but not equally valid.
    key: list[object] = [values, tuple(map(type, values)), is_greedy, soft_cap is None]
    key.append(None if shard is None else shard.key)
    tensors = (hidden, weight, seed, offset, by_row, bias, mask, scale, *results)
    addresses = 0
    try:
        for x in tensors:
            if x is None:
                key.append(None)
            elif type(x) in _TENSORS:
                addresses |= x.data_ptr()
                key += (x.shape, x.dtype, x.device, x.is_contiguous())
            else:
                return None
        if addresses % 16:
            key.append(tuple([x is not None and x.data_ptr() % 16 == 0 for x in tensors]))
        if not hidden.is_cuda and not runs_kernels(hidden.device, hidden.dtype):
            return None
    except RuntimeError:
        return None
    return tuple(key)


class Launch:
    """A kernel, its grid, and the arguments that are the same in all calls of one key.

    fixed: by name. An argument that neither `fixed` nor a call gives is None.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], fixed: dict[str, Any]):
        self.kernel, self.grid = kernel, grid
        self.fixed = {**dict.fromkeys(kernel.arg_names), **fixed}
        self._direct: Callable[[Sequence[Any]], None] | None = None

    def __call__(self, moving: dict[str, Any]) -> None:
        """Launch on the current device and stream.

        moving: the other arguments: tensors, descriptors, floats, None, or integers that the kernel
            is not compiled for. Calls of one key give the same names in the same order.

        Raises:
            InvalidArgument: the kernel has no argument of a name that is not None.
        """
        if self._direct is None:
            given = {name: value for name, value in moving.items() if value is not None}
            for name in given:
                if name not in self.fixed:
                    raise InvalidArgument(
                        f"kernel: expected one with an argument {name}; got {self.kernel}"
                    )
            self._direct = _bound(self.kernel, self.grid, {**self.fixed, **given}, list(given))
        else:
            self._direct(
                [
                    x.data_ptr() if isinstance(x, Tensor) else x
                    for x in moving.values()
                    if x is not None
                ]
            )


def launch_kernel(
    kernel: Any, device: torch.device, grid: tuple[int, ...], **arguments: Any
) -> None:
    """Launch kernel[grid](**arguments) on the current device, from the second time on directly.

    An int, a bool or a string is compiled for by its value; everything else moves. An argument that
    is not given is None.
    """
    kinds: list[Any] = []
    values: list[Any] = []
    for value in arguments.values():
        kind = type(value)
        if value is None:  # as most are
            kinds.append(None)
        elif kind in _BY_VALUE:
            kinds.append(value)
        elif kind is not float and isinstance(value, Tensor):
            address = value.data_ptr()
            values.append(address)
            kinds.append(value.dtype)
            kinds.append(address % 16 == 0)
        else:
            values.append(value)
            kinds.append(kind)
    key = (kernel, device, grid, tuple(kinds))
    direct = LAUNCHES.get(key)
    if direct is not None:
        direct(values)
        return
    moving = [name for name, value in arguments.items() if type(value) not in _BY_VALUE]
    direct = _bound(kernel, grid, {**dict.fromkeys(kernel.arg_names), **arguments}, moving)
    if direct is not None:
        _keep(key, direct)


def _bound(
    kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], moving: list[str]
) -> Callable[[Sequence[Any]], None] | None:
    """Launch by the binder; return how to launch what it compiled, or None in the interpreter.

    moving: names of the arguments that later launches give, in this order, without those that are
        None.
    """
    compiled = bind_and_launch(kernel, grid, **arguments)
    if not hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
        return None
    names = kernel.arg_names
    places = [names.index(name) for name in moving if arguments[name] is not None]
    # It keeps no tensor alive.
    stay = [None if isinstance(arguments[name], Tensor) else arguments[name] for name in names]
    return direct_launch(compiled, grid, stay, places)


def direct_launch(
    compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any], places: Sequence[int]
) -> Callable[[Sequence[Any]], None]:
    """Return a launch of a compiled kernel that takes the arguments which move, as places has them.

    arguments: all of the kernel's, in order. places: of those that move among them. A pointer may
        be given as an address; where a descriptor is here, one comes in each launch.
    """
    grid = (*grid, 1, 1)[:3]
    bound = compiled[grid]  # it loads the kernel, too
    stay = list(arguments)

    def by_triton(values: Sequence[Any]) -> None:
        now = stay.copy()
        for place, value in zip(places, values, strict=True):
            now[place] = value
        bound(*now)

    driver = _driver_of(compiled)
    if driver is None:
        return by_triton
    launch, active, hooks = compiled.run, triton.runtime.driver.active, triton.knobs.runtime
    device, stream_of = active.get_current_device(), active.get_current_stream
    before = [*grid, 0, compiled.function, launch.launch_cooperative_grid, launch.launch_pdl]
    before += [None, None, compiled.packed_metadata, None, None, None]
    # With descriptors it is a function that has the C function in its closure.
    inner = getclosurevars(launch.launch).nonlocals if isfunction(launch.launch) else {}
    call = inner.get("launcher", launch.launch)
    metadata = list(inner.get("tensordesc_meta", []))

    # A descriptor is several arguments of the C function, and so moves what is behind it.
    laid_out, starts = before, []
    encoders: list[tuple[int, Any, dict[int, tuple[Any, list[Any]]]]] = []
    for i, value in enumerate(stay):
        starts.append(len(laid_out))
        if i in inner.get("tensordesc_indices", ()):
            described = metadata.pop(0)
            encoders.append((len(laid_out), described, {}))
            laid_out = laid_out + driver.make_tensordesc_arg(value, described)
        else:
            laid_out = [*laid_out, value]
    moved = [starts[place] for place in places]

    def at_once(values: Sequence[Any]) -> None:
        for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook):
            if getattr(hook, "calls", hook):  # somebody has set it, such as a profiler
                by_triton(values)
                return
        now = laid_out.copy()
        now[_STREAM] = stream_of(device)
        for place, value in zip(moved, values, strict=True):
            now[place] = value
        for place, described, encoded in encoders:
            value = now[place]
            known = encoded.get(id(value))
            if known is None:
                if len(encoded) >= MAX_KEYS:
                    encoded.clear()
                # It is kept, too, so that no other has its id.
                known = encoded[id(value)] = (value, driver.make_tensordesc_arg(value, described))
            now[place : place + len(known[1])] = known[1]
        call(*now)

    return at_once


def _driver_of(compiled: Any) -> ModuleType | None:
    """The module of Triton's launcher, if it is the one that is known here and needs no memory."""
    launch: Any = getattr(compiled, "run", None)
    module = getattr(type(launch), "__module__", "")
    if module != "triton.backends.nvidia.driver":
        return None
    driver = import_module(module)
    if getattr(driver, "_BASE_ARGS_FORMAT", None) != _BASE:
        return None
    memory = launch.global_scratch_size or launch.profile_scratch_size
    return None if memory else driver
