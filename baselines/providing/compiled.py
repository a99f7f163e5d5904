"""torch.compile for one fixed problem, finished in `build` so that no launch ever compiles."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any


def compile_step(
    step: Callable[..., Any], *inputs: Any, mode: str | None = None
) -> Callable[..., Any]:
    """`step` compiled for exactly the shapes of `inputs`, by calling it on them once.

    mode: of torch.compile.

    `step` must trace as one graph. Shapes are static: a sweep compiles once per batch size, as
    engines do for their captured batch sizes, and no kernel pays for a symbolic B.

    Dynamo keeps its specialisations on the code object and refuses a ninth (`recompile_limit`),
    which a sweep over nine batch sizes reaches. So every call here compiles a copy of the code
    object: its limit counts one build, its guards are the only ones a launch checks, and it is
    freed with the launch.
    """
    import torch

    assert isinstance(step, FunctionType), "a plain function: the copy needs its code object"
    own = FunctionType(
        step.__code__.replace(),
        step.__globals__,
        step.__name__,
        step.__defaults__,
        step.__closure__,
    )
    compiled = torch.compile(own, fullgraph=True, dynamic=False, mode=mode)
    compiled(*inputs)
    return compiled
