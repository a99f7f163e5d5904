"""`screened_sample`: the same tokens from an int8 copy of the head and few of its rows.

May import: the api of fused, call, device, checks, noise, configs.
"""

from typing import TYPE_CHECKING

from fsbench.late import late

if TYPE_CHECKING:
    from fsbench.kernels.screened import hopper_launch as hopper_launch
    from fsbench.kernels.screened import launch as launch

# `launch` needs Triton, `hopper_launch` its experimental Gluon: a CPU does without.
__getattr__ = late(__name__, "hopper_launch", "launch")
