"""Run an engine's steps on a runner of fake_vllm: requests start, decode, are preempted and end."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from fake_vllm import SLOTS, D, GrammarOutput, InputBatch, V
from fake_vllm_states import params

from fsbench.integrations.draw import DrawResult, Rows

GRAMMAR = [3, 31, 32, 400, 699]
KINDS = {
    "plain": {},
    "greedy": {"temperature": 0},
    "default": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top-p": {"top_p": 0.9},
    "min-p": {"temperature": 1.3, "min_p": 0.1},
    "frequency": {"frequency_penalty": 0.7, "presence_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.4, "top_k": 30},
    "logit_bias": {"logit_bias": {5: 5.0, 6: 4.5, 7: -100.0}},
    "allowed": {"allowed_token_ids": [9, 90, 500]},
    "min_tokens": {"min_tokens": 6, "all_stop_token_ids": (1, 2)},
    "bad_words": {"bad_words_token_ids": [[4], [5, 6]], "temperature": 0.8},
    "grammar": {},
    "logprobs": {"logprobs": 0},
    "top logprobs": {"logprobs": 3},
    "tempered logprobs": {"temperature": 0.7, "logprobs": 0},
    "default logprobs": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "logprobs": 5},
    "cut logprobs": {"temperature": 0.7, "top_k": 3, "logprobs": 5},
    "biased logprobs": {"logit_bias": {5: 5.0, 6: 4.5, 7: -100.0}, "logprobs": 2},
    "penalized logprobs": {"repetition_penalty": 1.4, "top_k": 30, "logprobs": 2},
    "grammar logprobs": {"temperature": 0.8, "logprobs": 6},
    "many logprobs": {"temperature": 0.8, "logprobs": 30},
    "given logprobs": {"logprob_token_ids": [3, 500]},
}
"""Kind of request -> its sampling parameters."""
BY_VLLM = ("many logprobs", "given logprobs")
"""Kinds for which vLLM computes the log-probabilities of tokens other than the sampled one."""
PROMPT = [11, 12, 13, 5]


def request(kind: str, seed: int | None = 7):
    return params(**KINDS[kind], seed=seed)


def grammars(names: Iterable[str]) -> dict[str, list[int]]:
    """Return the tokens that a grammar allows, for the requests that are named after one."""
    return {name: GRAMMAR for name in names if name.startswith("grammar")}


def hidden_state(tokens: list[int]) -> torch.Tensor:
    """Return the hidden state [D] behind these tokens, a function of nothing else."""
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**62)
    return torch.randn(D, generator=generator, dtype=torch.float32)


class Play:
    """Requests of a runner, by name."""

    def __init__(self, runner: Any, dtype: torch.dtype = torch.bfloat16):
        self.runner, self.dtype = runner, dtype
        self.slots: dict[str, int] = {}
        self.params: dict[str, Any] = {}
        self.logprobs: dict[str, list[Any]] = {}
        self._fed: dict[str, int] = {}
        self._free = list(range(SLOTS))

    def add(
        self, name: str, params: Any, prompt: list[int], output: list[int] | None = None
    ) -> None:
        """Add a request; `output`: the tokens that a preempted one has already."""
        slot = self._free.pop()
        states = self.runner.req_states
        states.tokens[slot] = [*prompt, *(output or [])]
        states.prompt_len.np[slot] = len(prompt)
        states.prefill_len.np[slot] = len(states.tokens[slot])
        states.prompt_len.copy_to_uva()
        states.prefill_len.copy_to_uva()
        self.runner.sampler.add_request(slot, len(prompt), params)
        self.runner.sampler.apply_staged_writes()
        self.slots[name], self.params[name], self._fed[name] = slot, params, 0

    def remove(self, name: str) -> tuple[list[int], list[int]]:
        """End a request; return (prompt, output)."""
        slot = self.slots.pop(name)
        self._free.append(slot)  # the next request takes it, as in vLLM
        prompt = int(self.runner.req_states.prompt_len.np[slot])
        tokens = self.runner.req_states.tokens[slot]
        return tokens[:prompt], tokens[prompt:]

    def preempt(self, name: str) -> None:
        prompt, output = self.remove(name)
        self.add(name, self.params[name], prompt, output)

    def output(self, name: str) -> list[int]:
        slot = self.slots[name]
        return list(
            self.runner.req_states.tokens[slot][self.runner.req_states.prompt_len.np[slot] :]
        )

    def batch(
        self,
        names: list[str],
        chunk: int | None = None,
        drafts: dict[str, list[int]] | None = None,
    ) -> tuple[torch.Tensor, InputBatch]:
        """Return (hidden states, padded with NaN; the batch).

        Args:
            chunk: most tokens of a prompt per step.
            drafts: request -> its drafts.
        """
        states = self.runner.req_states
        slots = np.array([self.slots[name] for name in names], np.int32)
        positions, ids, hidden, last_rows, lengths = [], [], [], [], []
        rows = [1 + len((drafts or {}).get(name, [])) for name in names]
        for name, slot, count in zip(names, slots, rows, strict=True):
            tokens = states.tokens[slot] + (drafts or {}).get(name, [])
            first = self._fed[name]
            last = len(tokens) if chunk is None else min(len(tokens), first + chunk)
            for position in range(first, last):
                hidden.append(hidden_state(tokens[: position + 1]))
                positions.append(position)
                ids.append(tokens[position])
            self._fed[name] = last
            lengths.append(last)
            last_rows += range(len(positions) - count, len(positions))
        count = torch.tensor([0, *accumulate(rows)], dtype=torch.int32)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        mapping = torch.from_numpy(slots)
        made = InputBatch(
            req_ids=list(names),
            num_reqs=len(names),
            num_tokens=len(positions),
            num_draft_tokens=sum(rows) - len(names),
            idx_mapping=mapping,
            idx_mapping_np=slots,
            expanded_idx_mapping=mapping.repeat_interleave(torch.tensor(rows)),
            expanded_local_pos=torch.cat([torch.arange(n, dtype=torch.int32) for n in rows]),
            input_ids=torch.tensor([*ids, 0, 0, 0], dtype=torch.int32),
            positions=torch.tensor([*positions, 0, 0, 0]),
            logits_indices=torch.tensor(last_rows),
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=torch.cat([seq_lens, torch.zeros(2, dtype=torch.int32)]),
            cu_num_logits=count,
            cu_num_logits_np=count.numpy(),
        )
        padding = torch.full((3, D), torch.nan, dtype=torch.float32)
        return torch.cat([torch.stack(hidden), padding]).to(self.dtype), made

    def step(
        self,
        names: list[str] | None = None,
        allowed: dict[str, list[Any]] | None = None,
        chunk: int | None = None,
        drafts: dict[str, list[int]] | None = None,
    ) -> Any:
        """Feed requests, append the tokens that they get, and return the SamplerOutput.

        Args:
            allowed: request -> tokens that its grammar allows; a list for each of its rows, or one
                list for all.
        """
        names = list(self.slots) if names is None else names
        hidden, batch = self.batch(names, chunk, drafts)
        output, num_sampled, rejected = self.runner.sample(
            hidden, batch, grammar(allowed, drafts or {})
        )
        for row, name in enumerate(names):
            count = int(num_sampled[row])
            if not count:
                assert rejected[row] == 0
                continue
            slot, first = self.slots[name], int(batch.cu_num_logits_np[row])
            assert count + rejected[row] == batch.cu_num_logits_np[row + 1] - first
            for place, token in enumerate(output.sampled_token_ids[row, :count].tolist()):
                assert 0 <= token < V
                self.runner.req_states.tokens[slot].append(token)
                self.runner.sampler.penalties_state.output_bin_counts[slot, token] += 1
                tensors = output.logprobs_tensors
                if tensors is not None:
                    starts = tensors.cu_num_generated_tokens
                    index = place + (row if starts is None else starts[row])
                    self.logprobs.setdefault(name, []).append([each[index] for each in tensors[:3]])
            self._fed[name] = len(self.runner.req_states.tokens[slot]) - 1
        return output


class Recording:
    """A draw that keeps its inputs. real: whether it draws; else all tokens are 0."""

    def __init__(self, draw: Any, real: bool = True):
        self.supported, self.screens, self.rows = draw.supported, draw.screens, []
        self._draw = draw if real else None

    def __call__(self, rows: Rows) -> DrawResult:
        self.rows.append(rows)
        if self._draw is not None:
            return self._draw(rows)
        return DrawResult(torch.zeros(len(rows.hidden), dtype=torch.int64))


def grammar(
    allowed: dict[str, list[Any]] | None, drafts: dict[str, list[int]]
) -> GrammarOutput | None:
    """Return what the scheduler sends for these grammars; arguments as in Play.step."""
    if not allowed:
        return None
    masks: list[Any] = []
    for name, tokens in allowed.items():
        shared = isinstance(tokens[0], int)
        masks += [tokens] * (1 + len(drafts.get(name, []))) if shared else tokens
    bits = np.zeros((len(masks), -(-V // 32)), np.uint32)
    for row, tokens in enumerate(masks):
        for token in tokens:
            bits[row, token // 32] |= np.uint32(1 << (token % 32))
    return GrammarOutput(list(allowed), bits.view(np.int32))
