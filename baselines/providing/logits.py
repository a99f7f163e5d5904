"""The front of every unfused sampler: logits by one matmul, then the temperature.

The matmul is the library's (cuBLAS on a GPU): the one kernel all competitors share with
`matmul_only`, so what they add to that floor is the cost of sampling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fsbench.baselines.providing.gathered import Gather


def matmul_logits(hidden: Tensor, weight: Tensor, V: int) -> Tensor:
    """hidden [B, D] x weight [>= V, D] -> logits [B, V] in their dtype, accumulated in fp32.

    weight: fsbench.provider.padded. Of a padded one the logits are a view.

    In bf16 the logits are rounded to 8 bits of mantissa: every sampler that starts here draws from
    the softmax of the rounded logits, as serving engines do.
    """
    return (hidden @ weight.T)[:, :V]


def scaled_logits(
    hidden: Tensor, weight: Tensor, V: int, temperature: float, gather: Gather | None = None
) -> Tensor:
    """[B, V] fp32 logits / temperature, contiguous; cast before the division, as the paper does.

    gather: brings the logits of a sharded weight together (providing.gathered).
    """
    logits = matmul_logits(hidden, weight, V)
    if gather is not None:
        logits = gather(logits)
    return logits.float() / temperature


def float_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[B, rows of weight] fp32 logits straight from the matmul: its accumulator, unrounded.

    For samplers that read fp32: writing it at once (4 bytes per logit) replaces write 2, read 2,
    write 4 of a bf16 matmul and a cast. CUDA only (torch's `out_dtype`), bf16 or fp16 inputs.
    """
    import torch

    return torch.mm(hidden, weight.T, out_dtype=torch.float32)
