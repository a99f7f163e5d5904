"""The vLLM plug-in's hooks: models and engines that it takes, what it refuses, new weights."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import tomllib
from typing import Any

import pytest
import torch
from fake_vllm import Model, install
from fake_vllm_states import D, params
from torch.profiler import profile
from tree import ROOT
from vllm_play import Play

from fsbench.errors import EngineMismatch, InvalidArgument
from fsbench.integrations import entry, vllm_head, vllm_runner
from fsbench.integrations import vllm as plugin
from fsbench.integrations.draw import DRAW_MARK, MATMUL_MARK

RUNNER = "vllm.v1.worker.gpu.model_runner"
RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
WORKER = "vllm.v1.worker.gpu_worker"
OUTPUT = "vllm.v1.worker.gpu.sample.output"


def is_served(runner: Any) -> bool:
    """Return whether the plug-in draws a step of two plain requests."""
    play = Play(runner)
    for number in range(2):
        play.add(str(number), params(seed=number), [5, 6])
    play.step()
    served = not runner.sample_calls()
    runner.calls.clear()
    return served


def counts(runner: Any) -> dict[str, Any]:
    return runner._fsbench.sampling.counts.as_dict()


def worker_of(runner: Any) -> Any:
    worker = runner.modules[WORKER].Worker()
    worker.model_runner = runner
    return worker


@pytest.fixture
def switched_on(monkeypatch, vllm):
    """The fake's modules, with FSBENCH_VLLM set."""
    monkeypatch.setenv("FSBENCH_VLLM", "flash_sample")
    return vllm


def test_off_unless_switched_on_and_hooked_once(monkeypatch, vllm):
    before = vars(vllm[RUNNER].GPUModelRunner).copy()
    entry.register()
    assert vars(vllm[RUNNER].GPUModelRunner) == before
    monkeypatch.setenv("FSBENCH_VLLM", "flash_sample")
    entry.register()
    hooked = vllm[RUNNER].GPUModelRunner.sample
    entry.register()
    assert vllm[RUNNER].GPUModelRunner.sample is hooked is not before["sample"]


