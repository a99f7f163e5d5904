"""The last step of a launch: from arguments that moved to the C function that Triton launches with.

Triton 3.6 asks for device and stream at each launch, makes metadata for hooks that nobody has set,
goes through all arguments for descriptors, and encodes these anew: a third of an eager call's time
on the host. Here what stays is laid out once as the C function takes it, and encoded descriptors
are kept. Where Triton's launcher is another one, `compiled[grid]` launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import getclosurevars, isfunction
from types import ModuleType
from typing import Any

import triton

_BASE = "iiiKKppOOOOOO"
"""Format of what the C function takes before a kernel's arguments: that of Triton 3.6.

Grid, stream, function, cooperative, PDL, two scratch memories, metadata, that of hooks, two hooks.
"""
_STREAM = 3
_MOST = 4096  # encoded descriptors of a launch: an eager server sees far fewer addresses


def straight(
    compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any], places: Sequence[int]
) -> Callable[[Sequence[Any]], None]:
    """A launch of a compiled kernel that takes the arguments which move, in the order of places.

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
    encoders: dict[int, tuple[Any, dict[int, tuple[Any, list[Any]]]]] = {}
    for i, value in enumerate(stay):
        starts.append(len(laid_out))
        if i in inner.get("tensordesc_indices", ()):
            described = metadata.pop(0)
            encoders[len(laid_out)] = (described, {})
            laid_out = laid_out + driver.make_tensordesc_arg(value, described)
        else:
            laid_out = [*laid_out, value]
    moved = [starts[place] for place in places]

    def at_once(values: Sequence[Any]) -> None:
        if _called(hooks.launch_enter_hook) or _called(hooks.launch_exit_hook):
            by_triton(values)
            return
        now = laid_out.copy()
        now[_STREAM] = stream_of(device)
        for place, value in zip(moved, values, strict=True):
            now[place] = value
        for place, (described, encoded) in encoders.items():
            value = now[place]
            known = encoded.get(id(value))
            if known is None:
                if len(encoded) >= _MOST:
                    encoded.clear()
                # It is kept, too, so that no other has its id.
                known = encoded[id(value)] = (value, driver.make_tensordesc_arg(value, described))
            now[place : place + len(known[1])] = known[1]
        call(*now)

    return at_once


def _called(hook: Any) -> Any:
    """Whether somebody has set a hook of Triton's, such as a profiler."""
    return getattr(hook, "calls", hook)


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
