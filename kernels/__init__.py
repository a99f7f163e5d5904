"""The fused kernels and what shares their device code: one sampler per file.

`flash_sample` is the function a serving engine calls, and `verify_drafts` what it calls after it
in a speculative step (docs/using-the-kernel.md); `truncated_sample` has top-k, top-p, min-p and
penalties (docs/truncated.md).
"""

from fsbench.kernels._flash_sample import Sample, describe, flash_sample
from fsbench.kernels._flash_sampling_config import TileConfig
from fsbench.kernels._hopper_config import HopperConfig
from fsbench.kernels._speculative import Verified, verify_drafts
from fsbench.kernels._token_history import Penalties, TokenHistory
from fsbench.kernels._truncated_sample import TruncatedSample, truncated_sample
from fsbench.kernels._vocab_shard import VocabShard, even_blocks

__all__ = [
    "HopperConfig",
    "Penalties",
    "Sample",
    "TileConfig",
    "TokenHistory",
    "TruncatedSample",
    "Verified",
    "VocabShard",
    "describe",
    "even_blocks",
    "flash_sample",
    "truncated_sample",
    "verify_drafts",
]
