"""`Request`: the checked arguments of a call, as launches take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fsbench.kernels.shard.vocab_shard import VocabShard


class Request(NamedTuple):
    """The checked arguments of flash_sample, as it documents them.

    weight, shard: if the vocabulary is sharded, the shard's own rows, and the shard.
    merge_later: return packed candidates of this weight (noise.keys) in place of tokens.
    """

    hidden: Tensor
    weight: Tensor
    seed: Tensor
    offset: Tensor | None
    temperature: float | Tensor
    soft_cap: float | None
    bias: Tensor | None
    mask: Tensor | None
    vocab_size: int
    num_samples: int
    noise: str
    shard: VocabShard | None = None
    merge_later: bool = False
