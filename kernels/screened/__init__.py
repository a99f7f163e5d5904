"""`screened_sample`: the tokens of flash_sample from an int8 copy of the head and few of its rows.

May import: the launch of truncated, the api of fused, launch, device, checks, noise, configs.
"""

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.kernels.screened import filters as filters
    from fsbench.kernels.screened import launch as launch
else:
    # These need Triton, which a CPU does not.
    __getattr__ = lazy_getattr(__name__, "filters", "launch")
