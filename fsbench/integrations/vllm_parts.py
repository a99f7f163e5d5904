"""Build vLLM batches from others: some rows of a batch, or one request per row of drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsbench.integrations.routing import Need
from fsbench.kernels import verify_drafts

EngineSample = Callable[[Tensor, Any, Any], tuple[Any, Tensor, Tensor]]
"""vLLM's sampling of (hidden states, InputBatch, GrammarOutput or None)."""

UNSUPPORTED_WITH_DRAFTS = Need.REPETITION | Need.MORE_LOGPROBS
"""Needs that only vLLM meets for rows of drafts: a history ends before the drafts of its step, and
vLLM computes further log-probabilities only for tokens that it sampled."""


class DraftedBatch:
    """A batch with drafts, expanded to one request per row of logits.

    A row draws what plain decoding would draw there if the drafts before it are right, because its
    noise depends only on the request's seed and the position of the token that was fed. A draft is
    accepted if the row before it draws it (docs/guide/speculation.md).

    Args:
        batch: vLLM's InputBatch.
        grammar: its GrammarOutput, or None.
        steps: most drafts of a request.

    Attributes:
        batch, grammar: the expanded ones.
        original: the batch that was passed.
    """

    def __init__(self, batch: Any, grammar: Any, steps: int):
        self.original, self._steps = batch, steps
        counts = np.diff(batch.cu_num_logits_np)
        self._request = request = np.repeat(np.arange(batch.num_reqs), counts)
        place = np.arange(len(request)) - batch.cu_num_logits_np[request]
        rows = zip(request.tolist(), place.tolist(), strict=True)
        self.batch = replace(
            batch,
            req_ids=[(batch.req_ids[number], index) for number, index in rows],
            num_reqs=len(request),
            num_draft_tokens=0,
            idx_mapping=batch.expanded_idx_mapping,
            idx_mapping_np=batch.idx_mapping_np[request],
            seq_lens=batch.seq_lens[:1].expand(len(request)),  # not read of expanded rows
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[torch.from_numpy(request)],
        )
        self.grammar = grammar
        if grammar is not None:  # it has a mask for each row
            num_rows = dict(zip(batch.req_ids, counts.tolist(), strict=True))
            ids = grammar.structured_output_request_ids
            row_ids = [(name, index) for name in ids for index in range(num_rows[name])]
            self.grammar = replace(grammar, structured_output_request_ids=row_ids)
        self._engine_results: list[tuple[Tensor, Tensor, Tensor]] = []

    def sample_in_engine(
        self, engine_sample: EngineSample, hidden: Tensor, rows: np.ndarray, grammar: Any
    ) -> Any:
        """Let vLLM sample and verify some requests; return its SamplerOutput.

        Args:
            rows: all expanded rows of these requests.
            grammar: the expanded grammar of these rows, or None.
        """
        batch, requests = self.original, np.unique(self._request[rows])
        index = on_device(requests, hidden.device)
        counts = np.diff(batch.cu_num_logits_np)[requests]
        bounds = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        if grammar is not None:
            ids = [request for request, _ in grammar.structured_output_request_ids]
            grammar = replace(grammar, structured_output_request_ids=list(dict.fromkeys(ids)))
        selected = replace(
            select_rows(self.batch, rows, on_device(rows, hidden.device)),
            req_ids=[batch.req_ids[request] for request in requests],
            num_reqs=len(requests),
            num_draft_tokens=len(rows) - len(requests),
            idx_mapping=batch.idx_mapping[index],
            idx_mapping_np=batch.idx_mapping_np[requests],
            seq_lens=batch.seq_lens[index],
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[torch.from_numpy(requests)],
            cu_num_logits=on_device(bounds, hidden.device),
            cu_num_logits_np=bounds,
        )
        output, sampled, _ = engine_sample(hidden, selected, grammar)
        self._engine_results.append((index, output.sampled_token_ids, sampled))
        return output

    def verify(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return (accepted tokens int64 [B, steps + 1], their number int32 [B]) of each request.

        Args:
            tokens: int64 [N], drawn at each row. Requests of sample_in_engine keep vLLM's tokens.
        """
        batch, bounds = self.original, self.original.cu_num_logits.long()
        rows = bounds[:-1, None] + torch.arange(self._steps + 1, device=tokens.device)
        inside = rows < bounds[1:, None]
        rows = rows.clamp(max=len(tokens) - 1)
        fed = batch.input_ids[batch.logits_indices[rows[:, 1:]]]
        verified = verify_drafts(tokens[rows], fed.where(inside[:, 1:], -1))
        accepted, count = verified.tokens.clamp(min=0), (verified.num_accepted + 1).int()
        for index, engine_tokens, sampled in self._engine_results:
            accepted[index, : engine_tokens.shape[1]] = engine_tokens
            count[index] = sampled
        return accepted, count


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device without making the host wait."""
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def select_rows(batch: Any, rows: np.ndarray, index: Tensor) -> Any:
    """Return an InputBatch of some rows of one without drafts, with the fields that sampling reads.

    Args:
        rows: the rows, on the host.
        index: the same rows, on the device.
    """
    return replace(
        batch,
        req_ids=[batch.req_ids[row] for row in rows],
        num_reqs=len(rows),
        idx_mapping=batch.idx_mapping[index],
        idx_mapping_np=batch.idx_mapping_np[rows],
        expanded_idx_mapping=batch.expanded_idx_mapping[index],
        expanded_local_pos=batch.expanded_local_pos[index],
        seq_lens=batch.seq_lens[index],
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[torch.from_numpy(rows)],
        logits_indices=batch.logits_indices[index],
        cu_num_logits=batch.cu_num_logits[: len(rows) + 1],
        cu_num_logits_np=batch.cu_num_logits_np[: len(rows) + 1],
    )


def select_grammar(grammar: Any, batch: Any, rows: np.ndarray) -> Any:
    """Return the part of a GrammarOutput for some rows of a batch, or None."""
    if grammar is None:
        return None
    names, ids = {batch.req_ids[row] for row in rows}, grammar.structured_output_request_ids
    selected = [index for index, name in enumerate(ids) if name in names]
    if not selected:
        return None
    return replace(
        grammar,
        structured_output_request_ids=[ids[index] for index in selected],
        grammar_bitmask=grammar.grammar_bitmask[selected],
    )
