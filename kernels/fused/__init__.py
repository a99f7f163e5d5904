"""Sampling fused into the matmul: `flash_sample`, its two kernels, and `verify_drafts`.

May import: launch, shard, device, checks, noise, configs.
"""

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.kernels.fused import launch as launch
else:
    # It needs Triton, which CPU tensors do not.
    __getattr__ = lazy_getattr(__name__, "launch")
