"""vLLM's own Triton kernels in the interpreter: what they make of zeros is what they add.

They are those of build/engines, which `make check-engines` downloads; without it all is skipped.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
from typing import Any

import fake_vllm
import pytest
import torch
import triton
import triton.language as tl
from check_engines import FOLDER
from fake_vllm_states import SLOTS, V, params
from tree import ROOT

PACKAGE = "vllm.v1.worker.gpu.sample"
VERSIONS = ["0.26.0", "0.33.0"]


@pytest.fixture(params=VERSIONS)
def kernels(monkeypatch, request):
    """The version's functions of three processors, with stubs of what their files import."""
    folder = ROOT / FOLDER / f"vllm-{request.param}"
    if not folder.is_dir():
        pytest.skip(f"no {FOLDER}/vllm-{request.param}: run `make check-engines`")

    class Anything(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in (
        *("vllm", "vllm.envs", "vllm.sampling_params", "vllm.utils", "vllm.utils.math_utils"),
        *("vllm.utils.torch_utils", "vllm.v1.worker.gpu.buffer_utils", "vllm.v1.worker.gpu.states"),
        f"{PACKAGE}.logits_processor.interface",
    ):
        monkeypatch.setitem(sys.modules, name, Anything(name))
    utils = types.ModuleType("vllm.triton_utils")
    utils.tl, utils.triton = tl, triton  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.triton_utils", utils)
    found = {}
    for name in ("logit_bias", "penalties", "bad_words"):
        path = folder / f"{PACKAGE.replace('.', '/')}/{name}.py"
        spec = importlib.util.spec_from_file_location(f"real_{name}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found[name] = getattr(module, f"apply_{name}")
    return found


def state() -> dict[str, Any]:
    """Arrays of all slots, by the kernels' names of them; and the fake that has them."""
    requests = fake_vllm.RequestState()
    sampler = fake_vllm.Sampler(requests)
    kinds: list[dict[str, Any]] = [
        {},
        {"allowed_token_ids": [3, 9, 699], "logit_bias": {9: 2.5, 4: 1.0}},
        {"min_tokens": 30, "all_stop_token_ids": (1, 2)},
        {"min_tokens": 1, "all_stop_token_ids": (1, 2)},
        {"presence_penalty": 1.5, "frequency_penalty": 0.25},
        {"bad_words_token_ids": [[7], [11, 8], [12, 8]]},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5},
    ]
    for slot, kind in enumerate(kinds):
        requests.tokens[slot] = [5, 6, 7, 40, 40, 11]
        requests.prompt_len.np[slot] = 3
        sampler.add_request(slot, 3, params(**kind))
    requests.prompt_len.copy_to_uva()
    sampler.apply_staged_writes()
    words = torch.zeros(SLOTS, 32, dtype=torch.int32)
    offsets = torch.zeros(SLOTS, 9, dtype=torch.int32)
    for slot, listed in enumerate(sampler.bad_words_state.words):
        flat = [token for word in listed for token in word]
        words[slot, : len(flat)] = torch.tensor(flat, dtype=torch.int32)
        for number, word in enumerate(listed):
            offsets[slot, number + 1] = offsets[slot, number] + len(word)
    tokens = torch.zeros(SLOTS, 8, dtype=torch.int32)
    for slot, listed in enumerate(requests.tokens):
        tokens[slot, : len(listed)] = torch.tensor(listed, dtype=torch.int32)
    penalties, bad = sampler.penalties_state, sampler.bad_words_state
    arrays = {
        name: getattr(each, "gpu", each)
        for holder in (sampler.logit_bias_state, penalties, bad)
        for name, each in vars(holder).items()
    }
    return arrays | {
        "fake": sampler,
        "bad_word_token_ids": words,
        "bad_word_offsets": offsets,
        "num_bad_words": bad.num_bad_words.gpu,
        "all_token_ids": tokens,
        "prompt_len": requests.prompt_len.gpu,
        "total_len": torch.tensor([len(each) for each in requests.tokens], dtype=torch.int32),
        "max_num_bad_words": 3,
        "restore_when_all_masked": torch.zeros(SLOTS, dtype=torch.int32),
        "check_all_masked_rows": False,
        "max_bad_word_len": 2,
    }


def processed(kernel: Any, logits: torch.Tensor, rows: list[int], given: dict[str, Any]) -> Any:
    """Logits [B, V] after a kernel, for requests of these slots at position 5."""
    arguments = given | {
        "logits": logits.clone(),
        "expanded_idx_mapping": torch.tensor(rows, dtype=torch.int32),
        "pos": torch.full((len(rows),), 5),
        "input_ids": torch.full((len(rows),), 11, dtype=torch.int32),
        "token_ids": torch.full((len(rows),), 11, dtype=torch.int32),
        "expanded_local_pos": torch.zeros(len(rows), dtype=torch.int32),
    }
    kernel(**{name: arguments[name] for name in inspect.signature(kernel).parameters})
    return arguments["logits"]


def test_what_they_make_of_zeros_is_what_they_add(kernels):
    rows, given = [5, 4, 3, 2, 1, 0], state()
    raw = torch.randn(len(rows), V, generator=torch.Generator().manual_seed(1)) * 3
    edited, added = raw, torch.zeros_like(raw)
    for kernel in kernels.values():
        edited, added = (
            processed(kernel, edited, rows, given),
            processed(kernel, added, rows, given),
        )
    assert ((raw + added).isinf() == edited.isinf()).all()
    assert added.isinf().sum(1).tolist() == [2, 0, 0, 2, V - 3, 0]
    finite = ~edited.isinf()
    torch.testing.assert_close((raw + added)[finite], edited[finite], atol=1e-5, rtol=0)
    assert (added != 0).sum(1).tolist() == [2, 2, 0, 2, V - 2, 0]


def test_the_fakes_processors_are_the_real_ones(kernels):
    rows, given = [6, 5, 4, 3, 2, 1, 0], state()
    fake, slots = given["fake"], torch.tensor(rows, dtype=torch.int32)
    logits = torch.randn(len(rows), V, generator=torch.Generator().manual_seed(2)) * 3
    position, tokens = torch.full((len(rows),), 5), torch.full((len(rows),), 11)
    for name, apply, more in (
        ("logit_bias", fake.logit_bias_state.apply_logit_bias, (position,)),
        ("penalties", fake.penalties_state.apply_penalties, (tokens, tokens * 0)),
        ("bad_words", fake.bad_words_state.apply_bad_words, (tokens, tokens * 0)),
    ):
        mine = logits.clone()
        apply(mine, slots, slots.numpy(), *more)
        theirs = processed(kernels[name], logits, rows, given)
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
