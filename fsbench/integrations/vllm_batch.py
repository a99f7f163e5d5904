"""One model runner's batches: each row is drawn by the plug-in or by vLLM, then put together."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsbench.integrations.draw import Asked, Draw, Rows, Told
from fsbench.integrations.routing import MOST_LOGPROBS, Group, Need, Way, reason, route, shared_out
from fsbench.integrations.vllm_0_26 import Adapter

_CHANGES = Need.BIAS | Need.REPETITION
_LOG = logging.getLogger("vllm.fsbench")
Own = Callable[[Tensor, Any, Any], tuple[Any, Tensor, Tensor]]
"""vLLM's own sampling of (hidden states, InputBatch, GrammarOutput or None)."""


class Counts:
    """Rows that became tokens: `served` by the plug-in, and left to vLLM by reason."""

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
    """Of a group: the slots of its requests, and what they ask for, all [n]."""

    key: tuple[int, bytes, bytes]
    slots: Tensor
    temperature: Tensor
    seed: Tensor
    filters: tuple[Tensor, Tensor, Tensor]


@dataclass
class Sampling:
    """The plug-in's part of one model runner.

    draw: what draws in place of vLLM, or None: then `lacks` says why, and vLLM draws it all.
    V: tokens of the vocabulary. generation: requests added so far, which is when settings change.
    """

    adapter: Adapter
    draw: Draw | None
    V: int = 0
    lacks: str = ""
    generation: int = 0

    def __post_init__(self) -> None:
        self.counts = Counts()
        self._settings: dict[Way, Settings] = {}
        self._indices: dict[Way, tuple[bytes, Tensor]] = {}
        self._routed: tuple[tuple[int, bytes], np.ndarray, list[Group]] | None = None

    def sample(
        self, runner: Any, hidden: Tensor, batch: Any, grammar: Any, own: Own
    ) -> tuple[Any, Tensor, Tensor]:
        """What GPUModelRunner.sample returns. own: vLLM's, for the rows that are left to it."""
        complete = self._complete(runner, batch)
        if self.draw is None:
            if complete.any():
                self.counts.left[self.lacks] += int(complete.sum())
            return own(hidden, batch, grammar)
        needs, groups = self._route(runner, batch, grammar, self.draw.able)
        for group in groups:
            rows = group.rows[complete[group.rows]]
            if group.way is not Way.ENGINE:
                self.counts.served += len(rows)
            for need in needs[rows].tolist() if group.way is Way.ENGINE else ():
                self.counts.left[reason(need, self.draw.able)] += 1
        if [group.way for group in groups] == [Way.ENGINE]:
            return own(hidden, batch, grammar)

        B = batch.num_reqs
        tokens = torch.empty(B, dtype=torch.int64, device=hidden.device)
        told: list[tuple[Tensor | None, Told, int]] = []
        width = 1
        if (needs & Need.LOGPROB).any():
            width += max(0, self.adapter.most_logprobs(runner, batch.idx_mapping_np))
        more = np.zeros(B, bool)
        for group in groups:
            index = self._index(group, B, hidden.device)
            if group.way is Way.ENGINE:
                assert index is not None
                output = own(hidden, subset(batch, group.rows, index), part(grammar, batch, group))
                tokens[index] = output[0].sampled_token_ids[:, 0]
                if output[0].logprobs_tensors is not None:
                    told.append((index, Told(*output[0].logprobs_tensors[:3]), 0))
                continue
            rows = self._rows(runner, hidden, batch, grammar, group, needs[group.rows], index)
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
            output = own(hidden, subset(batch, group.rows, index), part(grammar, batch, group))
            told.append((index, Told(*output[0].logprobs_tensors[:3]), 1))
        together = joined(tokens, told) if told else None
        return self.adapter.output(tokens, together, self.adapter.num_sampled(runner, batch))

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
        penalised = group.way is Way.PENALISED
        bias = penalties = None
        if any_of & Need.BIAS:
            bias = torch.zeros(n, self.V, device=hidden.device)
            part_of = batch if index is None else subset(batch, group.rows, index)
            self.adapter.add_biases(runner, part_of, bias, not penalised)
        if penalised:
            lengths = batch.seq_lens_cpu_upper_bound.numpy()[group.rows]
            capacity = min(self.V, 1 << int(lengths.max()).bit_length())
            penalties = self.adapter.penalties(runner, settings.slots, self.V, capacity)
        asked = apart = None
        if any_of & Need.LOGPROB:
            raw = runner.sampler.logprobs_mode == "raw_logprobs"
            asked = Asked(MOST_LOGPROBS if any_of & Need.TOP_LOGPROBS else 0, raw)
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
        )

    def _of_group(self, runner: Any, batch: Any, group: Group, index: Tensor | None) -> Settings:
        """What requests ask for, gathered on the GPU when the batch changes."""
        key = (self.generation, batch.idx_mapping_np.tobytes(), group.rows.tobytes())
        kept = self._settings.get(group.way)
        if kept is not None and kept.key == key:
            return kept
        slots = batch.idx_mapping.clone() if index is None else batch.idx_mapping[index]
        temperature, seed, top_k, top_p, min_p = self.adapter.settings(runner, slots)
        made = Settings(key, slots, temperature, seed, (top_k, top_p, min_p))
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


def part(grammar: Any, batch: Any, group: Group) -> Any:
    """The grammars of a group's requests, or None if they have none."""
    if grammar is None:
        return None
    here = {batch.req_ids[row] for row in group.rows.tolist()}
    kept = [i for i, each in enumerate(grammar.structured_output_request_ids) if each in here]
    if not kept:
        return None
    return replace(
        grammar,
        structured_output_request_ids=[grammar.structured_output_request_ids[i] for i in kept],
        grammar_bitmask=grammar.grammar_bitmask[kept],
    )


def joined(tokens: Tensor, parts: list[tuple[Tensor | None, Told, int]]) -> Told:
    """New tensors of a whole batch. tokens: int64 [B], the drawn ones.

    parts: rows, or None for all; what is told of them; and the first column of it that counts, with
    ranks if that is 0. Behind what is told of a row it has 0 and -inf.
    """
    if len(parts) == 1 and parts[0][0] is None:
        return Told(*(each.clone() for each in parts[0][1]))
    width = max(part.tokens.shape[1] for _, part, _ in parts)
    ids = torch.nn.functional.pad(tokens[:, None], (0, width - 1))
    made = Told(ids, torch.full(ids.shape, -torch.inf, device=ids.device), torch.zeros_like(tokens))
    for index, part, first in parts:
        where, n = slice(None) if index is None else index, part.tokens.shape[1]
        made.tokens[where, first:n] = part.tokens[:, first:].to(torch.int64)
        made.logprobs[where, first:n] = part.logprobs[:, first:]
        if first == 0:
            made.ranks[where] = part.ranks.to(torch.int64)
    return made
