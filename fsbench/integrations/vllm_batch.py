"""Sample one model runner's batches: route each row to the plug-in or to vLLM, and join results."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsbench.integrations import vllm_0_26 as adapter
from fsbench.integrations.draw import Draw, DrawResult, LogprobRequest, Rows, TokenLogprobs
from fsbench.integrations.draw_kinds import DrawKind
from fsbench.integrations.routing import (
    MOST_LOGPROBS,
    Group,
    Need,
    Route,
    delegate_logprobs,
    group_rows,
    reason,
)
from fsbench.integrations.vllm_parts import (
    UNSUPPORTED_WITH_DRAFTS,
    DraftedBatch,
    EngineSample,
    on_device,
    select_grammar,
    select_rows,
)

NOT_COMPILED = "kernels are being compiled"
"""Reason of rows that vLLM samples until another process has compiled their kernels."""
_CHANGES = Need.BIAS | Need.REPETITION
_LOG = logging.getLogger("vllm.fsbench")

LogprobPart = tuple[Tensor | None, TokenLogprobs, int]
"""(rows or None for all, their log-probabilities, the first column of these to use)."""


class Counts:
    """Numbers of rows that became tokens: `served` by the plug-in, `unserved` by reason.

    With drafts every row counts, also those whose token is rejected.
    """

    def __init__(self) -> None:
        self.served = 0
        self.unserved: Counter[str] = Counter()

    def as_dict(self) -> dict[str, Any]:
        return {"served": self.served, "left": dict(self.unserved)}

    def log(self) -> None:
        """Log one line, if there was a token."""
        unserved = ", ".join(f"{number} {reason}" for reason, number in self.unserved.most_common())
        if self.served or unserved:
            _LOG.info(
                "fsbench: served %d tokens; left to vLLM: %s", self.served, unserved or "none"
            )


class Settings(NamedTuple):
    """Settings of the requests of a group of n rows, kept until the batch changes.

    Attributes:
        key: (generation, requests of the batch, rows of the group) that the settings belong to.
        slots: [n], the indices of the requests in vLLM's states.
        temperature, seed, filters, screened: as in Rows.
    """

    key: tuple[int, bytes, bytes]
    slots: Tensor
    temperature: Tensor
    seed: Tensor
    filters: tuple[Tensor, Tensor, Tensor]
    screened: bool


class Step:
    """Tokens and log-probabilities of one batch, filled in group by group.

    Args:
        hidden, batch, grammar: those of all rows; with drafts the expanded ones.
        drafted: the batch with drafts, or None.

    Attributes:
        tokens: int64 [rows].
        parts: the log-probabilities of the groups that have some.
    """

    def __init__(
        self,
        hidden: Tensor,
        batch: Any,
        grammar: Any,
        drafted: DraftedBatch | None,
        engine_sample: EngineSample,
    ):
        self._hidden, self._batch, self._grammar = hidden, batch, grammar
        self._drafted, self._engine_sample = drafted, engine_sample
        self.tokens = torch.empty(batch.num_reqs, dtype=torch.int64, device=hidden.device)
        self.parts: list[LogprobPart] = []

    def take(self, result: DrawResult, index: Tensor | None, width: int) -> None:
        """Take the result of a draw of the plug-in.

        Args:
            index: the rows, on the device; None for all.
            width: log-probabilities of a row that are kept.
        """
        # -1 marks a row without a finite logit, and an engine cannot feed it.
        self.tokens[slice(None) if index is None else index] = result.tokens.clamp(min=0)
        if result.logprobs is not None:
            ids, values, ranks = result.logprobs
            kept = TokenLogprobs(ids[:, :width], values[:, :width], ranks)
            self.parts.append((index, kept, 0))

    def sample_in_engine(self, rows: np.ndarray, index: Tensor) -> None:
        """Let vLLM sample some rows; index: the same rows, on the device."""
        grammar = select_grammar(self._grammar, self._batch, rows)
        if self._drafted is None:
            part = select_rows(self._batch, rows, index)
            output = self._engine_sample(self._hidden, part, grammar)[0]
            self.tokens[index] = output.sampled_token_ids[:, 0]
        else:
            output = self._drafted.sample_in_engine(
                self._engine_sample, self._hidden, rows, grammar
            )
            self.tokens[index] = 0  # `verify` takes vLLM's
        if output.logprobs_tensors is not None:
            self.parts.append((index, TokenLogprobs(*output.logprobs_tensors[:3]), 0))

    def add_logprobs_of_engine(self, rows: np.ndarray) -> None:
        """Add vLLM's log-probabilities of other tokens to rows whose token the plug-in drew."""
        index = on_device(rows, self._hidden.device)
        grammar = select_grammar(self._grammar, self._batch, rows)
        part = select_rows(self._batch, rows, index)
        output = self._engine_sample(self._hidden, part, grammar)[0]
        self.parts.append((index, TokenLogprobs(*output.logprobs_tensors[:3]), 1))


