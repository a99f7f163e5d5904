"""The fused kernels and what shares their device code: one sampler per file.

`flash_sample` is the function a serving engine calls, and `verify_drafts` what it calls after it
in a speculative step (docs/using-the-kernel.md); `truncated_sample` has top-k, top-p, min-p and
penalties (docs/truncated.md); `screened_sample` draws the tokens of token noise from a head with an
int8 copy, which `prepare_head` makes, at about half of the bytes (docs/screened-head.md).
"""

from fsbench.kernels._flash_sample import Sample, describe, flash_sample
from fsbench.kernels._flash_sampling_config import TileConfig
from fsbench.kernels._hopper_config import HopperConfig
from fsbench.kernels._screened_config import HopperScreenConfig, ResolveConfig, ScreenConfig
from fsbench.kernels._screened_head import ScreenedHead, load_head, prepare_head, save_head
from fsbench.kernels._screened_sample import Screened, screened_sample
from fsbench.kernels._speculative import Verified, verify_drafts
from fsbench.kernels._token_history import Penalties, TokenHistory
from fsbench.kernels._truncated_sample import TruncatedSample, truncated_sample
from fsbench.kernels._vocab_shard import VocabShard, even_blocks

__all__ = [
    "HopperConfig",
    "HopperScreenConfig",
    "Penalties",
    "ResolveConfig",
    "Sample",
    "ScreenConfig",
    "Screened",
    "ScreenedHead",
    "TileConfig",
    "TokenHistory",
    "TruncatedSample",
    "Verified",
    "VocabShard",
    "describe",
    "even_blocks",
    "flash_sample",
    "load_head",
    "prepare_head",
    "save_head",
    "screened_sample",
    "truncated_sample",
    "verify_drafts",
]
