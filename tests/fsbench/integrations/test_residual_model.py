"""The model and the comparison of test_vllm_two_gpus.py, without vLLM and without a GPU."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from residual_model import MODEL, POSITIONS, D, V, write_model
from serve_ranks import (
    BATCHES,
    KINDS,
    ROWS,
    UNSERVED,
    Server,
    differences,
    kind_of,
    prompt_of,
    settings_of,
)

from fsbench.integrations.routing import REASONS


def test_a_hidden_state_is_the_norm_of_an_embedding(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_model(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    tokens = torch.tensor([prompt_of(4, V)])
    with torch.inference_mode():
        hidden = model.model(tokens).last_hidden_state[0]
        expected = model.model.norm(model.model.embed_tokens(tokens))[0]
        logits = model(tokens).logits[0].float()
    assert torch.equal(hidden, expected) and hidden.shape == (len(tokens[0]), D)
    assert logits.shape[1] == V and 1.5 < logits.std() < 2.5
    assert len(set(logits.argmax(1).tolist())) == len(tokens[0])


def test_requests_fit_the_model():
    for call in BATCHES:
        assert {kind_of(call, row) for row in range(ROWS)} == set(BATCHES[call])
        for row in range(ROWS):
            length = len(prompt_of(row, V)) + settings_of(call, row)["max_tokens"]
            assert length <= POSITIONS and max(prompt_of(row, V)) < V
    assert MODEL.kv_heads % 2 == 0 and set(UNSERVED) < set(KINDS)
    assert set(UNSERVED.values()) <= set(REASONS.values())


def answers(call):
    rows = []
    for row in range(ROWS):
        logprobs = None
        if "logprobs" in KINDS[kind_of(call, row)]:
            logprobs = [{"7": (-1.0, 1), "9": (-2.0, 2)}]
        rows.append({"tokens": [7], "cumulative": -1.0, "logprobs": logprobs})
    return rows


def test_differences_are_found_where_the_plug_in_draws():
    one = answers("mixed")
    by_kind = {kind_of("mixed", row): row for row in range(ROWS)}
    assert differences(one, one, "mixed") == []
    for kind, change in [
        ("plain", {"tokens": [8]}),
        ("logprobs", {"cumulative": -1.01}),
        ("top logprobs", {"logprobs": [{"7": (-1.0, 1), "9": (-2.2, 2)}]}),
        ("greedy top logprobs", {"logprobs": [{"7": (-1.0, 1)}]}),
        ("presence", {"logprobs": [{}]}),
    ]:
        other = copy.deepcopy(one)
        other[by_kind[kind]].update(change)
        (mismatch,) = differences(one, other, "mixed")
        assert f"({kind})" in mismatch
    other = copy.deepcopy(one)
    other[by_kind["filters"]]["tokens"] = [8]  # vLLM's sampler on two GPUs
    other[by_kind["top logprobs"]]["logprobs"] = [{"7": (-1.0, 1), "8": (-2.01, 2)}]  # a tie
    assert differences(one, other, "mixed") == []


def test_a_server_that_fails_shows_its_log(tmp_path, monkeypatch):
    """No vLLM is installed here, or it finds no model."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    server = Server(tmp_path, 2, tmp_path / "2.json")
    with pytest.raises(AssertionError, match=r"2 GPUs: exit code [^0]"):
        server.result(100)
    assert "Traceback" in server.log()


def test_a_servers_result_is_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/true")
    path = tmp_path / "1.json"
    path.write_text(json.dumps({"counts": []}))
    assert Server(tmp_path, 1, path).result(20) == {"counts": []}
