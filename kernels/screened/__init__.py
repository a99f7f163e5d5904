"""`screened_sample`: the same tokens from an int8 copy of the head and few of its rows.

May import: the launch of truncated, the api of fused, call, device, checks, noise, configs.
"""

from typing import TYPE_CHECKING

from fsbench.late import late

if TYPE_CHECKING:
    from fsbench.kernels.screened import launch as launch
else:
    # It needs Triton: a CPU does without.
    __getattr__ = late(__name__, "launch")
