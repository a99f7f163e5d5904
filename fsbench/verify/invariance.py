"""Inputs that must not change a token: calls whose tokens must be equal.

All logits are exact, so the summation order of a matmul does not change them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fsbench.errors import VerificationFailed
from fsbench.graphs import capture
from fsbench.provider import Launch
from fsbench.verify.check import Check
from fsbench.verify.drawing import (
    exact_head,
    launched_tokens,
    random_logits,
    require_form,
    require_support,
    scalar,
)
from fsbench.verify.subject import Subject

_BATCH = 300  # rows of the batch that all others are compared with
_FILTERS: dict[str, Any] = {"top_k": 20, "top_p": 0.9, "min_p": 0.02}
_VOCABULARY = 5003
_SHARDS = (0, 1280, 2560, 3840, _VOCABULARY)  # multiples of 128: no group of tokens is split


def check_invariance(subject: Subject) -> Check:
    """Check that tokens do not depend on the batch size, other rows, or eager and graph launches.

    If the sampler supports them, also check: a request in another row of another batch; other rows
    with filters, a mask or another temperature; one shard of the vocabulary, for winners in it.
    """
    comparison = _Comparison(subject)
    comparison.check_batch_sizes()
    comparison.check_graph()
    comparison.check_mixed_filters()
    if subject.provider.sample is not None:
        comparison.check_other_rows()
        comparison.check_neighbors()
    sizes, n = subject.sizes, comparison.compared
    detail = f"{n} tokens unchanged, in batches of {len(sizes)} sizes up to {max(sizes)}"
    return Check("invariance", True, detail, n)


class _Comparison:
    """Calls with one head. compared: number of tokens compared so far."""

    def __init__(self, subject: Subject):
        self.subject, self.caps = subject, subject.caps
        self.T = subject.setting.sampled_temperature
        self.problem = subject.setting.problem(_BATCH, _VOCABULARY, self.T)
        require_support(subject.provider, self.problem)
        logits = min(self.T, 1e3) * random_logits(self.problem, 3)
        self.hidden, self.weight, _ = exact_head(self.problem, logits)
        self.compared = 0
        # Seeds that differ in their low and in their high bits.
        self.seed = scalar(21, self.problem.device)
        if self.caps.per_request_seed:
            self.seed = torch.arange(_BATCH, device=self.problem.device) * 0x0123456789ABCD - 7

    def require_equal(self, label: str, tokens: Tensor, expected: Tensor) -> None:
        """Raise VerificationFailed for the first token that differs."""
        if not torch.equal(tokens.long(), expected.long()):
            row = int((tokens != expected).nonzero()[0])
            raise VerificationFailed(
                f"{label}: row {row} expected {int(expected[row])}; got {int(tokens[row])}"
            )
        self.compared += len(tokens)

    def launched(self, hidden: Tensor, **filters: Any) -> tuple[Launch, Tensor]:
        """Return a launch for these hidden states, and its tokens."""
        problem = replace(self.problem, B=len(hidden), **filters)
        launch = self.subject.provider.build(problem, self.weight)
        torch.manual_seed(0)
        return launch, launched_tokens(launch, hidden, 21, 4).clone()

    def called(self, hidden: Tensor, seed: Tensor, **options: Any) -> Tensor:
        """Return tokens of the full call."""
        sample = self.subject.provider.sample
        assert sample is not None
        options = {"temperature": self.T, "offset": scalar(4, self.problem.device), **options}
        torch.manual_seed(0)
        result = sample(hidden, self.weight, seed=seed, **options)
        return require_form(result.tokens, (len(hidden),)).clone()

    def check_batch_sizes(self) -> None:
        launch, whole = self.launched(self.hidden)
        for B in self.subject.sizes:
            _, part = self.launched(self.hidden[:B].contiguous())
            self.require_equal(f"batch of {B} instead of {_BATCH}", part, whole[:B])
        kept = [0, _BATCH // 2, _BATCH - 1]
        changed = self.hidden.roll(1, 0)
        changed[kept] = self.hidden[kept]
        torch.manual_seed(0)
        others = launched_tokens(launch, changed, 21, 4)
        self.require_equal("other neighbors", others[kept], whole[kept])

    def check_graph(self) -> None:
        if self.problem.device != "cuda" or not self.caps.graph_safe:
            return
        for B in {min(self.subject.sizes), max(self.subject.sizes)}:
            part = self.hidden[:B].contiguous()
            launch, eager = self.launched(part)
            seed, offset = scalar(21, "cuda"), scalar(4, "cuda")  # the graph reads them: keep them
            replay = capture(launch, part, seed, offset)
            self.require_equal(f"graph of {B} rows instead of eager", replay(), eager)

    def check_mixed_filters(self) -> None:
        """Compare rows of a batch with several filters to batches with one filter each."""
        filters = {name: value for name, value in _FILTERS.items() if name in self.caps.filters}
        if not (filters and self.caps.mixed_filters):
            return
        _, mixed = self.launched(self.hidden, **filters, mixed=True)
        turns = replace(self.problem, **filters, mixed=True).row_filters()[:4]
        for turn, row_filters in enumerate(turns):
            values: dict[str, Any] = dict(zip(_FILTERS, row_filters, strict=True))
            _, alone = self.launched(self.hidden, **values)
            self.require_equal(
                f"neighbors with other filters than {values}", mixed[turn::4], alone[turn::4]
            )

    def check_other_rows(self) -> None:
        """Compare requests in other rows, with their seeds."""
        if not self.caps.per_request_seed:
            return
        whole = self.called(self.hidden, self.seed)
        order = torch.randperm(_BATCH, generator=torch.Generator().manual_seed(1))
        for B in self.subject.sizes:
            rows = order[:B].to(self.hidden.device)
            part = self.called(self.hidden[rows].contiguous(), self.seed[rows])
            self.require_equal(f"requests moved to a batch of {B}", part, whole[rows])

    def check_neighbors(self) -> None:
        """Compare rows whose neighbors have another temperature, a bias or a mask."""
        caps, device = self.caps, self.hidden.device
        call = partial(self.called, self.hidden, self.seed)
        whole = call()
        # Random, so that no exchange of rows, such as b with b xor 8, keeps the pattern.
        generator = torch.Generator().manual_seed(2)
        changed = (torch.rand(_BATCH, generator=generator) < 0.5).to(device)
        if caps.per_row_temperature:
            T = torch.full((_BATCH,), self.T, device=device)
            T[changed] = 0.0 if caps.greedy_rows else self.T / 2
            self.require_equal(
                "neighbors of another T", call(temperature=T)[~changed], whole[~changed]
            )
        if caps.bias:
            bias = self.T * torch.randn(_BATCH, _VOCABULARY, generator=generator).to(device)
            bias[~changed] = 0.0
            self.require_equal("neighbors with a bias", call(bias=bias)[~changed], whole[~changed])
        if caps.mask:
            mask = torch.ones(_BATCH, _VOCABULARY, dtype=torch.bool, device=device)
            mask[changed, 100:] = False
            self.require_equal("neighbors with a mask", call(mask=mask)[~changed], whole[~changed])
            for first, end in pairwise(_SHARDS):
                mask = torch.zeros(_BATCH, _VOCABULARY, dtype=torch.bool, device=device)
                mask[:, first:end] = True
                inside = (whole >= first) & (whole < end)
                shard = call(mask=mask)[inside]
                self.require_equal(f"tokens {first} to {end} alone", shard, whole[inside])
