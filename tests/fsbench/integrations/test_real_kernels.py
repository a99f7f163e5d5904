"""vLLM's Triton kernels in the interpreter: applied to zeros, they leave what they add."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import fake_vllm
import pytest
import torch
from fake_vllm_states import SLOTS, V, params
from real_vllm import real_vllm


@pytest.fixture(scope="module")
def kernels():
    """The functions of three processors."""
    names = ("logit_bias", "penalties", "bad_words")
    with real_vllm():
        yield {
            name: getattr(
                importlib.import_module(f"vllm.v1.worker.gpu.sample.{name}"), f"apply_{name}"
            )
            for name in names
        }


def state() -> dict[str, Any]:
    """Return arrays of all slots by the kernels' parameter names, and the fake that holds them."""
    requests = fake_vllm.RequestState()
    sampler = fake_vllm.Sampler(requests)
    request_kinds: list[dict[str, Any]] = [
        {},
        {"allowed_token_ids": [3, 9, 699], "logit_bias": {9: 2.5, 4: 1.0}},
        {"min_tokens": 30, "all_stop_token_ids": (1, 2)},
        {"min_tokens": 1, "all_stop_token_ids": (1, 2)},
        {"presence_penalty": 1.5, "frequency_penalty": 0.25},
        {"bad_words_token_ids": [[7], [11, 8], [12, 8]]},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5},
    ]
    for slot, kind in enumerate(request_kinds):
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


def processed(
    kernel: Any,
    logits: torch.Tensor,
    rows: list[int],
    arrays: dict[str, Any],
    fed: torch.Tensor | None = None,
    place: torch.Tensor | None = None,
) -> Any:
    """Return logits [B, V] after a kernel, for requests of these slots at position 5.

    Args:
        fed: the token that was fed at each row; 11 if None.
        place: the index of each row among the rows of its request; 0 if None.
    """
    fed = torch.full((len(rows),), 11, dtype=torch.int32) if fed is None else fed
    arguments = arrays | {
        "logits": logits.clone(),
        "expanded_idx_mapping": torch.tensor(rows, dtype=torch.int32),
        "pos": torch.full((len(rows),), 5),
        "input_ids": fed,
        "token_ids": fed,
        "expanded_local_pos": torch.zeros_like(fed) if place is None else place,
    }
    kernel(**{name: arguments[name] for name in inspect.signature(kernel).parameters})
    return arguments["logits"]


def test_applied_to_zeros_they_leave_what_they_add(kernels):
    rows, arrays = [5, 4, 3, 2, 1, 0], state()
    raw = torch.randn(len(rows), V, generator=torch.Generator().manual_seed(1)) * 3
    edited, added = raw, torch.zeros_like(raw)
    for kernel in kernels.values():
        edited, added = (processed(kernel, each, rows, arrays) for each in (edited, added))
    assert ((raw + added).isinf() == edited.isinf()).all()
    assert added.isinf().sum(1).tolist() == [2, 0, 0, 2, V - 3, 0]
    finite = ~edited.isinf()
    torch.testing.assert_close((raw + added)[finite], edited[finite], atol=1e-5, rtol=0)
    assert (added != 0).sum(1).tolist() == [2, 2, 0, 2, V - 2, 0]


@pytest.mark.parametrize("drafts", [0, 2])
def test_the_fakes_processors_do_what_vllms_do(kernels, drafts):
    """Also with drafts: a row knows the drafts of its request that are before it."""
    slots = torch.tensor([6, 5, 4, 3, 2, 1, 0], dtype=torch.int32).repeat_interleave(1 + drafts)
    rows, arrays = slots.tolist(), state()
    fake = arrays["fake"]
    logits = torch.randn(len(rows), V, generator=torch.Generator().manual_seed(2)) * 3
    position, fed = torch.full((len(rows),), 5), torch.full((len(rows),), 11, dtype=torch.int32)
    place = torch.arange(len(rows), dtype=torch.int32) % (1 + drafts)
    fed[place == 2] = 12
    for name, apply, more in (
        ("logit_bias", fake.logit_bias_state.apply_logit_bias, (position,)),
        ("penalties", fake.penalties_state.apply_penalties, (fed, place)),
        ("bad_words", fake.bad_words_state.apply_bad_words, (fed, place)),
    ):
        edited = logits.clone()
        apply(edited, slots, slots.numpy(), *more)
        expected = processed(kernels[name], logits, rows, arrays, fed, place)
        torch.testing.assert_close(edited, expected, atol=1e-5, rtol=0)
