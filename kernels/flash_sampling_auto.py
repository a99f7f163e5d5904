"""`flash_sample` as users call it: kernel="auto", noise="auto" (kernels/configs/choice.py).

flash_sampling and flash_sampling_hopper force one kernel each; this sampler runs the one that
flash_sample chooses, with the tile shapes and split blocks that it chooses. A module named
flash_sample would replace the function in fsbench.kernels once it is imported.
"""

from __future__ import annotations

from fsbench.kernels.providing.launches import flash_sampler

PROVIDER = flash_sampler("flash_sampling_auto", "flash_sample", kernel="auto")
