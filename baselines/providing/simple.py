"""What the SIMPLE baselines share: matmul, logits to the host, tokens back.

On a GPU the logits are copied into pinned memory, where the samplers read them in place; the
launch waits for the copy and for the samplers, so all that an engine could overlap is exposed here
(docs/guide/cpu-sampling.md has both times). On a CPU the matmul writes to where the samplers read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsbench.baselines.providing.logits import matmul_logits
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Launch, padded

if TYPE_CHECKING:
    from torch import Tensor

CAPABILITIES: dict[str, Any] = {
    "devices": ("cuda", "cpu"),
    "dtypes": ("bf16", "fp16", "fp32"),
    "graph_safe": False,  # the host takes part in every step
    "zero_temperature": True,
}


def able(**more: Any) -> Capabilities:
    """The capabilities of all of them, and what one has in addition."""
    return Capabilities(**{**CAPABILITIES, **more})


def not_built() -> str | None:
    """Why the C++ core cannot be used here, or None."""
    from fsbench.simple.native import missing

    return missing()


def pinned(shape_bytes: int, problem: Problem) -> Tensor | None:
    """Memory for a ring that a GPU copies to; None on a CPU, where the ring has its own."""
    import torch

    if problem.device == "cpu":
        return None
    return torch.empty(shape_bytes, dtype=torch.uint8, pin_memory=True)


def ring_dtype(problem: Problem) -> str:
    """bf16 logits cross the bus and are read as they are; fp16 ones are widened before."""
    return "bf16" if problem.dtype == "bf16" else "fp32"


def launch_with(
    problem: Problem,
    weight: Tensor,
    destination: Callable[[], Tensor],
    draw: Callable[[Tensor, Tensor], Tensor],
) -> Launch:
    """A launch: logits [B, V] to `destination()` in host memory, tokens from draw(seed, offset)."""
    if problem.device == "cpu":

        def on_cpu(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
            write_logits(destination(), hidden, weight)
            return draw(seed, offset).clone()

        return on_cpu

    import torch

    counters = torch.empty(2, dtype=torch.int64, pin_memory=True)
    weight = padded(weight)

    def from_gpu(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        logits = matmul_logits(hidden, weight, problem.V)
        to = destination()
        to.copy_(logits.to(to.dtype), non_blocking=True)
        counters[:1].copy_(seed, non_blocking=True)
        counters[1:].copy_(offset, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return draw(counters[:1], counters[1:]).to(hidden.device)

    return from_gpu


def write_logits(to: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """hidden [B, D] x weight [V, D] on a CPU into `to`, without a copy where dtypes allow it."""
    import torch

    if to.dtype == hidden.dtype:
        torch.mm(hidden, weight.T, out=to)
    else:
        to.copy_(hidden @ weight.T)
