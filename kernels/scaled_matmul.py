"""A matmul of one-byte numbers, then one pass over stored logits, for quantized heads.

Hidden is rounded to the head's form, e4m3 or int8, with a scale for each row; torch's scaled or
integer matmul writes bf16 logits, and one pass draws from them. These are not the logits of the
head, as `known_deviation` declares.
"""

from __future__ import annotations

from types import FunctionType

from fsbench.kernels.providing.launches import WorkspaceLaunch
from fsbench.kernels.providing.one_pass import gumbel_argmax
from fsbench.problem import QUANTIZED, Problem
from fsbench.provider import Capabilities, Kind, Provider, QuantizedWeight, Tensor, padded

ROWS = 32
"""Fewest rows that torch's integer matmul takes on a GPU."""


def fp8_logits(hidden: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return bf16 logits [B, V] of hidden rounded to e4m3 row by row."""
    import torch

    steps = (hidden.abs().amax(1, keepdim=True).float() / 448).clamp_min(1e-30)
    rounded = (hidden / steps).clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch._scaled_mm(
        rounded, weight.T, scale_a=steps, scale_b=scale[None], out_dtype=torch.bfloat16
    )


def int8_logits(hidden: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return bf16 logits [B, V] of hidden rounded to int8 row by row."""
    import torch

    B = len(hidden)
    steps = (hidden.abs().amax(1, keepdim=True).float() / 127).clamp_min(1e-30)
    rounded = (hidden / steps).round().to(torch.int8)
    rounded = torch.nn.functional.pad(rounded, (0, 0, 0, max(0, ROWS - B)))
    return (torch._int_mm(rounded, weight.T)[:B] * steps * scale).bfloat16()


class _ScaledMatmul(WorkspaceLaunch):
    def __init__(self, problem: Problem, weight: QuantizedWeight):
        import torch

        super().__init__(problem, padded(weight.weight))
        self._scale = padded(weight.scale[:, None])[:, 0]
        self._V = problem.V
        form = {"fp8": fp8_logits, "int8": int8_logits}[problem.weights]
        # A copy of the code object, because Dynamo refuses its ninth shape.
        copy = FunctionType(form.__code__.replace(), form.__globals__)
        self._logits = torch.compile(copy, fullgraph=True, dynamic=False)

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        logits = self._logits(hidden, self._weight, self._scale)[:, : self._V]
        return gumbel_argmax(logits, seed, offset, self._temperature)


def unsupported_reason(problem: Problem) -> str | None:
    """Return why a problem is not supported, or None."""
    if not problem.weights:
        return "takes int8 or fp8 heads only (--weights)"
    return None if problem.D % 16 == 0 else f"takes D of a multiple of 16, not {problem.D}"


PROVIDER = Provider(
    name="scaled_matmul",
    label="Scaled matmul + one-pass Gumbel argmax",
    kind=Kind.EXACT,
    requires=("triton",),
    supports=unsupported_reason,
    capabilities=Capabilities(
        host_sync_free=True,
        quantized=QUANTIZED,
        known_deviation=0.1,  # of hidden in one byte, with logits of standard deviation 3
    ),
    build=_ScaledMatmul,
)
