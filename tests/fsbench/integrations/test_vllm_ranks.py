"""The plug-in on two ranks of a model: both draw the tokens that one GPU would draw."""

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

FIRST = 352  # rows of rank 0; not a multiple of 256, so that it copies rows of rank 1
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "frequency": {"frequency_penalty": 0.7, "logit_bias": {5: 2.0}},
    "grammar": {},
    "logprobs": {"logprobs": 0},
    "top logprobs": {"logprobs": 3},
}


class ShardedModel(Model):
    """A model with this rank's rows of the head; its logits are those after vLLM's all-gather."""

    def __init__(self, rank: int):
        super().__init__(padding=0)
        self.whole = self.lm_head
        self.rows = slice(0, FIRST) if rank == 0 else slice(FIRST, V)
        self.lm_head = LMHead(self.whole.weight[self.rows].clone(), V)
        indices = self.lm_head.shard_indices
        indices.org_vocab_start_index, indices.org_vocab_end_index = self.rows.start, self.rows.stop

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.whole, hidden_states)

    def load_weights(self, weights: Any) -> set[str]:
        ((_, weight),) = weights
        self.whole.weight.copy_(weight)
        self.lm_head.weight.copy_(weight[self.rows])
        return {"lm_head.weight"}


def loaded(patch: pytest.MonkeyPatch, model: Model, ranks: int = 1) -> Any:
    modules = install(patch)
    patch.setenv("FSBENCH_VLLM", "flash_sample")
    patch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "")
    group = types.SimpleNamespace(cpu_group=dist.group.WORLD, device_group=dist.group.WORLD)
    modules["vllm.distributed.parallel_state"].get_tp_group = lambda: group
    plugin.register()
    config = types.SimpleNamespace(tensor_parallel_size=ranks)
    runner = modules["vllm.v1.worker.gpu.model_runner"].GPUModelRunner(
        model, parallel_config=config
    )
    runner.load_model()
    return runner


def outputs(runner: Any, weight: torch.Tensor) -> list[dict[str, list[int]]]:
    """Return the tokens of requests before and after a new weight is loaded."""
    results = []
    for shift in (0, 9):
        if shift:
            runner.model.load_weights([("lm_head.weight", weight.roll(shift, 0))])
        play = Play(runner)
        for kind, settings in KINDS.items():
            play.add(kind, params(**settings, seed=len(kind)), [5, 6])
        play.add("filtered", params(top_k=5, seed=1), [5, 6])
        for _ in range(2):
            play.step(None, {"grammar": [3, 400, 699]})
        results.append({name: play.output(name) for name in play.slots})
    return results


def on_rank(rank: int, ranks: int) -> tuple[Any, ...]:
    """Return (tokens, counters, bytes of the copy, why an unsupported model is left to vLLM)."""
    with pytest.MonkeyPatch.context() as patch:
        model = ShardedModel(rank)
        runner = loaded(patch, model, ranks)
        tokens = outputs(runner, model.whole.weight)
        counts = runner._fsbench.sampling.counts.as_dict()
        copied = runner.model_memory_usage - 1000
    with pytest.MonkeyPatch.context() as patch:
        model = ShardedModel(rank)
        if rank == 1:  # one rank is enough
            model.lm_head.bias = torch.zeros(V - FIRST)
        reason = loaded(patch, model, ranks)._fsbench.sampling.disabled_reason
    return tokens, counts, copied, reason


def test_ranks_draw_what_one_gpu_draws():
    (tokens, counts, copied, reason), second = on_ranks(2, on_rank, 2)
    assert second == (tokens, counts, 0, reason)
    assert copied == 512 * 64 * 2 and reason == "model: LM head with a bias"
    assert counts == {"served": 4 * len(KINDS), "left": {"top-k, top-p, min-p": 4}}
    with pytest.MonkeyPatch.context() as patch:
        model = Model(padding=0)
        alone = outputs(loaded(patch, model), model.lm_head.weight)
    for sharded, whole in zip(tokens, alone, strict=True):
        assert {kind: sharded[kind] for kind in KINDS} == {kind: whole[kind] for kind in KINDS}
    assert tokens[0] != tokens[1]
