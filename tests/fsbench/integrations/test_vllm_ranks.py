"""The plug-in over two ranks of a model: what one rank draws, both draw, as one GPU would."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_vllm import LMHead, Model, install
from fake_vllm_states import V, params
from ranks import on_ranks
from vllm_play import Play

from fsbench.integrations import vllm as plugin

FIRST = 352  # rows of rank 0; no multiple of 256, so that it has a copy with rows of rank 1
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "frequency": {"frequency_penalty": 0.7, "logit_bias": {5: 2.0}},
    "grammar": {},
    "logprobs": {"logprobs": 0},
    "top logprobs": {"logprobs": 3},
}


class Sharded(Model):
    """This rank's rows of the head; logits are those of all, as after vLLM's all-gather."""

    def __init__(self, rank: int):
        super().__init__(padding=0)
        self.whole = self.lm_head
        rows = slice(0, FIRST) if rank == 0 else slice(FIRST, V)
        self.lm_head = LMHead(self.whole.weight[rows].clone(), V)
        indices = self.lm_head.shard_indices
        indices.org_vocab_start_index, indices.org_vocab_end_index = rows.start, rows.stop
        self.rows = rows

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.whole, hidden_states)

    def load_weights(self, weights: Any) -> set[str]:
        ((_, weight),) = weights
        self.whole.weight.copy_(weight)
        self.lm_head.weight.copy_(weight[self.rows])
        return {"lm_head.weight"}


def loaded(patch: pytest.MonkeyPatch, **parts: Any) -> Any:
    found = install(patch)
    patch.setenv("FSBENCH_VLLM", "flash_sample")
    patch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "")
    group = types.SimpleNamespace(cpu_group=dist.group.WORLD, device_group=dist.group.WORLD)
    found["vllm.distributed.parallel_state"].get_tp_group = lambda: group
    plugin.register()
    runner = found["vllm.v1.worker.gpu.model_runner"].GPUModelRunner(**parts)
    runner.load_model()
    return runner


def drawn(runner: Any, steps: int = 3) -> dict[str, list[int]]:
    play = Play(runner)
    for kind, asked in KINDS.items():
        play.add(kind, params(**asked, seed=len(kind)), [5, 6])
    play.add("filtered", params(top_k=5, seed=1), [5, 6])
    for _ in range(steps):
        play.step(None, {"grammar": [3, 400, 699]})
    return {name: play.output(name) for name in play.slots}


def on_rank(rank: int, ranks: int) -> tuple[Any, ...]:
    """(tokens, those of new weights, counters, bytes of the copy, why an unfit model is left)."""
    with pytest.MonkeyPatch.context() as patch:
        of_ranks = types.SimpleNamespace(tensor_parallel_size=ranks)
        runner = loaded(patch, model=Sharded(rank), parallel_config=of_ranks)
        before = drawn(runner)
        counts = runner._fsbench.sampling.counts.as_dict()
        runner.model.load_weights([("lm_head.weight", runner.model.whole.weight.roll(9, 0))])
        after = drawn(runner)
        copied = runner.model_memory_usage - 1000
    with pytest.MonkeyPatch.context() as patch:
        model = Sharded(rank)
        if rank == 1:  # one rank is enough
            model.lm_head.bias = torch.zeros(V - FIRST)
        unfit = loaded(patch, model=model, parallel_config=of_ranks)
        return before, after, counts, copied, unfit._fsbench.sampling.lacks


def test_ranks_draw_what_one_gpu_draws():
    (before, after, counts, copied, lacks), second = on_ranks(2, on_rank, 2)
    assert second == (before, after, counts, 0, lacks)
    assert copied == 512 * 64 * 2 and lacks == "model: LM head with a bias"
    assert counts == {"served": 3 * len(KINDS), "left": {"top-k, top-p, min-p": 3}}
    with pytest.MonkeyPatch.context() as patch:
        runner = loaded(patch, model=Model(padding=0))
        alone = drawn(runner)
        runner.model.load_weights([("lm_head.weight", runner.model.lm_head.weight.roll(9, 0))])
        again = drawn(runner)
    for kind in KINDS:
        assert before[kind] == alone[kind] and after[kind] == again[kind], kind
