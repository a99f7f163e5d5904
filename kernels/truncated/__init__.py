"""`truncated_sample`: top-k, top-p, min-p and penalties over logits that the fused kernel leaves.

May import: the launch of fused, call, device, checks, noise, configs.
"""

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.kernels.truncated import launch as launch
else:
    # It needs Triton: a CPU does without.
    __getattr__ = lazy_getattr(__name__, "launch")
