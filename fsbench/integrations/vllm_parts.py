"""Parts of a batch of vLLM: some of its rows, and each row of one whose requests have drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsbench.integrations.routing import Need
from fsbench.kernels import verify_drafts

Own = Callable[[Tensor, Any, Any], tuple[Any, Tensor, Tensor]]
"""vLLM's own sampling of (hidden states, InputBatch, GrammarOutput or None)."""

NOT_BESIDE_DRAFTS = Need.REPETITION | Need.MORE_LOGPROBS
"""What an engine with drafts serves itself: a history ends before the drafts of its own step, and
vLLM tells further log-probabilities of its own tokens only."""


class DraftedBatch:
    """A batch of which requests have drafts, as one with a request for each row of logits.

    A row draws what plain decoding would draw there, if the drafts before it are right: its noise
    is of the request's seed and of the position that was fed. So a draft is accepted if it is what
    the row before it draws (docs/guide/speculation.md).

    batch, grammar: of rows. whole: the batch as it was. steps: drafts of a request, at most.
    """

    def __init__(self, batch: Any, grammar: Any, steps: int):
        self.whole, self._steps = batch, steps
        counts = np.diff(batch.cu_num_logits_np)
        self._owner = owner = np.repeat(np.arange(batch.num_reqs), counts)
        place = np.arange(len(owner)) - batch.cu_num_logits_np[owner]
        rows = zip(owner.tolist(), place.tolist(), strict=True)
        self.batch = replace(
            batch,
            req_ids=[(batch.req_ids[request], at) for request, at in rows],
            num_reqs=len(owner),
            num_draft_tokens=0,
            idx_mapping=batch.expanded_idx_mapping,
            idx_mapping_np=batch.idx_mapping_np[owner],
            seq_lens=batch.seq_lens[:1].expand(len(owner)),  # of rows it is not read
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[torch.from_numpy(owner)],
        )
        self.grammar = grammar
        if grammar is not None:  # it has a mask for each row
            of = dict(zip(batch.req_ids, counts.tolist(), strict=True))
            ids = grammar.structured_output_request_ids
            of_rows = [(each, at) for each in ids for at in range(of[each])]
            self.grammar = replace(grammar, structured_output_request_ids=of_rows)
        self._left: list[tuple[Tensor, Any]] = []

    def left(self, own: Own, hidden: Tensor, rows: np.ndarray, grammar: Any) -> Any:
        """What vLLM makes of the requests of these rows, all of each request's. grammar: theirs."""
        whole, requests = self.whole, np.unique(self._owner[rows])
        index = on_device(requests, hidden.device)
        counts = np.diff(whole.cu_num_logits_np)[requests]
        bounds = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        if grammar is not None:
            ids = [request for request, _ in grammar.structured_output_request_ids]
            grammar = replace(grammar, structured_output_request_ids=list(dict.fromkeys(ids)))
        batch = replace(
            subset(self.batch, rows, on_device(rows, hidden.device)),
            req_ids=[whole.req_ids[request] for request in requests],
            num_reqs=len(requests),
            num_draft_tokens=len(rows) - len(requests),
            idx_mapping=whole.idx_mapping[index],
            idx_mapping_np=whole.idx_mapping_np[requests],
            seq_lens=whole.seq_lens[index],
            seq_lens_cpu_upper_bound=whole.seq_lens_cpu_upper_bound[torch.from_numpy(requests)],
            cu_num_logits=on_device(bounds, hidden.device),
            cu_num_logits_np=bounds,
        )
        output, sampled, _ = own(hidden, batch, grammar)
        self._left.append((index, (output.sampled_token_ids, sampled)))
        return output

    def verified(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(the tokens that stand, int64 [B, steps + 1]; how many, int32 [B]).

        tokens: int64 [N], drawn at each row; of requests that were left to vLLM its own stand.
        """
        batch, bounds = self.whole, self.whole.cu_num_logits.long()
        rows = bounds[:-1, None] + torch.arange(self._steps + 1, device=tokens.device)
        inside = rows < bounds[1:, None]
        rows = rows.clamp(max=len(tokens) - 1)
        fed = batch.input_ids[batch.logits_indices[rows[:, 1:]]]
        found = verify_drafts(tokens[rows], fed.where(inside[:, 1:], -1))
        stand, count = found.tokens.clamp(min=0), (found.num_accepted + 1).int()
        for index, (theirs, sampled) in self._left:
            stand[index, : theirs.shape[1]] = theirs
            count[index] = sampled
        return stand, count


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device; the host does not wait for it."""
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def subset(batch: Any, rows: np.ndarray, index: Tensor) -> Any:
    """An InputBatch of some rows of one without drafts, as far as sampling reads it."""
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


def part(grammar: Any, batch: Any, rows: np.ndarray) -> Any:
    """The grammars of some rows' requests, or None if they have none."""
    if grammar is None:
        return None
    here = {batch.req_ids[row] for row in rows.tolist()}
    kept = [i for i, each in enumerate(grammar.structured_output_request_ids) if each in here]
    if not kept:
        return None
    return replace(
        grammar,
        structured_output_request_ids=[grammar.structured_output_request_ids[i] for i in kept],
        grammar_bitmask=grammar.grammar_bitmask[kept],
    )
