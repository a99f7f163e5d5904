"""The launch cache: Triton binds a kernel once for each key, and later calls launch it directly.

At every launch Triton binds, specializes and looks up about forty arguments, which takes the host
longer than all other work of an eager call. A launch key has everything that decides the compiled
kernel: shapes, dtypes, options, and which addresses are multiples of 16. The cache maps the key to
the compiled kernel and its constant arguments. A later call with the same key fills in tensors,
descriptors and floats.

Triton 3.6 also looks up the device and the stream at each launch, makes metadata for hooks even if
none is set, searches all arguments for descriptors, and encodes these again: a third of the host
time of an eager call. `direct_launch` lays out the constant arguments for Triton's C function and
caches encoded descriptors. With another launcher than Triton 3.6's, `compiled[grid]` launches.
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
from fsbench.kernels.checks.identity import Keyed
from fsbench.kernels.checks.values import LARGEST_NUMBER
from fsbench.kernels.configs.gpu import bind_and_launch, runs_kernels
from fsbench.kernels.launch.request import SMALLEST, Request

try:
    import triton
except ModuleNotFoundError:  # it exists for Linux only; then nothing is launched
    triton = None

MAX_KEYS = 4096
"""The most keys of the cache, and encoded descriptors of a launch; a server has far fewer."""
_BY_VALUE = (int, bool, str)  # launch_kernel compiles for the values of these types
_NUMBERS = frozenset((int, float))
_NUMBER, _GREEDY = object(), object()  # replace numbers in keys; no argument equals them
_TEMPERATURE, _SOFT_CAP = map(Request._fields.index, ("temperature", "soft_cap"))
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_BASE = "iiiKKppOOOOOO"
"""Format of the C function's arguments before the kernel's own ones, in Triton 3.6.

Grid, stream, function, cooperative, PDL, two scratch buffers, metadata, hook metadata, two hooks.
"""
_STREAM = 3

Scratch = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Memory that launches need: name of the kernel's argument -> shape and dtype."""

LAUNCHES: dict[Hashable, Any] = {}
"""The cache: key -> launch."""


def find(key: Hashable) -> Any:
    """Return the cached value of a key, or None if it is not cached or the key is None."""
    try:
        return None if key is None else LAUNCHES.get(key)
    except TypeError:  # an unhashable option, which the checks will refuse
        return None


