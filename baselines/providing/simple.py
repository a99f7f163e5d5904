"""Code that the SIMPLE baselines share: matmul, logits to the host, tokens back.

On a GPU the logits are copied into pinned memory, where the samplers read them in place. The launch
waits for the copy and for the samplers, so no time of an engine is overlapped
(docs/guide/cpu-sampling.md has both times). On a CPU the matmul writes to where the samplers read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsbench.baselines.providing.logits import matmul_logits
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Launch, Tensor, padded

CAPABILITIES = Capabilities(
    devices=("cuda", "cpu"),
    dtypes=("bf16", "fp16", "fp32"),
    graph_safe=False,  # the host takes part in every step
    zero_temperature=True,
)
"""Capabilities of all SIMPLE baselines."""


def not_built() -> str | None:
    """Return why the C++ core cannot be used here, or None."""
    from fsbench.simple.native import missing

    return missing()


def core_step(design: Callable[..., Any], problem: Problem, **options: Any) -> Any:
    """Make a design of the C++ core; on a GPU its ring is pinned memory.

    bf16 logits stay bf16 on the bus; others are converted to fp32 before.
    """
    import torch

    from fsbench.simple.ring import RingShape
    from fsbench.simple.steps import Controls

    B, V, dtype = problem.B, problem.V, "bf16" if problem.dtype == "bf16" else "fp32"
    buffer = None
    if problem.device == "cuda":
        size = RingShape(1, B, V, dtype).bytes()
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    controls = Controls(problem.temperature, problem.top_k, problem.top_p, problem.min_p)
    return design(B, V, controls, dtype=dtype, buffer=buffer, **options)


def launch_with(
    problem: Problem,
    weight: Tensor,
    destination: Callable[[], Tensor],
    draw: Callable[[Tensor, Tensor], Tensor],
) -> Launch:
    """Return a launch that writes logits [B, V] to `destination()` and calls draw(seed, offset).

    Args:
        destination: Returns a tensor in host memory.
        draw: Returns the tokens [B], on the CPU.
    """
    import torch

    def on_cpu(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        out = destination()
        if out.dtype == hidden.dtype:
            torch.mm(hidden, weight.T, out=out)
        else:
            out.copy_(hidden @ weight.T)
        return draw(seed, offset).clone()

    if problem.device == "cpu":
        return on_cpu
    counters = torch.empty(2, dtype=torch.int64, pin_memory=True)
    padded_weight = padded(weight)

    def from_gpu(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        logits, out = matmul_logits(hidden, padded_weight, problem.V), destination()
        out.copy_(logits.to(out.dtype), non_blocking=True)
        counters[:1].copy_(seed, non_blocking=True)
        counters[1:].copy_(offset, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return draw(counters[:1], counters[1:]).to(hidden.device)

    return from_gpu
