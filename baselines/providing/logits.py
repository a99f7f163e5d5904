"""The front of every unfused sampler: logits by one matmul, then the temperature.

The matmul is the library's (cuBLAS on a GPU): the one kernel all competitors share with
`matmul_only`, so what they add to that floor is the cost of sampling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fsbench.baselines.providing.gathered import Gather


def matmul_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [B, D] x weight [V, D] -> logits [B, V] in their dtype, accumulated in fp32.

    In bf16 the logits are rounded to 8 bits of mantissa: every sampler that starts here draws from
    the softmax of the rounded logits, as serving engines do.
    """
    return hidden @ weight.T


def scaled_logits(
    hidden: Tensor, weight: Tensor, temperature: float, gather: Gather | None = None
) -> Tensor:
    """[B, V] fp32 logits / temperature; cast before the division and softmax, as the paper does.

    gather: brings the logits of a sharded weight together (providing.gathered).
    """
    logits = matmul_logits(hidden, weight)
    if gather is not None:
        logits = gather(logits)
    return logits.float() / temperature


def float_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[B, V] fp32 logits straight from the matmul: its fp32 accumulator, stored unrounded.

    For samplers that read fp32: writing it at once (4 bytes per logit) replaces write 2, read 2,
    write 4 of a bf16 matmul and a cast. CUDA only (torch's `out_dtype`), bf16 or fp16 inputs.
    """
    import torch

    return torch.mm(hidden, weight.T, out_dtype=torch.float32)
