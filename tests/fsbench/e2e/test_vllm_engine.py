"""`--engine vllm` with a fake of vLLM: real processes, real lines, no engine behind them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tiers import full

from fsbench.e2e import vllm_engine
from fsbench.e2e.measure import DecodePlan, measure
from fsbench.e2e.models import decoder, kinds, parameters
from fsbench.e2e.records import StepStore, read
from fsbench.e2e.tables import write_tables
from fsbench.e2e.vllm_engine import Engines, Vllm, cache_bytes, engine_environment
from fsbench.errors import EngineFailed, EngineMismatch, EngineUnavailable, InvalidArgument

FAKE = Path(__file__).parent / "fake_engine"
PLAN = DecodePlan((decoder("tiny"),), (1, 3), ("vllm", "flash_sample"), runs=2, prompt_tokens=4,
            output_tokens=40, requests=("default", "mixed"))  # fmt: skip


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    paths = [str(FAKE), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.delenv("FAKE_VLLM", raising=False)
    monkeypatch.setattr(vllm_engine, "package_version", lambda package: "0.26.0")
    monkeypatch.setattr(vllm_engine, "unavailable_reason", lambda sampler, device: None)


def opened(tmp_path: Path, samplers=("vllm", "flash_sample")) -> Engines:
    return Engines(PLAN, decoder("tiny"), 1, samplers, tmp_path, 0.9)


def test_a_whole_plan(tmp_path):
    store = StepStore(tmp_path / "run", {})
    failed = measure(PLAN, Vllm("cuda", tmp_path / "run"), store)
    lines = read(tmp_path / "run")
    assert failed == 0
    runs = [line for line in lines if "decoded" in line]
    order = [
        (line["case"]["requests"], line["case"]["b"], line["run"], line["case"]["sampler"])
        for line in runs
    ]
    assert order == [
        *[(kind, B, run, name) for kind in ("default", "mixed") for B in (1, 3) for run, names in
          ((0, ("vllm", "flash_sample")), (1, ("flash_sample", "vllm"))) for name in names]
    ]  # fmt: skip
    decoded = runs[0]["decoded"]
    assert len(decoded["step_us"]) == 39 and decoded["step_tokens"] is None
    assert decoded["tpot_us"] == pytest.approx(sum(decoded["step_us"]) / 39, rel=0.01)
    assert decoded["tpot_us"] > 1000  # the fake's step
    profiles = [line["profile"] for line in lines if "profile" in line]
    assert len(profiles) == 8
    assert {(p["draw_us"], p["matmul_us"], p["rest_us"]) for p in profiles} == {(30, 20, 60)}
    counts = [line for line in lines if "counts" in line]
    assert [line["case"]["sampler"] for line in counts] == ["flash_sample"]
    assert counts[0]["counts"]["by"] == "flash_sample"
    log = tmp_path / "run" / "vllm-tiny-tp1-vllm.log"
    assert "vLLM prints this to standard output" in log.read_text()


def test_vllm_with_flashinfers_filters_is_a_sampler_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    found = {sampler: engine_environment(sampler) for sampler in ("vllm", "vllm-flashinfer")}
    assert (found["vllm"].pop(name), found["vllm-flashinfer"].pop(name)) == ("0", "1")
    assert found["vllm"] == found["vllm-flashinfer"]
    engine = Vllm("cuda", tmp_path)
    assert engine.missing("vllm-flashinfer") is None
    assert engine.label("vllm-flashinfer") == ("vLLM's own, FlashInfer's filters", False)
    versions = {"flashinfer-python": None}
    monkeypatch.setattr(vllm_engine, "package_version", lambda package: versions[package])
    assert engine.missing("vllm-flashinfer") == "package flashinfer is not installed"


def test_drafts_in_all_engines(tmp_path):
    plan = replace(PLAN, batches=(3,), requests=("default",), drafts=2)
    store = StepStore(tmp_path / "run", {})
    assert measure(plan, Vllm("cuda", tmp_path / "run"), store) == 0
    runs = [line for line in read(tmp_path / "run") if "decoded" in line]
    assert len(runs) == 4
    assert {line["case"]["drafts"] for line in runs} == {2}
    assert {line["decoded"]["accepted"] for line in runs} == {0.0}  # the fake has none
    frame = write_tables(tmp_path / "run")
    assert set(frame.drafts) == {2} and set(frame.accepted) == {0.0}
    told = (tmp_path / "run" / "e2e.md").read_text()
    assert "default requests, 2 drafts per step" in told and "accepted per step" in told


def test_only_the_time_counts_in_which_all_decode(monkeypatch):
    """Two requests, the second sent when the first has two tokens already."""
    monkeypatch.syspath_prepend(FAKE)
    from fsbench.e2e.vllm_served import ServingEngine

    served = object.__new__(ServingEngine)
    served._prompt_tokens, served._output_tokens, served._drafts = 4, 6, 0
    arrived = {"1": [1.0, 1.5, 2.0, 2.1, 2.2, 2.3], "2": [2.0, 2.1, 2.2, 2.3, 3.0, 4.0]}
    deliveries = [(1.0, 1), (1.5, 1), *((t, 2) for t in (2.0, 2.1, 2.2, 2.3)), (3.0, 1), (4.0, 1)]
    found = served._decoded(2, 0.5, arrived, deliveries)
    assert found.tpot_us == pytest.approx(1e5)
    assert found.step_us == pytest.approx([1e5] * 3) and found.step_tokens is None
    assert found.ttft_us == pytest.approx(1e6)
    apart = {"1": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "2": [2.0, 2.1, 2.2, 2.3, 2.4, 2.5]}
    with pytest.raises(EngineFailed, match="Decode more tokens"):
        served._decoded(2, 0.5, apart, [])


def test_kinds_of_requests_are_data():
    assert {"plain", "default", "top-p", "seeded", "logprobs", "mixed"} <= set(kinds())
    assert parameters("plain", 3, 10) == {"temperature": 1.0, "seed": 13}
    assert parameters("default", 3, 10) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    sent = [parameters("mixed", row, 0) for row in range(8)]
    assert sent == [parameters("mixed", row + 8, 0 - 8) for row in range(8)]
    assert sum("seed" in each for each in sent) == 2 and {"temperature": 0.0} in sent


def test_environments_differ_in_the_sampler_only(monkeypatch):
    monkeypatch.setenv("FSBENCH_VLLM", "something")
    own, ours = engine_environment("vllm"), engine_environment("flash_sample")
    assert "FSBENCH_VLLM" not in own
    assert ours == {**own, "FSBENCH_VLLM": "flash_sample"}
    assert own["VLLM_USE_V2_MODEL_RUNNER"] == "1" and own["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        full("die", r"it has ended; .*vllm-tiny-tp1-vllm\.log: .*the device is gone"),
        ("fail", "ValueError: no room for the KV cache"),
        full("short", "expected 3 requests of 40 tokens; got 3 of \\[39\\]"),
    ],
)
def test_an_engine_that_fails_is_named(tmp_path, monkeypatch, how, message):
    monkeypatch.setenv("FAKE_VLLM", how)
    engines = opened(tmp_path, ["vllm"])
    with pytest.raises(EngineFailed, match=message):
        engines.decode("vllm", 3, "plain")
    engines.close()


@pytest.mark.full
def test_one_that_does_not_start_leaves_the_others_alone(tmp_path, monkeypatch):
    """It is recorded with its error."""
    real = engine_environment
    monkeypatch.setattr(
        vllm_engine,
        "engine_environment",
        lambda name, drafts: real(name) | ({"FAKE_VLLM": "fail"} if name == "flash_sample" else {}),
    )
    store = StepStore(tmp_path / "run", {})
    assert measure(PLAN, Vllm("cuda", tmp_path / "run"), store) == 4  # one per kind and batch size
    lines = read(tmp_path / "run")
    status = {line["case"]["sampler"]: line["reason"] for line in lines if "status" in line}
    assert list(status) == ["flash_sample"] and "no room" in status["flash_sample"]
    assert sum("decoded" in line for line in lines) == 8


def test_an_engine_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "slow")
    monkeypatch.setattr(vllm_engine, "_ANSWER_S", 0.5)
    engines = opened(tmp_path, ["vllm"])
    with pytest.raises(EngineFailed, match=r"no answer in 0\.5 s"):
        engines.decode("vllm", 1, "plain")
    with pytest.raises(EngineFailed, match="it has ended"):
        engines.decode("vllm", 1, "plain")
    engines.close()


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    with pytest.raises(EngineUnavailable, match="expected a GPU; got --device cpu"):
        Vllm("cpu", tmp_path)
    with pytest.raises(InvalidArgument, match=r"requests: expected one of.*'default'"):
        Vllm("cuda", tmp_path).check(replace(PLAN, requests=("defualt",)))
    monkeypatch.setattr(vllm_engine, "package_version", lambda package: "0.23.0")
    with pytest.raises(EngineMismatch, match=r"expected version 0\.26\.0.*got 0\.23\.0"):
        Vllm("cuda", tmp_path)
    monkeypatch.setattr(vllm_engine, "package_version", lambda package: None)
    with pytest.raises(EngineUnavailable, match=r"not installed\. pip install vllm==0\.26\.0"):
        Vllm("cuda", tmp_path)


def test_the_cache_has_room_for_all_tokens():
    plan = DecodePlan((), (64,), (), prompt_tokens=128, output_tokens=128)
    tokens = cache_bytes(plan, decoder("qwen3-8b"), 1) / (36 * 2 * 8 * 128 * 2)
    assert 64 * 256 * 1.4 < tokens < 64 * 256 * 1.7
    assert cache_bytes(plan, decoder("qwen3-8b"), 2) < 0.6 * cache_bytes(
        plan, decoder("qwen3-8b"), 1
    )
