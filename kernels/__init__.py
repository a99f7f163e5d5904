"""The fused kernels: one sampler per file in this folder, their parts in its subfolders.

`flash_sample` is the function a serving engine calls; `draft_sample`, `step_noise` and
`verify_drafts` are for speculative steps (docs/guide/speculation.md); `truncated_sample` has top-k,
top-p, min-p and penalties (docs/guide/filters-and-penalties.md); `score` has the log-probabilities
of given tokens (docs/guide/log-probabilities.md); `screened_sample` draws the tokens of token noise
from a head with an int8 copy, which `prepare_head` makes, and reads about half of the bytes
(docs/guide/screened-head.md). These calls take a `QuantizedHead`, stored in int8 or fp8, in place
of a weight (docs/guide/quantized-heads.md).

Each folder imports only folders before it: configs, noise, checks, device, shard, launch, fused,
truncated and scoring, screened, drafting and warming, providing, the sampler files. A name below is
imported at its first use, so that listing the samplers needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.kernels.configs.hopper import HopperConfig
    from fsbench.kernels.configs.portable import TileConfig
    from fsbench.kernels.configs.screen import HopperScreenConfig, ResolveConfig, ScreenConfig
    from fsbench.kernels.drafting.api import draft_sample
    from fsbench.kernels.drafting.vocabulary import DraftVocabulary, prepare_draft_vocabulary
    from fsbench.kernels.fused.api import describe, flash_sample
    from fsbench.kernels.fused.drafts import Verified, step_noise, verify_drafts
    from fsbench.kernels.launch.quantized import QuantizedHead, quantize_head
    from fsbench.kernels.launch.result import Sample, Score, Screened, TruncatedSample
    from fsbench.kernels.scoring.api import score
    from fsbench.kernels.screened.api import screened_sample
    from fsbench.kernels.screened.head import ScreenedHead, prepare_head
    from fsbench.kernels.screened.head_file import load_head, save_head
    from fsbench.kernels.shard.vocab_shard import VocabShard, even_blocks
    from fsbench.kernels.truncated.api import truncated_sample
    from fsbench.kernels.truncated.penalties import Penalties, TokenHistory

__all__ = [
    "DraftVocabulary",
    "HopperConfig",
    "HopperScreenConfig",
    "Penalties",
    "QuantizedHead",
    "ResolveConfig",
    "Sample",
    "Score",
    "ScreenConfig",
    "Screened",
    "ScreenedHead",
    "TileConfig",
    "TokenHistory",
    "TruncatedSample",
    "Verified",
    "VocabShard",
    "describe",
    "draft_sample",
    "even_blocks",
    "flash_sample",
    "load_head",
    "prepare_draft_vocabulary",
    "prepare_head",
    "quantize_head",
    "save_head",
    "score",
    "screened_sample",
    "step_noise",
    "truncated_sample",
    "verify_drafts",
]

if not TYPE_CHECKING:  # to mypy a name that is not imported above is an error
    __getattr__ = lazy_getattr(
        __name__,
        launch__quantized=("QuantizedHead", "quantize_head"),
        launch__result=("Sample", "Score", "Screened", "TruncatedSample"),
        configs__hopper=("HopperConfig",),
        configs__portable=("TileConfig",),
        configs__screen=("HopperScreenConfig", "ResolveConfig", "ScreenConfig"),
        drafting__api=("draft_sample",),
        drafting__vocabulary=("DraftVocabulary", "prepare_draft_vocabulary"),
        fused__api=("describe", "flash_sample"),
        fused__drafts=("Verified", "step_noise", "verify_drafts"),
        scoring__api=("score",),
        screened__api=("screened_sample",),
        screened__head_file=("load_head", "save_head"),
        screened__head=("ScreenedHead", "prepare_head"),
        shard__vocab_shard=("VocabShard", "even_blocks"),
        truncated__api=("truncated_sample",),
        truncated__penalties=("Penalties", "TokenHistory"),
    )


def __dir__() -> list[str]:
    return __all__
