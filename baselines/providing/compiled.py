"""Steps compiled by torch.compile for one problem, among them the exponential race.

They are compiled in `build`, so no launch compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from fsbench.baselines.providing.logits import scaled_logits
from fsbench.problem import Problem
from fsbench.provider import Launch, Tensor, padded


def compile_step(
    step: Callable[..., Any], *inputs: Any, mode: str | None = None
) -> Callable[..., Any]:
    """Compile `step` for the shapes of `inputs`, by calling it once.

    `step` must trace as one graph. Shapes are static: a sweep compiles once for each batch size, as
    engines do for their captured batch sizes, and no kernel has a symbolic B.

    Dynamo keeps its specializations on the code object and refuses a ninth (`recompile_limit`),
    which a sweep over nine batch sizes reaches. So each call compiles a copy of the code object: it
    counts one build, a launch checks only its guards, and it is freed with the launch.

    Args:
        mode: Argument of torch.compile.
    """
    import torch

    assert isinstance(step, FunctionType), "a plain function: the copy needs its code object"
    copy = FunctionType(
        step.__code__.replace(),
        step.__globals__,
        step.__name__,
        step.__defaults__,
        step.__closure__,
    )
    compiled = torch.compile(copy, fullgraph=True, dynamic=False, mode=mode)
    compiled(*inputs)
    return compiled


def build_compiled(
    problem: Problem,
    weight: Tensor,
    step: Callable[..., Tensor],
    *inputs: Tensor,
    mode: str | None = None,
) -> Launch:
    """Compile step(hidden, weight, *inputs) for a problem and return its launch."""
    hidden = weight.new_zeros(problem.B, problem.D)
    compiled = compile_step(step, hidden, weight, *inputs, mode=mode)
    return lambda hidden, seed, offset: compiled(hidden, weight, *inputs)


def build_race(problem: Problem, weight: Tensor, mode: str | None = None) -> Launch:
    """Build argmax_v p_v / E_v as one compiled graph, matmul included."""
    import torch

    V, temperature = problem.V, problem.temperature

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        probs = scaled_logits(hidden, weight, V, temperature).softmax(dim=-1)
        noise = torch.empty_like(probs).exponential_()
        return probs.div_(noise).argmax(dim=-1)

    return build_compiled(problem, padded(weight), step, mode=mode)
