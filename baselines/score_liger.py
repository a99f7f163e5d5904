"""Log-probabilities of given tokens by Liger-Kernel's fused CuTe DSL kernel for Hopper.

    -LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, targets, T)

The logits stay on chip. The packages are not dependencies: `pip install liger-kernel[cutedsl]`, and
for CUDA 13 `nvidia-cutlass-dsl[cu13]`. Before each call Liger validates the targets, and the
host waits; LIGER_SCALED_CE_SM90_VALIDATE_TARGETS=0 turns this off. On other GPUs Liger uses
products of 512 rows instead of its kernel, so this sampler is for compute capability 9.0 only.
"""

from __future__ import annotations

from collections.abc import Callable

from fsbench.baselines.providing.logits import row_targets
from fsbench.errors import UnsupportedProblem
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, Tensor


def fused_loss() -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """Import Liger-Kernel and return its loss, which has gradients.

    The loss takes hidden, weight, targets [B] and a temperature, and returns the negative
    log-probabilities of the targets, fp32 [B].
    """
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
        LigerFusedLinearScaledCrossEntropyFunction,
    )

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
        result: Tensor = LigerFusedLinearScaledCrossEntropyFunction.apply(
            hidden, weight, targets, float(temperature)
        )
        return result

    return loss


def build(problem: Problem, weight: Tensor) -> Launch:
    import torch

    if torch.cuda.get_device_capability(weight.device) != (9, 0):
        raise UnsupportedProblem("Liger's kernel is for GPUs of compute capability 9.0")
    loss, targets = fused_loss(), row_targets(problem, weight.device)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return -loss(hidden, weight, targets, problem.temperature)

    return launch


PROVIDER = Provider(
    name="score_liger",
    label="Liger-Kernel, fused (CuTe DSL)",
    kind=Kind.SCORE,
    build=build,
    requires=("liger_kernel", "cutlass"),
    capabilities=Capabilities(dtypes=("bf16",), fused=True, graph_safe=False),
    presets=("score",),
)
