"""The fused kernel for Hopper, in Gluon: TMA, wgmma and warp specialization.

May import what `fused` may, but nothing of the portable kernel.
"""

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.kernels.fused.hopper import operands as operands
else:
    # Gluon is an experimental part of Triton, which the portable kernel does not need.
    __getattr__ = lazy_getattr(__name__, "operands")
