"""`truncated_sample`: top-k, top-p, min-p and penalties over logits that the fused kernel stores.

May import: the launch of fused, call, device, checks, noise, configs.
"""

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.kernels.truncated import launch as launch
else:
    # The launch needs Triton; a CPU does not.
    __getattr__ = lazy_getattr(__name__, "launch")
