"""Filters from the screen: `truncated_sample` of a ScreenedHead, for top-k of up to 64.

May import: what the room may, and the launch of truncated.
"""

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.kernels.screened.filtered import launch as launch
else:
    # It needs Triton: a CPU does without.
    __getattr__ = lazy_getattr(__name__, "launch")
