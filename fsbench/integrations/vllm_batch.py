"""One model runner's batches: each row is drawn by the plug-in or by vLLM, then put together."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsbench.integrations.draw import Draw, LogprobRequest, Rows, Told
from fsbench.integrations.draw_kinds import DrawKind
from fsbench.integrations.routing import MOST_LOGPROBS, Group, Need, Way, reason, route, shared_out
from fsbench.integrations.vllm_0_26 import Adapter
from fsbench.integrations.vllm_parts import (
    NOT_BESIDE_DRAFTS,
    DraftedBatch,
    Own,
    on_device,
    part,
    subset,
)

NOT_COMPILED = "kernels are being compiled"
"""Reason of rows that are left to vLLM until a process has compiled their kernels."""
_CHANGES = Need.BIAS | Need.REPETITION
_LOG = logging.getLogger("vllm.fsbench")


class Counts:
    """Rows that became tokens: `served` by the plug-in, and left to vLLM by reason.

    Of a request with drafts all rows count, also those that no token comes from.
    """

    def __init__(self) -> None:
        self.served = 0
        self.left: Counter[str] = Counter()

    def as_dict(self) -> dict[str, Any]:
        return {"served": self.served, "left": dict(self.left)}

    def log(self) -> None:
        """One line, if there was a token."""
        left = ", ".join(f"{number} {reason}" for reason, number in self.left.most_common())
        if self.served or left:
            _LOG.info("fsbench: served %d tokens; left to vLLM: %s", self.served, left or "none")


class Settings(NamedTuple):
    """Of a group: the slots of its requests, and what they ask for, all [n]; screened: see Rows."""

    key: tuple[int, bytes, bytes]
    slots: Tensor
    temperature: Tensor
    seed: Tensor
    filters: tuple[Tensor, Tensor, Tensor]
    screened: bool


@dataclass
class BatchSampler:
    """The plug-in's part of one model runner.

    draw: what draws in place of vLLM, or None: then `lacks` says why, and vLLM draws it all.
    V: tokens of the vocabulary. generation: requests added so far, which is when settings change.
    is_ready: whether a kind of draws is compiled; vLLM draws the others.
    """

    adapter: Adapter
    draw: Draw | None
    V: int = 0
    lacks: str = ""
    generation: int = 0
    is_ready: Callable[[DrawKind], bool] = lambda kind: True

    def __post_init__(self) -> None:
        self.counts = Counts()
        self._settings: dict[Way, Settings] = {}
        self._indices: dict[Way, tuple[bytes, Tensor]] = {}
        self._routed: tuple[tuple[int, bytes], np.ndarray, list[Group]] | None = None

    def sample(
        self, runner: Any, hidden: Tensor, batch: Any, grammar: Any, own: Own
    ) -> tuple[Any, Tensor, Tensor]:
        """What GPUModelRunner.sample returns. own: vLLM's, for the rows that are left to it."""
        if self.draw is None:
            complete = self._complete(runner, batch)
            if complete.any():
                self.counts.left[self.lacks] += int(complete.sum())
            return own(hidden, batch, grammar)
        drafted, given, able = None, (batch, grammar), self.draw.able
        if runner.speculative_config is not None:
            able &= ~NOT_BESIDE_DRAFTS
        if batch.num_draft_tokens:
            drafted = DraftedBatch(batch, grammar, runner.num_speculative_steps)
            batch, grammar = drafted.batch, drafted.grammar
        complete = self._complete(runner, batch)
        needs, groups = self._route(runner, batch, grammar, able)
        B = batch.num_reqs
        draws: list[tuple[Group, Tensor | None, Rows | None]] = []  # no rows: vLLM draws them
        for group in groups:
            index, rows = self._index(group, B, hidden.device), None
            if group.way is not Way.ENGINE:
                rows = self._rows(runner, hidden, batch, grammar, group, needs[group.rows], index)
                if not self.is_ready(DrawKind.of(rows)):
                    rows = None
            draws.append((group, index, rows))
            counted = group.rows[complete[group.rows]]
            if rows is not None:
                self.counts.served += len(counted)
            elif group.way is not Way.ENGINE:
                self.counts.left[NOT_COMPILED] += len(counted)
            else:
                for need in needs[counted].tolist():
                    self.counts.left[reason(need, able)] += 1
        if all(rows is None for _, _, rows in draws):
            return own(hidden, *given)

        tokens = torch.empty(B, dtype=torch.int64, device=hidden.device)
        told: list[tuple[Tensor | None, Told, int]] = []
        width = 1
        if (needs & Need.LOGPROB).any():
            width += max(0, self.adapter.most_logprobs(runner, batch.idx_mapping_np))
        more = np.zeros(B, bool)
        for group, index, rows in draws:
            if rows is None:
                assert index is not None
                grammars = part(grammar, batch, group.rows)
                if drafted is None:
                    output = own(hidden, subset(batch, group.rows, index), grammars)[0]
                    tokens[index] = output.sampled_token_ids[:, 0]
                else:
                    output = drafted.left(own, hidden, group.rows, grammars)
                    tokens[index] = 0
                if output.logprobs_tensors is not None:
                    told.append((index, Told(*output.logprobs_tensors[:3]), 0))
                continue
            drawn = self.draw(rows)
            # An engine cannot feed -1, which is a row without a finite logit.
            tokens[slice(None) if index is None else index] = drawn.tokens.clamp(min=0)
            if drawn.told is not None:
                ids, logprobs, ranks = drawn.told
                told.append((index, Told(ids[:, :width], logprobs[:, :width], ranks), 0))
            more[group.rows] = needs[group.rows] & Need.MORE_LOGPROBS != 0
        if more.any():  # the token is ours, and what else is told is vLLM's
            group = Group(Way.ENGINE, np.flatnonzero(more))
            index = on_device(group.rows, hidden.device)
            grammars = part(grammar, batch, group.rows)
            output = own(hidden, subset(batch, group.rows, index), grammars)[0]
            told.append((index, Told(*output.logprobs_tensors[:3]), 1))
        together, bounds = joined(tokens, told) if told else None, None
        if drafted is None:
            sampled = batch.seq_lens.new_ones(B)
        else:
            tokens, sampled = drafted.verified(tokens)
            batch, bounds = drafted.whole, drafted.whole.cu_num_logits_np.tolist()
        counts = self.adapter.num_sampled(runner, batch, sampled)
        return self.adapter.output(tokens, together, counts, bounds)

    def _complete(self, runner: Any, batch: Any) -> np.ndarray:
        """bool [B]: rows whose prompt is complete; tokens of others are discarded."""
        lengths = batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs]
        full: np.ndarray = lengths >= runner.req_states.prefill_len.np[batch.idx_mapping_np]
        return full

    def _route(
        self, runner: Any, batch: Any, grammar: Any, able: Need
    ) -> tuple[np.ndarray, list[Group]]:
        """(needs, groups) of a batch; those of the last one, unless requests have changed."""
        key = (self.generation, batch.idx_mapping_np.tobytes())
        if self._routed is None or self._routed[0] != key:
            needs = shared_out(self.adapter.needs(runner, batch.idx_mapping_np), able)
            self._routed = key, needs, route(needs, able)
        _, needs, groups = self._routed
        if grammar is None:
            return needs, groups
        constrained = set(grammar.structured_output_request_ids)
        masked = [Need.MASK if each in constrained else 0 for each in batch.req_ids]
        needs = needs | np.array(masked, np.int64)
        return needs, route(needs, able)

    def _index(self, group: Group, B: int, device: torch.device) -> Tensor | None:
        """The rows on the device, or None if they are all."""
        if len(group.rows) == B:
            return None
        key = group.rows.tobytes()
        kept = self._indices.get(group.way)
        if kept is None or kept[0] != key:
            kept = self._indices[group.way] = key, on_device(group.rows, device)
        return kept[1]

    def _rows(
        self,
        runner: Any,
        hidden: Tensor,
        batch: Any,
        grammar: Any,
        group: Group,
        needs: np.ndarray,
        index: Tensor | None,
    ) -> Rows:
        """What the draw gets of a group. needs: of its rows."""
        settings, n = self._of_group(runner, batch, group, index), len(group.rows)
        any_of = int(np.bitwise_or.reduce(needs))
        if index is None and batch.num_tokens == batch.num_reqs:  # one token of each, in order
            mine, offset = hidden[:n], batch.positions[:n]
        else:
            last = batch.logits_indices if index is None else batch.logits_indices[index]
            mine, offset = hidden[last], batch.positions[last]
        penalized = group.way is Way.PENALIZED
        bias = penalties = None
        if any_of & Need.BIAS:
            bias = hidden.new_zeros(n, self.V, dtype=torch.float32)
            part_of = batch if index is None else subset(batch, group.rows, index)
            self.adapter.add_biases(runner, part_of, bias, not penalized)
        if penalized:
            lengths = batch.seq_lens_cpu_upper_bound.numpy()[group.rows]
            capacity = min(self.V, 1 << int(lengths.max()).bit_length())
            penalties = self.adapter.penalties(runner, settings.slots, self.V, capacity)
        asked = apart = None
        if any_of & Need.LOGPROB:
            raw = runner.sampler.logprobs_mode == "raw_logprobs"
            asked = LogprobRequest(MOST_LOGPROBS if any_of & Need.TOP_LOGPROBS else 0, raw)
            changed = (needs & Need.OTHER_LOGPROB != 0) & (needs & _CHANGES != 0)
            apart = on_device(np.flatnonzero(changed), hidden.device) if changed.any() else None
        return Rows(
            mine,
            settings.temperature,
            settings.seed,
            offset,
            filters=None if group.way is Way.FUSED else settings.filters,
            bias=bias,
            mask=self._mask(batch, grammar, group, hidden.device) if any_of & Need.MASK else None,
            penalties=penalties,
            asked=asked,
            apart=apart,
            screened=settings.screened and asked is None,
        )

    def _of_group(self, runner: Any, batch: Any, group: Group, index: Tensor | None) -> Settings:
        """What requests ask for, gathered on the GPU when the batch changes."""
        key = (self.generation, batch.idx_mapping_np.tobytes(), group.rows.tobytes())
        kept = self._settings.get(group.way)
        if kept is not None and kept.key == key:
            return kept
        slots = batch.idx_mapping.clone() if index is None else batch.idx_mapping[index]
        temperature, seed, top_k, top_p, min_p = self.adapter.settings(runner, slots)
        screened = False
        if group.way is Way.FILTERED:
            assert self.draw is not None
            largest_k = self.adapter.largest_k(runner, batch.idx_mapping_np[group.rows])
            screened = self.draw.screens(len(group.rows), largest_k)
        made = Settings(key, slots, temperature, seed, (top_k, top_p, min_p), screened)
        self._settings[group.way] = made
        return made

    def _mask(self, batch: Any, grammar: Any, group: Group, device: torch.device) -> Tensor:
        """int32 [n, words]: the grammars' bits; all tokens are allowed to rows without one."""
        words = -(-self.V // 32)
        bits = np.full((len(group.rows), words), -1, np.int32)
        given = dict(
            zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True)
        )
        for place, row in enumerate(group.rows.tolist()):
            found = given.get(batch.req_ids[row])
            if found is not None:
                bits[place, : len(found)] = found[:words]
        return on_device(bits, device)


def joined(tokens: Tensor, parts: list[tuple[Tensor | None, Told, int]]) -> Told:
    """New tensors of a whole batch. tokens: int64 [B], the drawn ones.

    parts: rows, or None for all; what is told of them; and the first column of it that counts, with
    ranks if that is 0. Behind what is told of a row it has 0 and -inf.
    """
    if len(parts) == 1 and parts[0][0] is None:
        return Told(*(each.clone() for each in parts[0][1]))
    width = max(each.tokens.shape[1] for _, each, _ in parts)
    ids = torch.nn.functional.pad(tokens[:, None], (0, width - 1))
    nothing = torch.full_like(ids, -torch.inf, dtype=torch.float32)
    made = Told(ids, nothing, torch.zeros_like(tokens))
    for index, each, first in parts:
        where, n = slice(None) if index is None else index, each.tokens.shape[1]
        made.tokens[where, first:n] = each.tokens[:, first:].to(torch.int64)
        made.logprobs[where, first:n] = each.logprobs[:, first:]
        if first == 0:
            made.ranks[where] = each.ranks.to(torch.int64)
    return made
