"""`--engine vllm` with a fake of vLLM: real processes, real lines, no engine behind them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tiers import full

from fsbench.e2e import vllm_engine
from fsbench.e2e.measure import DecodePlan, measure
from fsbench.e2e.models import decoder, request_kinds, sampling_parameters
from fsbench.e2e.records import StepStore, read
from fsbench.e2e.tables import write_tables
from fsbench.e2e.vllm_engine import Engines, Vllm, cache_bytes, engine_environment
from fsbench.errors import EngineFailed, EngineMismatch, EngineUnavailable, InvalidArgument

FAKE = Path(__file__).parent / "fake_engine"
PLAN = DecodePlan((decoder("tiny"),), (1, 3), ("vllm", "flash_sample"), runs=2, prompt_tokens=4,
            output_tokens=40, requests=("default", "mixed"))  # fmt: skip


@pytest.fixture(autouse=True)
def fake(monkeypatch, tmp_path):
    paths = [str(FAKE), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.delenv("FAKE_VLLM", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(vllm_engine, "package_version", lambda package: "0.26.0")
    monkeypatch.setattr(vllm_engine, "unavailable_reason", lambda sampler, device: None)


def measured(plan: DecodePlan, folder: Path) -> tuple[int, list[dict]]:
    """Measure a plan; return (failed cases, lines of steps.jsonl)."""
    store = StepStore(folder, {})
    return measure(plan, Vllm("cuda", folder), store), read(folder)


def test_a_whole_plan(tmp_path):
    failed, lines = measured(PLAN, tmp_path / "run")
    assert failed == 0
    runs = [line for line in lines if "decoded" in line]
    order = [
        (line["case"]["requests"], line["case"]["b"], line["run"], line["case"]["sampler"])
        for line in runs
    ]
    turns = [(0, "vllm"), (0, "flash_sample"), (1, "flash_sample"), (1, "vllm")]
    assert order == [
        (kind, B, *turn) for kind in ("default", "mixed") for B in (1, 3) for turn in turns
    ]
    decoded = runs[0]["decoded"]
    assert len(decoded["step_us"]) == 39 and decoded["step_tokens"] is None
    assert decoded["tpot_us"] == pytest.approx(sum(decoded["step_us"]) / 39, rel=0.01)
    assert decoded["tpot_us"] > 1000  # the fake's step
    profiles = [line["profile"] for line in lines if "profile" in line]
    assert len(profiles) == 8
    assert {(p["draw_us"], p["matmul_us"], p["rest_us"]) for p in profiles} == {(30, 20, 60)}
    (counts,) = [line for line in lines if "counts" in line]
    assert counts["case"]["sampler"] == counts["counts"]["by"] == "flash_sample"
    log = tmp_path / "run" / "vllm-tiny-tp1-vllm.log"
    assert "vLLM prints this to standard output" in log.read_text()


@pytest.mark.full
def test_drafts_in_all_engines(tmp_path):
    """One does not start: it is recorded with its error, and the other goes on."""
    real = engine_environment
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            vllm_engine,
            "engine_environment",
            lambda name, drafts: (
                real(name, drafts) | ({"FAKE_VLLM": "fail"} if name == "vllm" else {})
            ),
        )
        plan = replace(PLAN, batches=(3,), requests=("default",), drafts=2)
        failed, lines = measured(plan, tmp_path / "run")
    assert failed == 1
    status = {line["case"]["sampler"]: line["reason"] for line in lines if "status" in line}
    assert list(status) == ["vllm"] and "no room for the KV cache" in status["vllm"]
    runs = [line for line in lines if "decoded" in line]
    assert len(runs) == 2
    assert {line["case"]["drafts"] for line in runs} == {2}
    assert {line["decoded"]["accepted"] for line in runs} == {0.0}  # the fake does not draft
    frame = write_tables(tmp_path / "run").set_index("sampler")
    assert frame.drafts["flash_sample"] == 2 and frame.accepted["flash_sample"] == 0.0
    page = (tmp_path / "run" / "e2e.md").read_text()
    assert "default requests, 2 drafts per step" in page and "accepted per step" in page


def test_a_model_has_one_folder_and_each_sampler_its_own(tmp_path):
    """vLLM's cache of torch.compile depends on the path of the model."""
    config = decoder("tiny").config("bfloat16", 44)
    folder = vllm_engine._write_config("vllm", config)
    assert folder == vllm_engine._write_config("vllm", config) and folder.is_relative_to(tmp_path)
    assert json.loads((folder / "config.json").read_text()) == config
    longer = decoder("tiny").config("bfloat16", 45)
    others = [vllm_engine._write_config(*each) for each in (("mine", config), ("vllm", longer))]
    assert len({folder, *others}) == 3


