"""Gumbel-max over stored logits, one pass, one launch: the fastest sampler that is not fused.

Algorithm I.1 of the FlashSampling paper, parallel over chunks of the vocabulary, and with one
Gumbel for 32 tokens: cuBLAS writes the logits, this kernel reads them once, adds the same group
noise as the fused kernel and keeps the best candidate; the last program of a row decodes its token.
"""

from __future__ import annotations

from fsbench.kernels.providing.launches import WorkspaceLaunch, noise_map, vocab_shard
from fsbench.kernels.providing.one_pass import gumbel_argmax
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Provider, Shard, Tensor, padded


class _GumbelArgmax(WorkspaceLaunch):
    def __init__(self, problem: Problem, weight: Tensor):
        super().__init__(problem, padded(weight))
        self._V = len(weight)

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        logits = (hidden @ self._weight.T)[:, : self._V]
        return gumbel_argmax(logits, seed, offset, self._temperature)


class _Gathered(_GumbelArgmax):
    """Gather the packed best candidates of all ranks, 8 bytes per row and rank."""

    def __init__(self, problem: Problem, shard: Shard):
        self._head = vocab_shard(shard)
        super().__init__(problem, self._head.weight)

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        from fsbench.kernels.shard.merge_keys import merge_keys

        logits = (hidden @ self._weight.T)[:, : self._V]
        first = self._head.first_token
        keys = gumbel_argmax(logits, seed, offset, self._temperature, first_token=first, keys=True)
        return merge_keys(self._head.gather(keys))


PROVIDER = Provider(
    name="gumbel_argmax",
    label="cuBLAS + one-pass Gumbel argmax",
    kind=Kind.EXACT,
    requires=("triton",),
    noise_map=noise_map,
    capabilities=Capabilities(
        noise="group", zero_temperature=True, host_sync_free=True, batch_invariant=True
    ),
    build=_GumbelArgmax,
    build_sharded=_Gathered,
    presets=("quick", "lean", "tp"),
)
