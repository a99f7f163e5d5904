"""The fused kernels and what shares their device code: one sampler per file.

`flash_sample` is the function a serving engine calls, and `verify_drafts` what it calls after it
in a speculative step (docs/using-the-kernel.md).
"""

from fsbench.kernels._flash_sample import Sample, flash_sample
from fsbench.kernels._speculative import Verified, verify_drafts

__all__ = ["Sample", "Verified", "flash_sample", "verify_drafts"]