def test_the_entry_point_is_declared():
    """vLLM finds it by this group."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = config["project"]["entry-points"]["vllm.general_plugins"]["fsbench"]
    module, _, name = declared.partition(":")
    assert getattr(importlib.import_module(module), name) is entry.register


def test_an_unknown_sampler_stops_the_engine(monkeypatch, vllm):
    monkeypatch.setenv("FSBENCH_VLLM", "flash_smaple")
    with pytest.raises(InvalidArgument, match=r"FSBENCH_VLLM: expected flash_sample.*flash_smaple"):
        entry.register()


@pytest.mark.parametrize("version", ["0.22.1", "0.33.0", None])
def test_another_version_is_refused(monkeypatch, version):
    install(monkeypatch, version)
    monkeypatch.setenv("FSBENCH_VLLM", "flash_sample")
    message = rf"vllm: expected version 0\.26\.0.*got {version}.*pip install vllm==0\.26\.0"
    with pytest.raises(EngineMismatch, match=message):
        entry.register()
    plugin.check_version("0.26.0+cu130")


def _rename_parameter(modules: dict[str, Any]) -> None:
    modules[RUNNER].GPUModelRunner.sample = lambda self, hidden_states, batch, grammar_output: None


def _require_field(modules: dict[str, Any]) -> None:
    fields = dataclasses.fields(modules[OUTPUT].SamplerOutput)
    modules[OUTPUT].SamplerOutput = dataclasses.make_dataclass(
        "SamplerOutput", ["now_required", *((f.name, f.type, f) for f in fields)]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _rename_parameter,
            r"GPUModelRunner\.sample: expected parameters .*'input_batch'.*'batch'",
        ),
        (_require_field, "SamplerOutput: expected no further fields to fill; got now_required"),
    ],
)
def test_a_changed_source_is_named_in_one_line(switched_on, change, message):
    change(switched_on)
    before = switched_on[RUNNER].GPUModelRunner.load_model
    with pytest.raises(EngineMismatch, match=message) as raised:
        plugin.register()
    assert "\n" not in str(raised.value)
    assert switched_on[RUNNER].GPUModelRunner.load_model is before


def test_a_missing_attribute_stops_the_engine_when_the_model_is_loaded(switched_on):
    plugin.register()
    runner = switched_on[RUNNER].GPUModelRunner()
    del runner.sampler.sampling_states.min_p
    with pytest.raises(EngineMismatch, match="SamplingStates: expected attributes min_p"):
        runner.load_model()


def test_model_runner_v1_is_refused_not_ignored(switched_on):
    plugin.register()
    with pytest.raises(EngineMismatch, match="VLLM_USE_V2_MODEL_RUNNER=1"):
        switched_on[RUNNER_V1].GPUModelRunner().load_model()


def test_rays_workers_get_the_variables(monkeypatch, switched_on):
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "MINE,FSBENCH_VLLM")
    plugin.register()
    names = os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"].split(",")
    assert names == ["MINE", *(f"FSBENCH_VLLM{end}" for end in ("", "_MARKS", "_DRAFTS"))]


def changed(path: str, value: Any) -> Model:
    """Return a model with another attribute at a dotted path."""
    model = Model()
    *parts, last = path.split(".")
    owner: Any = model
    for part in parts:
        owner = getattr(owner, part)
    setattr(owner, last, value)
    return model


class EditedLogits(Model):
    """A model whose logits are an edit of hidden @ weight.T."""

    def __init__(self, edit: Any):
        super().__init__()
        self._edit = edit

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._edit(super().compute_logits(hidden_states))


class Wrapper:
    """A model of images and text around a language model."""

    def __init__(self, inner: Model):
        self._inner = inner
        self.compute_logits, self.load_weights = inner.compute_logits, inner.load_weights

    def get_language_model(self) -> Model:
        return self._inner


FP8 = type("Fp8EmbeddingMethod", (), {})()
EDITED = "model: compute_logits"
MODELS: dict[str, tuple[Any, str | None]] = {
    "plain": (Model, None),
    "soft cap": (lambda: changed("logits_processor.soft_cap", 2.0), None),
    "inside another": (lambda: Wrapper(Model()), None),
    "head_dtype": (lambda: changed("logits_processor.head_dtype", torch.bfloat16), None),
    "fp32 logits": (
        lambda: changed("logits_processor.head_dtype", torch.float32),
        "model: logits in torch.float32",
    ),
    "permuted": (lambda: EditedLogits(lambda logits: logits.flip(1)), EDITED),
    "no token beyond 600": (
        lambda: EditedLogits(
            lambda logits: logits.index_fill(1, torch.arange(600, 700), -torch.inf)
        ),
        EDITED,
    ),
    "large logits cut": (
        lambda: EditedLogits(lambda logits: logits.masked_fill(logits > 3, -torch.inf)),
        EDITED,
    ),
    "a small bias": (lambda: EditedLogits(lambda logits: logits + 1e-3), EDITED),
    "bias": (lambda: changed("lm_head.bias", torch.zeros(704)), "model: LM head with a bias"),
    "quantized": (lambda: changed("lm_head.quant_method", FP8), "model: quantized LM head"),
    "scaled": (lambda: changed("logits_processor.scale", 0.5), "model: scaled logits"),
    "no head": (lambda: changed("lm_head", None), "model: no lm_head.weight and logits_processor"),
    "fp32": (lambda: Model(dtype=torch.float32), "model: LM head in torch.float32"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_it_takes_and_models_it_leaves(load, caplog, name):
    model, reason = MODELS[name]
    with caplog.at_level(logging.INFO, "vllm.fsbench"):
        runner = load(model=model())
    line = "flash_sample draws" if reason is None else f"vLLM draws all tokens ({reason})"
    assert caplog.text.count(f"fsbench: {line}") == 1
    if name in ("no head", "fp32"):  # the fake cannot sample from them
        assert runner._fsbench.sampling.disabled_reason == reason
        return
    assert is_served(runner) == (reason is None)
    assert counts(runner) == {"served": 0 if reason else 2, "left": {reason: 2} if reason else {}}


@pytest.mark.parametrize(
    ("option", "reason"),
    [("lora_config", "model: LoRA"), ("speculative_config", "engine: drafts")],
)
def test_engines_it_leaves(load, option, reason):
    runner = load(**{option: object()})
    assert not is_served(runner) and counts(runner)["left"] == {reason: 2}


def copy_heads(monkeypatch: Any) -> None:
    """Find heads as if a shard had been copied."""
    find_head = vllm_head.find_head

    def copying(runner: Any) -> Any:
        loaded = find_head(runner)
        weight = loaded.head.weight.clone()
        head = vllm_head.Head(weight, loaded.head.vocab_size)
        return loaded._replace(head=head, copied_bytes=weight.nbytes)

    monkeypatch.setattr(vllm_runner, "find_head", copying)


def test_copies_are_counted_as_the_models_memory(monkeypatch, load):
    assert load().model_memory_usage == 1000
    assert load("screened").model_memory_usage == 1000 + 704 * (D + 12)
    copy_heads(monkeypatch)
    runner = load()
    assert runner.model_memory_usage == 1000 + runner.model.lm_head.weight.nbytes


CHANGES = {
    "load_weights": lambda runner, worker, new: runner.model.load_weights(new),
    "reload_weights": lambda runner, worker, new: runner.reload_weights(new),
    "transfer": lambda runner, worker, new: (
        runner.model.lm_head.weight.copy_(new[0][1]), worker.finish_weight_update(),
    ),
    "sleep": lambda runner, worker, new: (
        worker.wake_up(["weights"]), runner.model.lm_head.weight.copy_(new[0][1]),
    ),
    "another tensor": lambda runner, worker, new: (
        setattr(runner.model.lm_head, "weight", new[0][1].clone()), runner.model.load_weights(new),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kept", ["nothing", "copy of a shard", "screened head"])
@pytest.mark.parametrize("change", CHANGES)
def test_new_weights_are_drawn_from(monkeypatch, load, screens, change, kept):
    if kept == "copy of a shard":
        copy_heads(monkeypatch)
    runner = load("screened" if kept == "screened head" else "flash_sample")
    draws = runner._fsbench._draws
    play = Play(runner)
    play.add("greedy", params(temperature=0), [5, 6, 7])
    play.step()
    new = [("lm_head.weight", runner.model.lm_head.weight.roll(50, 0))]
    CHANGES[change](runner, worker_of(runner), new)
    hidden, batch = play.batch(["greedy"])
    output, *_ = runner.sample(hidden, batch, None)
    best = (hidden[:1].float() @ new[0][1][:700].float().T).argmax()
    assert output.sampled_token_ids[0, 0] == best
    assert counts(runner) == {"served": 2, "left": {}}
    if kept == "screened head":
        assert screens == [1, 1]
        assert (runner._fsbench._draws is draws) == (change != "another tensor")


def test_ranks_agree_on_a_reason(monkeypatch):
    def all_gather(reasons: list[Any], reason: Any, group: Any) -> None:
        reasons[:] = [None, reason, "model: compute_logits"]

    monkeypatch.setattr(vllm_head.dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(vllm_head.dist, "all_gather_object", all_gather)
    assert vllm_head.first_reason(None, None) == "model: compute_logits"
    assert vllm_head.first_reason("model: LoRA", None) == "model: LoRA"


def test_weights_that_become_unsupported_are_left_to_vllm(load):
    runner = load()
    assert is_served(runner)
    runner.model.lm_head.weight = runner.model.lm_head.weight.clone()
    runner.model.lm_head.bias = torch.ones(704)
    runner.model.load_weights([])
    assert not is_served(runner)


def test_counters_forget_warm_up_and_are_logged_at_the_end(load, caplog):
    runner = load()
    worker = worker_of(runner)
    is_served(runner)
    assert worker.fsbench_counts() == {"served": 2, "left": {}}
    assert worker.compile_or_warm_up_model() == 1.5
    assert worker.fsbench_counts() == {"served": 0, "left": {}}
    play = Play(runner)
    runner.sampler.logprobs_mode = "raw_logits"
    for kind in ({}, {"top_k": 5}, {"logprobs": 3}):
        play.add(str(kind), params(**kind), [5, 6])
    play.step()
    with caplog.at_level(logging.INFO, "vllm.fsbench"):
        runner.shutdown()
    assert "fsbench: served 2 tokens; left to vLLM: 1 logits" in caplog.text
    assert runner.calls[-1] == "shutdown"


def test_marks_appear_in_profiles_of_vllms_sampler_too(monkeypatch, vllm):
    monkeypatch.setenv("FSBENCH_VLLM_MARKS", "1")
    entry.register()
    runner = vllm[RUNNER].GPUModelRunner()
    runner.load_model()
    with profile() as recorded:
        is_served(runner)
    names = [event.name for event in recorded.events()]
    assert DRAW_MARK in names and MATMUL_MARK in names
    assert counts(runner)["left"] == {"vLLM's own": 2}
    vllm[RUNNER_V1].GPUModelRunner().load_model()  # V1 may be marked, too


def test_a_sampler_of_fsbench_list_serves_rows_of_temperature_one_only(load):
    runner = load("multinomial")
    play = Play(runner)
    for kind in ({}, {"temperature": 0.5}, {"top_p": 0.9}, {"logit_bias": {3: 1.0}}):
        play.add(str(kind), params(**kind), [5, 6])
    play.step()
    assert counts(runner) == {
        "served": 1, "left": {"temperature": 1, "top-k, top-p, min-p": 1, "logit bias": 1},
    }  # fmt: skip
