"""`screened_sample`: the same tokens from an int8 copy of the head and few of its rows.

May import: the launch of truncated, the api of fused, call, device, checks, noise, configs.
"""

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.kernels.screened import launch as launch
else:
    # It needs Triton: a CPU does without.
    __getattr__ = lazy_getattr(__name__, "launch")
