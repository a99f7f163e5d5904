"""Sampling fused into the matmul: `flash_sample`, its two kernels, and `verify_drafts`.

May import: call, shard, device, checks, noise, configs.
"""

from typing import TYPE_CHECKING

from fsbench.late import late

if TYPE_CHECKING:
    from fsbench.kernels.fused import hopper_launch as hopper_launch
    from fsbench.kernels.fused import launch as launch

# `launch` needs Triton, `hopper_launch` its experimental Gluon: a CPU does without.
__getattr__ = late(__name__, "hopper_launch", "launch")
