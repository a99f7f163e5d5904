"""The samplers of fake_vllm, with their inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from fake_vllm_states import (
    NO_LOGPROBS,
    BadWordsState,
    LogitBiasState,
    LogprobTokenIdsState,
    PenaltiesState,
    RequestState,
    SamplingStates,
    UvaBackedTensor,
    V,
)
from torch import Tensor


@dataclass
class SamplerOutput:
    sampled_token_ids: Any
    logprobs_tensors: Any
    num_nans: Any
    num_sampled: Any
    num_rejected: Any = None


class LogprobsTensors(NamedTuple):
    logprob_token_ids: Tensor
    logprobs: Tensor
    selected_token_ranks: Tensor
    cu_num_generated_tokens: Any = None


@dataclass
class GrammarOutput:
    structured_output_request_ids: list[str]
    grammar_bitmask: np.ndarray


@dataclass
class InputBatch:
    req_ids: list[str]
    num_reqs: int
    num_tokens: int
    num_draft_tokens: int
    idx_mapping: Tensor
    idx_mapping_np: np.ndarray
    expanded_idx_mapping: Tensor
    expanded_local_pos: Tensor
    input_ids: Tensor
    positions: Tensor
    logits_indices: Tensor
    seq_lens: Tensor
    seq_lens_cpu_upper_bound: Tensor
    cu_num_logits: Tensor
    cu_num_logits_np: np.ndarray


def get_num_sampled_and_rejected(num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len):
    complete = seq_lens[: len(num_sampled)] >= prefill_len[idx_mapping.long()]
    complete = complete.to(num_sampled.dtype)
    num_sampled = num_sampled * complete
    return num_sampled, (cu_num_logits.diff() - num_sampled) * complete


def gumbel(seed: int, position: int) -> Tensor:
    """Return the noise of all tokens, a function of seed and position alone."""
    generator = torch.Generator().manual_seed(hash((seed, position)) % 2**62)
    return -torch.log(-torch.log(torch.rand(V, generator=generator, dtype=torch.float32)))


class Sampler:
    """vLLM's sampler. Processors work in place on logits of the model's dtype."""

    def __init__(self, req_states: RequestState):
        self.compute_nans, self.logprobs_mode = False, "raw_logprobs"
        self.req_states = req_states
        self.sampling_states = SamplingStates(V)
        self.penalties_state = PenaltiesState(req_states)
        self.logit_bias_state = LogitBiasState()
        self.bad_words_state = BadWordsState(req_states)
        self.logprob_token_ids_state = LogprobTokenIdsState()

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        self.logit_bias_state.add_request(req_idx, prompt_len, sampling_params)
        for state in (self.sampling_states, self.penalties_state, self.bad_words_state,
                      self.logprob_token_ids_state):  # fmt: skip
            state.add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        for state in (self.sampling_states, self.logprob_token_ids_state, self.logit_bias_state,
                      self.penalties_state, self.bad_words_state):  # fmt: skip
            for each in vars(state).values():
                if isinstance(each, UvaBackedTensor):
                    each.copy_to_uva()

    def __call__(self, logits: Tensor, batch: Any) -> SamplerOutput:
        tokens, tensors = self.draw(logits, batch)
        counts = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs), batch.seq_lens, batch.cu_num_logits,
            batch.idx_mapping, self.req_states.prefill_len.gpu,
        )  # fmt: skip
        return SamplerOutput(tokens.view(-1, 1), tensors, None, *counts)

    def draw(self, logits: Tensor, batch: Any) -> tuple[Tensor, Any]:
        """Return (a token of each row, their LogprobsTensors or None)."""
        states, slots = self.sampling_states, batch.expanded_idx_mapping.numpy()
        requested = int(states.num_logprobs[slots].max())
        specified = self.logprob_token_ids_state.token_ids
        raw, processed = logits.clone(), []
        positions = batch.positions[batch.logits_indices]
        rows = (logits, batch.expanded_idx_mapping, slots)
        fed = (batch.input_ids[batch.logits_indices], batch.expanded_local_pos)
        self.logit_bias_state.apply_logit_bias(*rows, positions)
        self.penalties_state.apply_penalties(*rows, *fed)
        self.bad_words_state.apply_bad_words(*rows, *fed)
        sampled = []
        for row, slot in enumerate(slots.tolist()):
            now, T = logits[row].float(), float(states.temperature.gpu[slot])
            processed.append(now)
            if T == 0:
                sampled.append(now.argmax())
                continue
            order = (now / T).argsort(descending=True)
            chances = (now / T)[order].softmax(0)
            kept = torch.arange(V) < states.top_k.gpu[slot]
            kept &= chances >= states.min_p.gpu[slot] * chances[0]
            chances = chances * kept / chances[kept].sum()
            kept &= chances.cumsum(0) - chances < states.top_p.gpu[slot]
            processed[row] = (now / T).index_fill(0, order[~kept], -torch.inf)
            noise = gumbel(int(states.seeds.gpu[slot]), int(positions[row]))
            sampled.append((processed[row] + noise).argmax())
        tokens = torch.stack(sampled)
        tensors = None
        widest = max([requested, *(len(specified[slot]) or NO_LOGPROBS for slot in slots)])
        if widest != NO_LOGPROBS:
            stage, _, scale = self.logprobs_mode.partition("_")
            scores = raw.float() if stage == "raw" else torch.stack(processed)
            scores = scores.log_softmax(1) if scale == "logprobs" else scores
            ids = torch.cat([tokens[:, None], scores.topk(widest, 1).indices], 1)
            for row, slot in enumerate(slots.tolist()):
                if specified[slot]:
                    ids[row, 1 : 1 + len(specified[slot])] = torch.tensor(specified[slot])
            values = scores.gather(1, ids)
            tensors = LogprobsTensors(ids, values, (scores >= values[:, :1]).sum(1))
        return tokens, tensors


class RejectionSampler:
    """Verification of greedy drafts: a draft is accepted if it is drawn, which is as likely as in
    vLLM."""

    def __init__(self, sampler: Sampler, steps: int):
        self.sampler, self.num_speculative_steps = sampler, steps
        self.synthetic_conditional_rates, self.use_block_verification = None, False

    def __call__(self, logits: Tensor, input_batch: Any, draft_logits: Any = None) -> SamplerOutput:
        batch = input_batch
        assert batch.num_draft_tokens == len(logits) - batch.num_reqs > 0
        drawn, tensors = self.sampler.draw(logits, batch)
        fed = batch.input_ids[batch.logits_indices]
        tokens = torch.full((batch.num_reqs, self.num_speculative_steps + 1), 10**9)
        sampled = batch.seq_lens.new_zeros(batch.num_reqs)
        for request, (first, end) in enumerate(pairwise(batch.cu_num_logits_np.tolist())):
            for row in range(first, end):
                tokens[request, row - first] = drawn[row]
                sampled[request] += 1
                if row + 1 == end or drawn[row] != fed[row + 1]:
                    break
        counts = get_num_sampled_and_rejected(
            sampled, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )  # fmt: skip
        if tensors is not None:
            tensors = tensors._replace(cu_num_generated_tokens=batch.cu_num_logits_np.tolist())
        return SamplerOutput(tokens, tensors, None, *counts)
