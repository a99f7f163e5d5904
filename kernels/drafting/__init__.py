"""`draft_sample`: a draft head of a reduced vocabulary, with the noise of the target's tokens.

May import: the api and launch of fused, screened and truncated, launch, device, checks, noise,
configs.
"""

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.kernels.drafting import launch as launch
else:
    # It needs Triton, without which a CPU uses the reference.
    __getattr__ = lazy_getattr(__name__, "launch")
