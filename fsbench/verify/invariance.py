"""Inputs that must not change a token: bitwise equality of calls that should agree.

All logits are exact, so two matmuls of another order cannot disagree about them.
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

_WHOLE = 300  # rows of the batch that all others are compared with
_FILTERS: dict[str, Any] = {"top_k": 20, "top_p": 0.9, "min_p": 0.02}
_VOCABULARY = 5003
_SHARDS = (0, 1280, 2560, 3840, _VOCABULARY)  # multiples of 128: no group of tokens is divided


def check_invariance(subject: Subject) -> Check:
    """Tokens of a row are the same in batches of other sizes, other neighbors, graph or eager.

    Of what is claimed, also: a request that moves with its seed to another row of another batch;
    neighbors with filters, a mask or a temperature of their own; a shard of the vocabulary alone,
    where the winner is in it.
    """
    calls = _Calls(subject)
    calls.batches()
    calls.graph()
    calls.mixed()
    if subject.provider.sample is not None:
        calls.moved()
        calls.neighbors()
    sizes = subject.sizes
    told = f"{calls.compared} tokens unchanged, in batches of {len(sizes)} sizes up to {max(sizes)}"
    return Check("invariance", True, told, calls.compared)


class _Calls:
    """Calls with one head. compared: how many tokens were; the first that differs is raised."""

    def __init__(self, subject: Subject):
        self.subject, self.able = subject, subject.able
        self.T = subject.setting.sampled_temperature
        self.problem = subject.setting.problem(_WHOLE, _VOCABULARY, self.T)
        require_support(subject.provider, self.problem)
        logits = min(self.T, 1e3) * random_logits(self.problem, 3)
        self.hidden, self.weight, _ = exact_head(self.problem, logits)
        self.compared = 0
        # Seeds that differ in their low and in their high bits.
        self.seed = scalar(21, self.problem.device)
        if self.able.per_request_seed:
            self.seed = torch.arange(_WHOLE, device=self.problem.device) * 0x0123456789ABCD - 7

    def equal(self, what: str, tokens: Tensor, wanted: Tensor) -> None:
        if not torch.equal(tokens.long(), wanted.long()):
            at = int((tokens != wanted).nonzero()[0])
            raise VerificationFailed(
                f"{what}: row {at} expected {int(wanted[at])}; got {int(tokens[at])}"
            )
        self.compared += len(tokens)

    def launched(self, hidden: Tensor, **filters: Any) -> tuple[Launch, Tensor]:
        """A launch for these hidden states, and its tokens."""
        problem = replace(self.problem, B=len(hidden), **filters)
        launch = self.subject.provider.build(problem, self.weight)
        torch.manual_seed(0)
        return launch, launched_tokens(launch, hidden, 21, 4).clone()

    def called(self, hidden: Tensor, seed: Tensor, **options: Any) -> Tensor:
        """Tokens of the full call."""
        sample = self.subject.provider.sample
        assert sample is not None
        options = {"temperature": self.T, "offset": scalar(4, self.problem.device), **options}
        torch.manual_seed(0)
        result = sample(hidden, self.weight, seed=seed, **options)
        return require_form(result.tokens, (len(hidden),)).clone()

    def batches(self) -> None:
        launch, whole = self.launched(self.hidden)
        for B in self.subject.sizes:
            _, part = self.launched(self.hidden[:B].contiguous())
            self.equal(f"batch of {B} instead of {_WHOLE}", part, whole[:B])
        kept = [0, _WHOLE // 2, _WHOLE - 1]
        changed = self.hidden.roll(1, 0)
        changed[kept] = self.hidden[kept]
        torch.manual_seed(0)
        others = launched_tokens(launch, changed, 21, 4)
        self.equal("other neighbors", others[kept], whole[kept])

    def graph(self) -> None:
        if self.problem.device != "cuda" or not self.able.graph_safe:
            return
        for B in {min(self.subject.sizes), max(self.subject.sizes)}:
            part = self.hidden[:B].contiguous()
            launch, eager = self.launched(part)
            seed, offset = scalar(21, "cuda"), scalar(4, "cuda")  # the graph reads them: keep them
            replay = capture(launch, part, seed, offset)
            self.equal(f"graph of {B} rows instead of eager", replay(), eager)

    def mixed(self) -> None:
        """Rows of a mixed batch take turns in filters: as in batches with each turn's alone."""
        filters = {name: value for name, value in _FILTERS.items() if name in self.able.filters}
        if not (filters and self.able.mixed_filters):
            return
        _, mixed = self.launched(self.hidden, **filters, mixed=True)
        turns = replace(self.problem, **filters, mixed=True).row_filters()[:4]
        for turn, own in enumerate(turns):
            values: dict[str, Any] = dict(zip(_FILTERS, own, strict=True))
            _, alone = self.launched(self.hidden, **values)
            self.equal(
                f"neighbors with other filters than {values}", mixed[turn::4], alone[turn::4]
            )

    def moved(self) -> None:
        """Requests that move to other rows, with their seeds."""
        if not self.able.per_request_seed:
            return
        whole = self.called(self.hidden, self.seed)
        order = torch.randperm(_WHOLE, generator=torch.Generator().manual_seed(1))
        for B in self.subject.sizes:
            rows = order[:B].to(self.hidden.device)
            part = self.called(self.hidden[rows].contiguous(), self.seed[rows])
            self.equal(f"requests moved to a batch of {B}", part, whole[rows])

    def neighbors(self) -> None:
        able, device = self.able, self.hidden.device
        call = partial(self.called, self.hidden, self.seed)
        whole = call()
        # At random, so that no exchange of rows, such as b with b xor 8, keeps the pattern.
        generator = torch.Generator().manual_seed(2)
        changed = (torch.rand(_WHOLE, generator=generator) < 0.5).to(device)
        if able.per_row_temperature:
            T = torch.full((_WHOLE,), self.T, device=device)
            T[changed] = 0.0 if able.greedy_rows else self.T / 2
            self.equal("neighbors of another T", call(temperature=T)[~changed], whole[~changed])
        if able.bias:
            bias = self.T * torch.randn(_WHOLE, _VOCABULARY, generator=generator).to(device)
            bias[~changed] = 0.0
            self.equal("neighbors with a bias", call(bias=bias)[~changed], whole[~changed])
        if able.mask:
            mask = torch.ones(_WHOLE, _VOCABULARY, dtype=torch.bool, device=device)
            mask[changed, 100:] = False
            self.equal("neighbors with a mask", call(mask=mask)[~changed], whole[~changed])
            for first, end in pairwise(_SHARDS):
                mask = torch.zeros(_WHOLE, _VOCABULARY, dtype=torch.bool, device=device)
                mask[:, first:end] = True
                mine = (whole >= first) & (whole < end)
                self.equal(f"tokens {first} to {end} alone", call(mask=mask)[mine], whole[mine])
