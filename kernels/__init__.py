"""The fused kernels and what shares their device code: one sampler per file.

`flash_sample` is the function a serving engine calls (docs/using-the-kernel.md).
"""

from fsbench.kernels._flash_sample import Sample, flash_sample

__all__ = ["Sample", "flash_sample"]
