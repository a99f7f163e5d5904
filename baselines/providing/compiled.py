"""Compiled steps: torch.compile for one fixed problem, and the exponential race by it.

Compiling is finished in `build`, so that no launch ever compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from fsbench.baselines.providing.logits import scaled_logits
from fsbench.problem import Problem
from fsbench.provider import Launch, padded

if TYPE_CHECKING:
    from torch import Tensor


def compile_step(
    step: Callable[..., Any], *inputs: Any, mode: str | None = None
) -> Callable[..., Any]:
    """`step` compiled for exactly the shapes of `inputs`, by calling it on them once.

    mode: of torch.compile.

    `step` must trace as one graph. Shapes are static: a sweep compiles once per batch size, as
    engines do for their captured batch sizes, and no kernel pays for a symbolic B.

    Dynamo keeps its specializations on the code object and refuses a ninth (`recompile_limit`),
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


def build_race(problem: Problem, weight: Tensor, mode: str | None = None) -> Launch:
    """argmax_v p_v / E_v in one compiled graph, matmul included. mode: of torch.compile."""
    import torch

    V, temperature, weight = problem.V, problem.temperature, padded(weight)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        probs = scaled_logits(hidden, weight, V, temperature).softmax(dim=-1)
        noise = torch.empty_like(probs).exponential_()
        return probs.div_(noise).argmax(dim=-1)

    compiled = compile_step(step, weight.new_zeros(problem.B, problem.D), weight, mode=mode)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return compiled(hidden, weight)

    return launch
