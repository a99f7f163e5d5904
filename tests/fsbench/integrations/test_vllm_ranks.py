"""The plug-in on two ranks of a model: both draw the tokens that one GPU would draw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from fake_vllm import LMHead, Model, install
from fake_vllm_states import V, params
from ranks import on_ranks
from typer.testing import CliRunner
from vllm_play import Play

from fsbench.cli import app
from fsbench.integrations import vllm as plugin
from fsbench.integrations.compile_ahead import CompileAhead, EngineSpec, engine_calls, shard_of
from fsbench.integrations.draw import FlashSampleDraw, Head
from fsbench.integrations.draw_kinds import warm
from fsbench.integrations.vllm_0_26 import engine_spec
from fsbench.kernels.warming import offline

FIRST = 352  # tokens of rank 0; not a multiple of 256, so that it copies rows of rank 1
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
        rows = self.whole.weight[self.rows]
        padding = rows.new_zeros(FIRST - len(rows), rows.shape[1])
        self.lm_head = LMHead(torch.cat((rows, padding)), V)
        indices = self.lm_head.shard_indices
        indices.org_vocab_start_index, indices.org_vocab_end_index = self.rows.start, self.rows.stop

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.whole, hidden_states)

    def load_weights(self, weights: Any) -> set[str]:
        ((_, weight),) = weights
        self.whole.weight.copy_(weight)
        rows = weight[self.rows]
        self.lm_head.weight[: len(rows)] = rows
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
        head = runner._fsbench._head.head
        spec = EngineSpec.of_head("flash_sample", head, runner.max_num_reqs, True)
        assert spec == engine_spec(runner, "flash_sample") and (spec.ranks, spec.rank) == (2, rank)
        assert engine_spec(runner, "screened") is None
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


def compiled_by_a_rank(rank: int, ranks: int, cache: str) -> list[str]:
    """Draw all kinds from a shard; return the kernels that were not compiled ahead."""
    os.environ["TRITON_CACHE_DIR"] = cache
    spec = EngineSpec("flash_sample", 40_000, 40_000, 1024, "bf16", None, 300, True, ranks, rank)
    ahead = CompileAhead(spec)
    assert ahead.wait(spec.draw_kinds()), ahead.failure
    compiled: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        compiled.extend([] if cache_hit else [src.name])

    triton.knobs.compilation.listener = listen
    rows = torch.zeros(spec.rows // ranks, spec.D, dtype=torch.bfloat16, device="cuda")
    head = Head(shard_of(rows, dist.group.WORLD, spec.V, spec.max_rows), spec.V)
    assert EngineSpec.of_head(spec.sampler, head, spec.max_rows, spec.raw) == spec
    draw, hidden = FlashSampleDraw(head), rows[: spec.max_rows]
    for kind in spec.draw_kinds():
        warm(draw, kind, hidden, spec.V)
    return compiled


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_ranks_find_what_was_compiled_ahead(tmp_path):
    assert on_ranks(2, compiled_by_a_rank, 2, str(tmp_path), backend="nccl") == [[], []]


def test_warm_compiles_for_all_ranks(monkeypatch):
    names: list[str] = []

    def compiled(chip: Any, calls: Any, processes: int) -> list[Any]:
        names.extend(map(str, calls))
        return []

    monkeypatch.setattr(offline, "compiled", compiled)
    head = ("--d", "64", "--v", "1024", "--gpu", "h100", "--batch", "1")
    done = CliRunner().invoke(app, ["warm", *head, "--request", "vllm", "--tp", "2"])
    assert done.exit_code == 0, done.output
    spec = EngineSpec("flash_sample", 1024, 1024, 64, "bf16", None, 1, ranks=2)
    assert names == [str(call) for each in spec.of_all_ranks() for call in engine_calls(each)]
    assert len(set(names)) == 2 * 8
    for wrong in (("--request", "plain", "--tp", "2"), ("--request", "vllm", "--tp", "3")):
        assert "--tp: expected" in str(CliRunner().invoke(app, ["warm", *head, *wrong]).exception)


LAUNCHED = """
import json, sys
from fsbench.integrations.compile_ahead import EngineSpec, engine_calls
from fsbench.kernels.warming import offline
offline.use_cpu_guard()
for spec in EngineSpec(*json.loads(sys.argv[1])).of_all_ranks():
    for call in engine_calls(spec):
        with offline.without_gpu(offline.CHIPS["h100"]) as launches:
            call()
        for launch in launches:
            if launch.kernel.__name__ == "flash_sampling_kernel":
                constants = launch.compile.args[4]
                print(spec.rank, constants[(launch.kernel.arg_names.index("RANKS"),)])
                break
"""


@pytest.mark.full
def test_the_kernels_of_a_shard_are_known_without_its_peers():
    spec = EngineSpec("flash_sample", 4096, 4096, 64, "bf16", None, 1, ranks=2)
    command = [sys.executable, "-c", LAUNCHED, json.dumps(spec)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0 2"] * 8 + ["1 2"] * 8