def cached(key: Hashable, prepare: Callable[..., Any], *arguments: Any) -> Any:
    """Return the cached value of a key, or cache and return prepare(*arguments).

    A full cache is emptied. With the key None nothing is cached.
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
    """Return everything that decides whether a request is valid and how it is launched.

    The key has all fields except addresses, temperature and soft cap. So a request need not be
    checked if an earlier one with the same key was.

    Args:
        request: a request, checked or not.
        results: other tensors that the launch writes or reads; a missing one is None.
        choices: other values that decide the launch, such as the kernel and the tile shapes.

    Returns:
        The key; or None if the launch cannot be cached: torch traces the call, no kernel runs here,
        a number is out of range, or a tensor is of a subclass or has no memory.
    """
    hidden = request.hidden
    if torch.compiler.is_compiling() or type(hidden) not in _TENSORS:
        return None
    fields: list[Any] = [*request, *results]
    temperature, soft_cap = request.temperature, request.soft_cap
    if type(temperature) in _NUMBERS:
        if not 0 <= temperature <= LARGEST_NUMBER:  # type: ignore[operator]
            return None
        fields[_TEMPERATURE] = _GREEDY if temperature < SMALLEST else _NUMBER  # type: ignore[operator]
    if soft_cap is not None:
        if type(soft_cap) not in _NUMBERS or not 0 < soft_cap <= LARGEST_NUMBER:
            return None
        fields[_SOFT_CAP] = _NUMBER
    key: list[object] = [choices, tuple(map(type, choices))]
    addresses = 0
    tensors: list[Tensor] = []
    try:
        for x in fields:
            kind = type(x)
            if x is None:
                key.append(None)
            elif kind in _TENSORS:
                addresses |= x.data_ptr()
                tensors.append(x)
                key += (x.shape, x.dtype, x.device, x.is_contiguous())
            elif kind not in _BY_VALUE and isinstance(x, Keyed):  # the cache must not keep it alive
                key.append(x.key)
            elif kind not in _BY_VALUE and isinstance(x, Tensor):
                return None
            else:  # 1, 1.0 and True are equal, but not equally valid
                key += (x, kind)
        if addresses % 16:
            key.append(tuple([x.data_ptr() % 16 == 0 for x in tensors]))
        if not hidden.is_cuda and not runs_kernels(hidden.device, hidden.dtype):
            return None
    except RuntimeError:
        return None
    return tuple(key)


class Launch:
    """A kernel, its grid, and the arguments that are the same in all calls of one key.

    Args:
        fixed: the constant arguments by name. An argument that is missing here and in a call is
            None.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], fixed: dict[str, Any]):
        self.kernel, self.grid = kernel, grid
        self.fixed = {**dict.fromkeys(kernel.arg_names), **fixed}
        self.moving = self.fixed.keys() - fixed.keys()
        self.direct: Callable[[Sequence[Any]], None] | None = None

    def __call__(self, moving: dict[str, Any]) -> None:
        """Launch on the current device and stream.

        Args:
            moving: the other arguments by name: tensors, descriptors, floats, None, or integers
                that Triton does not specialize. Calls of one key have the same names in the same
                order.

        Raises:
            InvalidArgument: the kernel has no argument of a name whose value is not None.
        """
        if self.direct is None:
            present = {name: value for name, value in moving.items() if value is not None}
            _check_names(present, [self])
            self.direct = _bound(self.kernel, self.grid, {**self.fixed, **present}, list(present))
        else:
            self.direct(
                [
                    x.data_ptr() if isinstance(x, Tensor) else x
                    for x in moving.values()
                    if x is not None
                ]
            )


def _check_names(names: Iterable[str], launches: Sequence[Launch]) -> None:
    for name in names:
        if not any(name in launch.fixed for launch in launches):
            kernels = ", ".join(str(launch.kernel) for launch in launches)
            raise InvalidArgument(f"kernel: expected one with an argument {name}; got {kernels}")


