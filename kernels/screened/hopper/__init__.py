"""The Hopper screen, in Gluon: TMA, wgmma and warp specialization.

May import what `screened` may, but nothing of the portable kernel.
"""

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.kernels.screened.hopper import kernel as kernel
else:
    # Gluon is an experimental part of Triton: the portable screen works without it.
    __getattr__ = lazy_getattr(__name__, "kernel")
