"""State arrays and processors of fake_vllm's sampler, in torch, with vLLM's order and names."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch

NO_LOGPROBS = -1
V, D, SLOTS = 700, 64, 8


class UvaBackedTensor:
    """An array on the host, np, and its copy gpu, which is another buffer after each step."""

    def __init__(self, size: int, dtype: Any, fill: float = 0):
        self.np = np.full(size, fill, dtype)
        self.copy_to_uva()

    def copy_to_uva(self) -> None:
        self.gpu = torch.from_numpy(self.np.copy())


class StagedWriteTensor:
    def __init__(self, size: Any, dtype: Any):
        self.gpu = torch.zeros(size, dtype=dtype)

    def stage_write(self, row: int, start: int, values: Any) -> None:
        values = torch.tensor(list(values), dtype=self.gpu.dtype)
        self.gpu[row, start : start + len(values)] = values


def params(**settings: Any) -> Any:
    """Return the SamplingParams fields that the sampler reads."""
    defaults = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None,
        "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        "allowed_token_ids": None, "logit_bias": None, "min_tokens": 0, "all_stop_token_ids": (),
        "bad_words_token_ids": None, "logprobs": None, "logprob_token_ids": None,
    }  # fmt: skip
    assert set(settings) <= set(defaults)
    made = {**defaults, **settings}
    if made["temperature"] == 0:  # as in SamplingParams
        made |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return types.SimpleNamespace(**made)


def drafts_before(input_ids: Any, expanded_local_pos: Any, row: int) -> list[int]:
    """Return the drafts before a row of a batch. input_ids: the token fed at every row."""
    place = int(expanded_local_pos[row])
    return [int(token) for token in input_ids[row - place + 1 : row + 1]]


class RequestState:
    def __init__(self) -> None:
        self.prompt_len = UvaBackedTensor(SLOTS, np.int32)
        self.prefill_len = UvaBackedTensor(SLOTS, np.int32)
        self.tokens: list[list[int]] = [[] for _ in range(SLOTS)]  # all_token_ids to total_len


class SamplingStates:
    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.temperature = UvaBackedTensor(SLOTS, np.float32)
        self.top_k = UvaBackedTensor(SLOTS, np.int32, vocab_size)
        self.top_p = UvaBackedTensor(SLOTS, np.float32, 1)
        self.min_p = UvaBackedTensor(SLOTS, np.float32)
        self.seeds = UvaBackedTensor(SLOTS, np.int64)
        self.num_logprobs = np.full(SLOTS, NO_LOGPROBS, np.int32)

    def add_request(self, slot: int, p: Any) -> None:
        self.temperature.np[slot], self.top_p.np[slot] = p.temperature, p.top_p
        self.top_k.np[slot] = p.top_k if 0 < p.top_k <= self.vocab_size else self.vocab_size
        self.min_p.np[slot] = p.min_p
        drawn = np.random.randint(-(2**63), 2**63 - 1) if p.seed is None else p.seed
        self.seeds.np[slot] = drawn
        self.num_logprobs[slot] = NO_LOGPROBS if p.logprobs is None else p.logprobs


class PenaltiesState:
    def __init__(self, req_states: RequestState):
        self.req_states = req_states
        self.repetition_penalty = UvaBackedTensor(SLOTS, np.float32, 1)
        self.frequency_penalty = UvaBackedTensor(SLOTS, np.float32)
        self.presence_penalty = UvaBackedTensor(SLOTS, np.float32)
        self.use_penalty = np.zeros(SLOTS, bool)
        self.prompt_bin_mask = torch.zeros(SLOTS, -(-V // 32), dtype=torch.int32)
        self.output_bin_counts = torch.zeros(SLOTS, V, dtype=torch.int32)

    def add_request(self, slot: int, p: Any) -> None:
        self.repetition_penalty.np[slot] = p.repetition_penalty
        self.frequency_penalty.np[slot] = p.frequency_penalty
        self.presence_penalty.np[slot] = p.presence_penalty
        self.use_penalty[slot] = (
            p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
        )
        if self.use_penalty[slot]:  # bincount; those of others stay what they were
            tokens = self.req_states.tokens[slot]
            length = int(self.req_states.prompt_len.np[slot])
            bits = np.zeros(self.prompt_bin_mask.shape[1], np.uint32)
            for token in tokens[:length]:
                bits[token // 32] |= np.uint32(1 << (token % 32))
            self.prompt_bin_mask[slot] = torch.from_numpy(bits.view(np.int32))
            self.output_bin_counts[slot] = torch.bincount(
                torch.tensor(tokens[length:], dtype=torch.int64), minlength=V
            )

    def apply_penalties(
        self, logits, expanded_idx_mapping, idx_mapping_np, input_ids, expanded_local_pos
    ):
        if not self.use_penalty[idx_mapping_np].any():
            return
        for row, slot in enumerate(expanded_idx_mapping.tolist()):
            repetition = self.repetition_penalty.gpu[slot]
            counts = self.output_bin_counts[slot].clone()
            for token in drafts_before(input_ids, expanded_local_pos, row):
                counts[token] += 1
            bits = self.prompt_bin_mask[slot][torch.arange(V) // 32] >> (torch.arange(V) % 32)
            now = logits[row].float()
            if repetition != 1:
                scale = torch.where((bits & 1).bool() | (counts > 0), repetition, 1.0)
                now = now * torch.where(now > 0, 1 / scale, scale)
            now = now - self.frequency_penalty.gpu[slot] * counts
            logits[row] = (now - self.presence_penalty.gpu[slot] * (counts > 0)).to(logits.dtype)


class LogitBiasState:
    def __init__(self) -> None:
        ids = {"dtype": torch.int32}
        self.num_allowed_token_ids = UvaBackedTensor(SLOTS, np.int32)
        self.allowed_token_ids = StagedWriteTensor((SLOTS, 64), **ids)
        self.num_logit_bias = UvaBackedTensor(SLOTS, np.int32)
        self.logit_bias_token_ids = StagedWriteTensor((SLOTS, 64), **ids)
        self.logit_bias = StagedWriteTensor((SLOTS, 64), torch.float32)
        self.min_lens = UvaBackedTensor(SLOTS, np.int32)
        self.num_stop_token_ids = UvaBackedTensor(SLOTS, np.int32)
        self.stop_token_ids = StagedWriteTensor((SLOTS, 16), **ids)
        self.use_logit_bias = np.zeros(SLOTS, bool)

    def add_request(self, slot: int, prompt_len: int, p: Any) -> None:
        allowed, bias = p.allowed_token_ids or [], p.logit_bias or {}
        stop = list(p.all_stop_token_ids) if p.min_tokens > 0 else []
        self.num_allowed_token_ids.np[slot] = len(allowed)
        self.allowed_token_ids.stage_write(slot, 0, allowed)
        self.num_logit_bias.np[slot] = len(bias)
        self.logit_bias_token_ids.stage_write(slot, 0, bias.keys())
        self.logit_bias.stage_write(slot, 0, bias.values())
        self.min_lens.np[slot] = prompt_len + p.min_tokens
        self.num_stop_token_ids.np[slot] = len(stop)
        self.stop_token_ids.stage_write(slot, 0, stop)
        self.use_logit_bias[slot] = bool(allowed or bias or stop)

    def apply_logit_bias(self, logits, expanded_idx_mapping, idx_mapping_np, pos):
        if not self.use_logit_bias[idx_mapping_np].any():
            return
        for row, slot in enumerate(expanded_idx_mapping.tolist()):
            ids = self.allowed_token_ids.gpu[slot, : self.num_allowed_token_ids.gpu[slot]].long()
            if len(ids):
                kept = logits[row, ids].clone()
                logits[row] = -torch.inf
                logits[row, ids] = kept
            n = self.num_logit_bias.gpu[slot]
            ids = self.logit_bias_token_ids.gpu[slot, :n].long()
            biased = logits[row, ids].float() + self.logit_bias.gpu[slot, :n]
            logits[row, ids] = biased.to(logits.dtype)
            if pos[row] + 1 < self.min_lens.gpu[slot]:
                ids = self.stop_token_ids.gpu[slot, : self.num_stop_token_ids.gpu[slot]].long()
                logits[row, ids] = -torch.inf


class BadWordsState:
    def __init__(self, req_states: RequestState):
        self.req_states = req_states
        self.words: list[list[list[int]]] = [[] for _ in range(SLOTS)]
        self.num_bad_words = UvaBackedTensor(SLOTS, np.int32)

    def add_request(self, slot: int, p: Any) -> None:
        self.words[slot] = p.bad_words_token_ids or []
        self.num_bad_words.np[slot] = len(self.words[slot])

    def apply_bad_words(
        self, logits, expanded_idx_mapping, idx_mapping_np, input_ids, expanded_local_pos
    ):
        for row, slot in enumerate(expanded_idx_mapping.tolist()):
            output = self.req_states.tokens[slot][self.req_states.prompt_len.gpu[slot] :]
            output = output + drafts_before(input_ids, expanded_local_pos, row)
            for word in self.words[slot]:
                if (
                    len(word) - 1 <= len(output)
                    and output[len(output) + 1 - len(word) :] == word[:-1]
                ):
                    logits[row, word[-1]] = -torch.inf


class LogprobTokenIdsState:
    def __init__(self) -> None:
        self.num_token_ids = UvaBackedTensor(SLOTS, np.int32)
        self.token_ids: list[list[int]] = [[] for _ in range(SLOTS)]

    def add_request(self, slot: int, p: Any) -> None:
        self.token_ids[slot] = p.logprob_token_ids or []
        self.num_token_ids.np[slot] = len(p.logprob_token_ids or [])