class LaunchSequence:
    """Launches of one key, one after the other, whose arguments of one name are equal.

    Args:
        scratch: arguments that each call allocates.
    """

    def __init__(self, launches: Sequence[Launch], scratch: Scratch, device: torch.device):
        self.launches, self.scratch, self.device = launches, scratch, device
        self._steps: list[tuple[Any, list[str]]] = []

    def __call__(self, moving: dict[str, Any]) -> None:
        """Launch each kernel with those of the arguments that it has and that are not constant.

        Args:
            moving: as a Launch takes them, for all kernels.

        Raises:
            InvalidArgument: no kernel has an argument of a name whose value is not None.
        """
        moving = moving | {
            name: torch.empty(*shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in self.scratch.items()
        }
        if self._steps:
            values = {
                name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in moving.items()
            }
            for direct, names in self._steps:
                direct([values[name] for name in names])
            return
        present = {name: value for name, value in moving.items() if value is not None}
        _check_names(present, self.launches)
        steps = []
        for launch in self.launches:
            arguments = {name: x for name, x in present.items() if name in launch.moving}
            launch(arguments)
            steps.append((launch.direct, list(arguments)))
        if all(direct is not None for direct, _ in steps):  # not in the interpreter
            self._steps = steps


def launch_kernel(
    kernel: Any, device: torch.device, grid: tuple[int, ...], **arguments: Any
) -> None:
    """Launch kernel[grid](**arguments) on the current device, directly from the second time on.

    The key has the values of ints, bools and strings, and the types of all other arguments. A
    missing argument is None.
    """
    types: list[Any] = []
    values: list[Any] = []
    for value in arguments.values():
        kind = type(value)
        if value is None:  # the most frequent case
            types.append(None)
        elif kind in _BY_VALUE:
            types.append(value)
        elif kind is not float and isinstance(value, Tensor):
            address = value.data_ptr()
            values.append(address)
            types.append(value.dtype)
            types.append(address % 16 == 0)
        else:
            values.append(value)
            types.append(kind)
    key = (kernel, device, grid, tuple(types))
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
    """Launch through Triton, and return a direct launch; or None in the interpreter.

    Args:
        moving: names of the arguments of later launches, in order. Those that are None are skipped.
    """
    compiled = bind_and_launch(kernel, grid, **arguments)
    if not hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
        return None
    names = kernel.arg_names
    places = [names.index(name) for name in moving if arguments[name] is not None]
    # No tensor is kept alive.
    constant = [None if isinstance(arguments[name], Tensor) else arguments[name] for name in names]
    return direct_launch(compiled, grid, constant, places)


def direct_launch(
    compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any], places: Sequence[int]
) -> Callable[[Sequence[Any]], None]:
    """Return a launch of a compiled kernel that takes the values of its moving arguments.

    Args:
        arguments: all arguments of the kernel, in order. A descriptor marks the place of one.
        places: the indices of the moving arguments. A pointer may be passed as an address.
    """
    grid = (*grid, 1, 1)[:3]
    bound = compiled[grid]  # this also loads the kernel
    constant = list(arguments)

    def by_triton(values: Sequence[Any]) -> None:
        complete = constant.copy()
        for place, value in zip(places, values, strict=True):
            complete[place] = value
        bound(*complete)

    driver = _driver_of(compiled)
    if driver is None:
        return by_triton
    launch, active, hooks = compiled.run, triton.runtime.driver.active, triton.knobs.runtime
    device, stream_of = active.get_current_device(), active.get_current_stream
    before = [*grid, 0, compiled.function, launch.launch_cooperative_grid, launch.launch_pdl]
    before += [None, None, compiled.packed_metadata, None, None, None]
    # With descriptors, `launch.launch` is a Python function with the C function in its closure.
    inner = getclosurevars(launch.launch).nonlocals if isfunction(launch.launch) else {}
    call = inner.get("launcher", launch.launch)
    metadata = list(inner.get("tensordesc_meta", []))

    # A descriptor takes several arguments of the C function, which shifts the later ones.
    laid_out, starts = before, []
    encoders: list[tuple[int, Any, dict[int, tuple[Any, list[Any]]]]] = []
    for i, value in enumerate(constant):
        starts.append(len(laid_out))
        if i in inner.get("tensordesc_indices", ()):
            described = metadata.pop(0)
            encoders.append((len(laid_out), described, {}))
            laid_out = laid_out + driver.make_tensordesc_arg(value, described)
        else:
            laid_out = [*laid_out, value]
    shifted = [starts[place] for place in places]

    def directly(values: Sequence[Any]) -> None:
        for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook):
            if getattr(hook, "calls", hook):  # a profiler, for example, has set it
                by_triton(values)
                return
        complete = laid_out.copy()
        complete[_STREAM] = stream_of(device)
        for place, value in zip(shifted, values, strict=True):
            complete[place] = value
        for place, described, encoded in encoders:
            value = complete[place]
            entry = encoded.get(id(value))
            if entry is None:
                if len(encoded) >= MAX_KEYS:
                    encoded.clear()
                # The entry keeps the descriptor alive, so that no other object has its id.
                entry = encoded[id(value)] = (value, driver.make_tensordesc_arg(value, described))
            complete[place : place + len(entry[1])] = entry[1]
        call(*complete)

    return directly


def _driver_of(compiled: Any) -> ModuleType | None:
    """Return the module of Triton 3.6's launcher; None for another, or if it needs memory."""
    launch: Any = getattr(compiled, "run", None)
    module = getattr(type(launch), "__module__", "")
    if module != "triton.backends.nvidia.driver":
        return None
    driver = import_module(module)
    if getattr(driver, "_BASE_ARGS_FORMAT", None) != _BASE:
        return None
    memory = launch.global_scratch_size or launch.profile_scratch_size
    return None if memory else driver
