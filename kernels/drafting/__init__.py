"""`draft_sample`: a draft head of a reduced vocabulary, with the noise of the target's tokens.

May import: the api and launch of fused, screened and truncated, call, device, checks, noise,
configs.
"""

from typing import TYPE_CHECKING

from fsbench.late import late

if TYPE_CHECKING:
    from fsbench.kernels.drafting import launch as launch
else:
    # It needs Triton: a CPU does without.
    __getattr__ = late(__name__, "launch")