def test_environments_differ_in_the_sampler_only(monkeypatch, tmp_path):
    monkeypatch.setenv("FSBENCH_VLLM", "something")
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    default, fused = engine_environment("vllm"), engine_environment("flash_sample")
    assert "FSBENCH_VLLM" not in default
    assert fused == {**default, "FSBENCH_VLLM": "flash_sample"}
    assert default["VLLM_USE_V2_MODEL_RUNNER"] == "1" and default["HF_HUB_OFFLINE"] == "1"
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    assert engine_environment("vllm-flashinfer") == {**default, name: "1"} and default[name] == "0"
    engine = Vllm("cuda", tmp_path)
    assert engine.unavailable_reason("vllm-flashinfer") is None
    assert engine.label("vllm-flashinfer") == ("vLLM's own, FlashInfer's filters", False)
    versions = {"flashinfer-python": None}
    monkeypatch.setattr(vllm_engine, "package_version", lambda package: versions[package])
    reason = "package flashinfer is not installed"
    assert engine.unavailable_reason("vllm-flashinfer") == reason


def test_only_the_time_counts_in_which_all_decode(monkeypatch):
    """Two requests, the second sent when the first has two tokens already."""
    monkeypatch.syspath_prepend(FAKE)
    from fsbench.e2e.vllm_served import ServingEngine

    served = object.__new__(ServingEngine)
    served._prompt_tokens, served._output_tokens, served._drafts = 4, 6, 0
    arrived = {"1": [1.0, 1.5, 2.0, 2.1, 2.2, 2.3], "2": [2.0, 2.1, 2.2, 2.3, 3.0, 4.0]}
    deliveries = [(1.0, 1), (1.5, 1), *((t, 2) for t in (2.0, 2.1, 2.2, 2.3)), (3.0, 1), (4.0, 1)]
    decoded = served._decoded(2, 0.5, arrived, deliveries)
    assert decoded.tpot_us == pytest.approx(1e5)
    assert decoded.step_us == pytest.approx([1e5] * 3) and decoded.step_tokens is None
    assert decoded.ttft_us == pytest.approx(1e6)
    apart = {"1": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "2": [2.0, 2.1, 2.2, 2.3, 2.4, 2.5]}
    with pytest.raises(EngineFailed, match="Decode more tokens"):
        served._decoded(2, 0.5, apart, [])


def test_kinds_of_requests_are_data():
    assert {"plain", "default", "top-p", "seeded", "logprobs", "mixed"} <= set(request_kinds())
    assert sampling_parameters("plain", 3, 10) == {"temperature": 1.0, "seed": 13}
    default = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert sampling_parameters("default", 3, 10) == default
    mixed = [sampling_parameters("mixed", row, 0) for row in range(8)]
    assert mixed == [sampling_parameters("mixed", row + 8, 0 - 8) for row in range(8)]
    assert sum("seed" in each for each in mixed) == 2 and {"temperature": 0.0} in mixed


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        full("die", r"the process has ended; .*vllm-tiny-tp1-vllm\.log: .*the device is gone"),
        full("short", "expected 3 requests of 40 tokens; got 3 of \\[39\\]"),
        ("slow", r"no answer in 0\.5 s"),
    ],
)
def test_an_engine_that_fails_is_named(tmp_path, monkeypatch, fault, message):
    monkeypatch.setenv("FAKE_VLLM", fault)
    if fault == "slow":
        monkeypatch.setattr(vllm_engine, "_ANSWER_S", 0.5)
    engines = Engines(PLAN, decoder("tiny"), 1, ["vllm"], tmp_path, 0.9)
    with pytest.raises(EngineFailed, match=message):
        engines.decode("vllm", 3, "plain")
    if fault == "slow":
        with pytest.raises(EngineFailed, match="the process has ended"):
            engines.decode("vllm", 1, "plain")
    engines.close()


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    with pytest.raises(EngineUnavailable, match="expected a GPU; got --device cpu"):
        Vllm("cpu", tmp_path)
    with pytest.raises(InvalidArgument, match=r"requests: expected one of.*'default'"):
        Vllm("cuda", tmp_path).check(replace(PLAN, requests=("defualt",)))
    for version, error, message in (
        ("0.23.0", EngineMismatch, r"expected version 0\.26\.0.*got 0\.23\.0"),
        (None, EngineUnavailable, r"not installed\. pip install vllm==0\.26\.0"),
    ):
        monkeypatch.setattr(vllm_engine, "package_version", lambda package, v=version: v)
        with pytest.raises(error, match=message):
            Vllm("cuda", tmp_path)


def test_the_cache_has_room_for_all_tokens():
    plan = DecodePlan((), (64,), (), prompt_tokens=128, output_tokens=128)
    one_gpu, two = (cache_bytes(plan, decoder("qwen3-8b"), tp) for tp in (1, 2))
    tokens = one_gpu / (36 * 2 * 8 * 128 * 2)
    assert 64 * 256 * 1.4 < tokens < 64 * 256 * 1.7
    assert two < 0.6 * one_gpu
