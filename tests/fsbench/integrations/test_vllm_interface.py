"""A vLLM that is not as expected is refused, with an error that names what differs."""

from __future__ import annotations

from typing import Any

import pytest
from fake_vllm import InputBatch, install

from fsbench.errors import EngineMismatch
from fsbench.integrations import vllm as plugin
from fsbench.integrations import vllm_interface as interface

RUNNER = "vllm.v1.worker.gpu.model_runner"


@pytest.mark.parametrize("version", ["0.22.0", "0.23.0", None])
def test_another_version_is_refused(monkeypatch, version):
    install(monkeypatch, version)
    monkeypatch.setenv("FSBENCH_VLLM", "flash_sample")
    with pytest.raises(EngineMismatch, match=rf"expected version 0\.22\.1.*got {version}"):
        plugin.register()


def test_a_local_version_of_the_same_release_is_accepted():
    interface.check_version("0.22.1+cu130")


def _without(name: str):
    def change(found: dict[str, Any]) -> None:
        del found[name.partition(":")[0]].__dict__[name.partition(":")[2]]

    return change


def _renamed(found: dict[str, Any]) -> None:
    found[RUNNER].GPUModelRunner.sample = lambda self, hidden_states, batch, grammar_output: None


def _no_field(found: dict[str, Any]) -> None:
    fields = {k: v for k, v in InputBatch.__dataclass_fields__.items() if k != "idx_mapping_np"}
    found["vllm.v1.worker.gpu.input_batch"].InputBatch = type(
        "InputBatch", (), {"__dataclass_fields__": fields}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_renamed, r"GPUModelRunner\.sample: expected parameters .*'input_batch'.*'batch'"),
        (_without("vllm.v1.worker.gpu.sample.output:SamplerOutput"), "SamplerOutput: expected it"),
        (_no_field, "InputBatch: expected fields idx_mapping_np"),
    ],
)
def test_drift_is_named(monkeypatch, vllm, change, message):
    change(vllm)
    monkeypatch.setenv("FSBENCH_VLLM", "flash_sample")
    before = vllm[RUNNER].GPUModelRunner.load_model
    with pytest.raises(EngineMismatch, match=message):
        plugin.register()
    assert vllm[RUNNER].GPUModelRunner.load_model is before


def test_a_missing_attribute_is_named_when_the_model_is_loaded(monkeypatch, vllm):
    monkeypatch.setenv("FSBENCH_VLLM", "flash_sample")
    plugin.register()
    runner = vllm[RUNNER].GPUModelRunner()
    del runner.sampler.sampling_states.min_p
    with pytest.raises(EngineMismatch, match=r"runner\.sampler\.sampling_states\.min_p\.np"):
        runner.load_model()


def test_model_runner_v1_is_refused_not_ignored(monkeypatch, vllm):
    monkeypatch.setenv("FSBENCH_VLLM", "flash_sample")
    plugin.register()
    with pytest.raises(EngineMismatch, match="VLLM_USE_V2_MODEL_RUNNER=1"):
        vllm["vllm.v1.worker.gpu_model_runner"].GPUModelRunner().load_model()
