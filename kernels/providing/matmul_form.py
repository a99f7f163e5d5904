"""The portable kernel without sampling, with which `fsbench run --breakdown` compares it.

It accumulates the same tiles of logits in the same way. It keeps only the largest logit of each
row, so that the compiler cannot remove the matmul; no noise, no token, no merging of candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsbench.kernels.configs.choice import default_config
from fsbench.kernels.configs.gpu import bind_and_launch, launching_on
from fsbench.kernels.device.mainloop import program_share, tile_logits
from fsbench.kernels.launch.operands import load_operands, with_absent_rows
from fsbench.problem import Problem
from fsbench.provider import Launch


@triton.jit(do_not_specialize=["B", "V"])
def _matmul_form_kernel(
    hidden,  # [B, D] descriptor (USE_TMA) or pointer
    weight,  # [V, D] descriptor (USE_TMA) or pointer
    largest_ptr,  # [programs per block of rows, B] fp32, out
    B,
    V,
    D,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V_ON_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    pid_b, pid_v, programs_v = program_share(B, BLOCK_B)
    b0 = pid_b * BLOCK_B
    rows = b0 + tl.arange(0, BLOCK_B)
    largest = tl.full((BLOCK_B,), float("-inf"), tl.float32)
    for tile_v in tl.range(pid_v, tl.cdiv(V, BLOCK_V), programs_v, flatten=FLATTEN):
        logits = tile_logits(
            hidden, weight, b0, tile_v * BLOCK_V, tile_v * BLOCK_V, B, V, D,
            BLOCK_B, BLOCK_V, BLOCK_D, V_ON_M, USE_TMA,
        )  # fmt: skip
        largest = tl.maximum(largest, tl.max(logits, axis=1))
    tl.store(largest_ptr + pid_v * B + rows, largest, mask=rows < B)


def build_matmul_form(problem: Problem, weight: Tensor, noise: str = "group") -> Launch:
    """Build the launch of Provider.matmul_form.

    It returns the largest logit of each program and row, fp32 [programs, B]. Logits beyond the
    vocabulary are 0 and count: a tile is not cut where the vocabulary ends.

    Args:
        noise: Form of noise of the sampler, which decides its tile shapes.
    """
    B, D, V = problem.B, problem.D, problem.V
    config = default_config(B, D, weight.device, weight.element_size(), noise)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        operands = load_operands(hidden, weight, V, config)
        largest = torch.empty(operands.programs_v, B, dtype=torch.float32, device=hidden.device)
        rows = with_absent_rows(hidden, noise, operands)
        loaded_hidden, loaded_weight = operands.load(rows, weight)
        with launching_on(hidden.device):
            bind_and_launch(
                _matmul_form_kernel,
                operands.grid,
                hidden=loaded_hidden,
                weight=loaded_weight,
                largest_ptr=largest,
                B=B,
                V=V,
                D=D,
                **operands.tiles,
            )
        return largest

    return launch