@dataclass
class BatchSampler:
    """The plug-in's sampling for one model runner.

    Attributes:
        draw: samples in place of vLLM; if None, vLLM samples everything, for `disabled_reason`.
        V: tokens of the vocabulary.
        generation: incremented when a request is added, since settings change then.
        is_ready: whether a kind of draws is compiled; vLLM samples the others.
    """

    draw: Draw | None = None
    V: int = 0
    disabled_reason: str = ""
    generation: int = 0
    is_ready: Callable[[DrawKind], bool] = lambda kind: True

    def __post_init__(self) -> None:
        self.counts = Counts()
        self._settings: dict[Route, Settings] = {}
        self._indices: dict[Route, tuple[bytes, Tensor]] = {}
        self._routed: tuple[tuple[int, bytes], np.ndarray, list[Group]] | None = None

    def sample(
        self, runner: Any, hidden: Tensor, batch: Any, grammar: Any, engine_sample: EngineSample
    ) -> tuple[Any, Tensor, Tensor]:
        """Sample a batch; return what GPUModelRunner.sample returns.

        Args:
            engine_sample: vLLM's sampling, for the rows that the plug-in does not serve.
        """
        if self.draw is None:
            complete = self._complete(runner, batch)
            if complete.any():
                self.counts.unserved[self.disabled_reason] += int(complete.sum())
            return engine_sample(hidden, batch, grammar)
        drafted, original, supported = None, (batch, grammar), self.draw.supported
        if runner.speculative_config is not None:
            supported &= ~UNSUPPORTED_WITH_DRAFTS
        if batch.num_draft_tokens:
            drafted = DraftedBatch(batch, grammar, runner.num_speculative_steps)
            batch, grammar = drafted.batch, drafted.grammar
        needs, groups = self._route(runner, batch, grammar, supported)
        # Rows are None where vLLM samples the group.
        draws: list[tuple[Group, Tensor | None, Rows | None]] = []
        for group in groups:
            index, rows = self._index(group, batch.num_reqs, hidden.device), None
            if group.route is not Route.ENGINE:
                rows = self._rows(runner, hidden, batch, grammar, group, needs[group.rows], index)
                if not self.is_ready(DrawKind.from_rows(rows)):
                    rows = None
            draws.append((group, index, rows))
        self._count(draws, needs, self._complete(runner, batch), supported)
        if all(rows is None for _, _, rows in draws):
            return engine_sample(hidden, *original)

        step = Step(hidden, batch, grammar, drafted, engine_sample)
        width = 1
        if (needs & Need.LOGPROB).any():
            width += max(0, adapter.max_logprobs(runner, batch.idx_mapping_np))
        more = np.zeros(batch.num_reqs, bool)  # rows with log-probabilities of vLLM's, too
        for group, index, rows in draws:
            if rows is None:
                assert index is not None
                step.sample_in_engine(group.rows, index)
            else:
                step.take(self.draw(rows), index, width)
                more[group.rows] = needs[group.rows] & Need.MORE_LOGPROBS != 0
        if more.any():
            step.add_logprobs_of_engine(np.flatnonzero(more))
        tokens, parts = step.tokens, step.parts
        logprobs, bounds = join_logprobs(tokens, parts) if parts else None, None
        if drafted is None:
            sampled = batch.seq_lens.new_ones(batch.num_reqs)
        else:
            tokens, sampled = drafted.verify(tokens)
            batch, bounds = drafted.original, drafted.original.cu_num_logits_np.tolist()
        counts = adapter.num_sampled(runner, batch, sampled)
        return adapter.sampler_output(tokens, logprobs, counts, bounds)

    def _count(
        self,
        draws: list[tuple[Group, Tensor | None, Rows | None]],
        needs: np.ndarray,
        complete: np.ndarray,
        supported: Need,
    ) -> None:
        """Count the rows whose prompt is complete, by who samples them."""
        for group, _, rows in draws:
            members = group.rows[complete[group.rows]]
            if rows is not None:
                self.counts.served += len(members)
            elif group.route is not Route.ENGINE:
                self.counts.unserved[NOT_COMPILED] += len(members)
            else:
                self.counts.unserved.update(reason(need, supported) for need in needs[members])

    def _complete(self, runner: Any, batch: Any) -> np.ndarray:
        """Return which rows have a complete prompt, bool [B]; vLLM discards the others' tokens."""
        lengths = batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs]
        complete: np.ndarray = lengths >= runner.req_states.prefill_len.np[batch.idx_mapping_np]
        return complete

    def _route(
        self, runner: Any, batch: Any, grammar: Any, supported: Need
    ) -> tuple[np.ndarray, list[Group]]:
        """Return (needs, groups) of a batch, those of the last step if no request has changed."""
        key = (self.generation, batch.idx_mapping_np.tobytes())
        if self._routed is None or self._routed[0] != key:
            needs = adapter.request_needs(runner, batch.idx_mapping_np)
            needs = delegate_logprobs(needs, supported)
            self._routed = key, needs, group_rows(needs, supported)
        _, needs, groups = self._routed
        if grammar is None:
            return needs, groups
        constrained = set(grammar.structured_output_request_ids)
        masks = [Need.MASK if name in constrained else 0 for name in batch.req_ids]
        needs = needs | np.array(masks, np.int64)
        return needs, group_rows(needs, supported)

    def _index(self, group: Group, B: int, device: torch.device) -> Tensor | None:
        """Return a group's rows on the device, or None if they are the whole batch."""
        if len(group.rows) == B:
            return None
        key = group.rows.tobytes()
        cached = self._indices.get(group.route)
        if cached is None or cached[0] != key:
            cached = self._indices[group.route] = key, on_device(group.rows, device)
        return cached[1]

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
        """Return the inputs of a group's draw. needs: those of its rows."""
        settings, n = self._group_settings(runner, batch, group, index), len(group.rows)
        any_need = int(np.bitwise_or.reduce(needs))
        if index is None and batch.num_tokens == batch.num_reqs:  # one token of each, in order
            hidden_rows, offset = hidden[:n], batch.positions[:n]
        else:
            last = batch.logits_indices if index is None else batch.logits_indices[index]
            hidden_rows, offset = hidden[last], batch.positions[last]
        penalized = group.route is Route.PENALIZED
        bias = penalties = None
        if any_need & Need.BIAS:
            bias = hidden.new_zeros(n, self.V, dtype=torch.float32)
            members = batch if index is None else select_rows(batch, group.rows, index)
            adapter.add_biases(runner, members, bias, not penalized)
        if penalized:
            lengths = batch.seq_lens_cpu_upper_bound.numpy()[group.rows]
            capacity = min(self.V, 1 << int(lengths.max()).bit_length())
            penalties = adapter.request_penalties(runner, settings.slots, self.V, capacity)
        logprobs = raw_rows = None
        if any_need & Need.LOGPROB:
            raw = runner.sampler.logprobs_mode == "raw_logprobs"
            logprobs = LogprobRequest(MOST_LOGPROBS if any_need & Need.TOP_LOGPROBS else 0, raw)
            changed = (needs & Need.OTHER_LOGPROB != 0) & (needs & _CHANGES != 0)
            if changed.any():
                raw_rows = on_device(np.flatnonzero(changed), hidden.device)
        return Rows(
            hidden_rows,
            settings.temperature,
            settings.seed,
            offset,
            filters=None if group.route is Route.FUSED else settings.filters,
            bias=bias,
            mask=self._mask(batch, grammar, group, hidden.device) if any_need & Need.MASK else None,
            penalties=penalties,
            logprobs=logprobs,
            raw_rows=raw_rows,
            screened=settings.screened and logprobs is None,
        )

    def _group_settings(
        self, runner: Any, batch: Any, group: Group, index: Tensor | None
    ) -> Settings:
        """Return the settings of a group, gathered on the GPU only when the batch changes."""
        key = (self.generation, batch.idx_mapping_np.tobytes(), group.rows.tobytes())
        cached = self._settings.get(group.route)
        if cached is not None and cached.key == key:
            return cached
        slots = batch.idx_mapping.clone() if index is None else batch.idx_mapping[index]
        temperature, seed, top_k, top_p, min_p = adapter.settings(runner, slots)
        screened = False
        if group.route is Route.FILTERED:
            assert self.draw is not None
            largest_k = adapter.largest_k(runner, batch.idx_mapping_np[group.rows])
            screened = self.draw.screens(len(group.rows), largest_k)
        settings = Settings(key, slots, temperature, seed, (top_k, top_p, min_p), screened)
        self._settings[group.route] = settings
        return settings

    def _mask(self, batch: Any, grammar: Any, group: Group, device: torch.device) -> Tensor:
        """Return the grammars' masks, int32 [n, words]; rows without one may draw any token."""
        words = -(-self.V // 32)
        masks = np.full((len(group.rows), words), -1, np.int32)
        ids = grammar.structured_output_request_ids
        by_request = dict(zip(ids, grammar.grammar_bitmask, strict=True))
        for mask, row in zip(masks, group.rows, strict=True):
            bits = by_request.get(batch.req_ids[row])
            if bits is not None:
                mask[: len(bits)] = bits[:words]
        return on_device(masks, device)


def join_logprobs(tokens: Tensor, parts: list[LogprobPart]) -> TokenLogprobs:
    """Join the log-probabilities of groups into new tensors for a whole batch.

    Columns that a row did not request are 0 and -inf.

    Args:
        tokens: int64 [B], the sampled tokens.
        parts: ranks are taken from the parts whose first column is 0.
    """
    if len(parts) == 1 and parts[0][0] is None:
        return TokenLogprobs(*(each.clone() for each in parts[0][1]))
    width = max(part.tokens.shape[1] for _, part, _ in parts)
    ids = torch.nn.functional.pad(tokens[:, None], (0, width - 1))
    values = torch.full_like(ids, -torch.inf, dtype=torch.float32)
    joined = TokenLogprobs(ids, values, torch.zeros_like(tokens))
    for index, part, first in parts:
        rows, n = slice(None) if index is None else index, part.tokens.shape[1]
        joined.tokens[rows, first:n] = part.tokens[:, first:].to(torch.int64)
        joined.values[rows, first:n] = part.values[:, first:]
        if first == 0:
            joined.ranks[rows] = part.ranks.to(torch.int64)
    return joined
