"""The full call: masks, biases, temperatures, seeds, samples, and what it says of its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice, zip_longest
from typing import Any

import torch
from torch import Tensor

from fsbench import reference
from fsbench.errors import VerificationFailed
from fsbench.verify.check import ALPHA, Check
from fsbench.verify.drawing import exact_head, require_form, require_inside, require_support, scalar
from fsbench.verify.joint import Alike, alike
from fsbench.verify.pathwise import require_accepted
from fsbench.verify.statistics import Counted, all_fit
from fsbench.verify.subject import SEED, Subject

_ROWS, _VOCABULARY = 301, 500  # odd, and above the sizes at which samplers change their ways
_PARTS = (1.0, 13 / 7, 0.5)
"""Temperatures of rows in one call, as parts of the setting's: of 0.7 they are 0.7, 1.3 and 0.35.
Engines refuse T > 2."""

_SAMPLES = 2  # of each row, where several are claimed
_MASK_ROWS, _MASK_PARTS = 16, 3  # of `masks` in a large vocabulary: rows, allowed tokens of each
_LOGPROB_ERROR = 1e-3  # of 1 and the log-probability together


def request_counters(B: int) -> tuple[Tensor, Tensor, Tensor]:
    """Seeds and offsets int64 [B] of B requests, and which differ from the first in one bit: bool.

    Consecutive seeds and their negatives, a seed and all that differ from it in one bit, an offset
    and all that differ in one bit, 0, -1 and the ends of int64, and numbers without a pattern.

    Steps are added to the offsets. The bits of the offsets therefore begin above the number of
    steps: otherwise two requests would reach the same offset, and with it the same noise.
    """
    bits = [(SEED, 0), *((SEED ^ (1 << bit), 0) for bit in range(64))]
    offsets = [(SEED, 1 << bit) for bit in range(10, 31)]
    special = [(0, 0), (-1, 0), (-(2**63), 0), (2**63 - 1, 0)]
    near = [(5000 + number, 0) for number in range(B)]
    negative = [(-5000 - number, 0) for number in range(B)]
    others = [(number * 0x0123456789ABCD - 7, number * 977) for number in range(B)]
    groups = [[(*each, True) for each in (*bits, *offsets)]]
    groups += [[(*each, False) for each in group] for group in (near, special, negative, others)]
    turns = (each for each in chain(*zip_longest(*groups)) if each is not None)
    seed, offset, close = zip(*islice(turns, B), strict=True)
    wrapped = [(number + 2**63) % 2**64 - 2**63 for number in seed]
    return torch.tensor(wrapped), torch.tensor(offset), torch.tensor(close)


class _Calls:
    """Calls of a sampler with B requests whose rows of logits are all equal.

    logits: [B, V] as stored. values: the temperatures; turn: int64 [B], which of them a row has. T,
    seed, offset: of the call. n: samples of a row.
    """

    def __init__(self, subject: Subject, B: int, row: Tensor):
        able, device = subject.able, subject.setting.device
        base = subject.setting.second_temperature
        problem = subject.setting.problem(B, row.shape[1], base)
        require_support(subject.provider, problem)
        assert subject.provider.sample is not None
        self.able, self.sample = able, subject.provider.sample
        self.hidden, self.weight, self.logits = exact_head(problem, row.to(device))
        self.values = [base * part for part in _PARTS] if able.per_row_temperature else [base]
        self.values += [0.0] * able.greedy_rows
        generator = torch.Generator().manual_seed(41)
        # Which row has which request and T is random: no exchange of rows keeps the pattern.
        turn, order = (
            torch.randint(len(self.values), (B,), generator=generator),
            torch.randperm(B, generator=generator),
        )
        seed, offset, close = request_counters(B)
        self.turn = turn.masked_fill(close, 0)[order].to(device)
        self.n = _SAMPLES if able.num_samples else 1
        self.seed, self.offset = scalar(37, device), scalar(0, device)
        if able.per_request_seed:
            self.seed, self.offset = seed[order].to(device), offset[order].to(device)
        self.T: float | Tensor = base
        if able.per_row_temperature:
            self.T = torch.tensor(self.values, device=device)[self.turn]

    def call(self, step: int, order: Tensor | None = None, **options: Any) -> tuple[Tensor, Any]:
        """(tokens int64 [B, n], the sampler's result) of a step, of the requests in this order."""
        values = {"temperature": self.T, "seed": self.seed, "offset": self.offset + step, **options}
        if order is not None:
            B = len(order)
            values = {
                name: value[order] if isinstance(value, Tensor) and len(value) == B else value
                for name, value in values.items()
            }
        if self.n > 1:
            values["num_samples"] = self.n
        torch.manual_seed(step)
        result = self.sample(self.hidden, self.weight, **values)
        shape = (len(self.hidden), self.n) if self.n > 1 else (len(self.hidden),)
        tokens = require_form(result.tokens, shape).long().view(len(self.hidden), self.n)
        return tokens.clone(), result

    def tokens(
        self, what: str, kept: Tensor, steps: int, first: int, **options: Any
    ) -> Iterator[Tensor]:
        """Tokens [B, n] of each step; of the first what the contract, of step 0 what seeds promise.

        kept: the logits [B, V] with biases, and -inf of forbidden tokens.
        """
        for step in range(steps):
            tokens, result = self.call(first + step, **options)
            if step == 0:
                self._require_contract(what, kept, tokens, first)
                if first == 0:
                    self._require_moved(what, tokens, **options)
            if options.get("return_logprob"):
                self._require_logprob(kept, tokens, result)
            yield tokens

    def _require_contract(self, what: str, kept: Tensor, tokens: Tensor, step: int) -> None:
        for number in range(self.n if self.able.noise else 0):
            counters, form = (self.seed, self.offset + step), self.able.noise or ""
            expected = reference.expect(kept, *counters, self.T, form, sample=number)
            require_accepted(expected, tokens[:, number], f"{what}: sample {number}, ")

    def _require_moved(self, what: str, tokens: Tensor, **options: Any) -> None:
        """A request's tokens of step 0 are its own in any row of the batch."""
        if self.able.per_request_seed:
            order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(2))
            order = order.to(tokens.device)
            moved, _ = self.call(0, order, **options)
            wrong = (moved != tokens[order]).any(1)
            if wrong.any():
                row = int(wrong.nonzero()[0])
                drawn = tokens[order[row]].tolist()
                raise VerificationFailed(
                    f"{what}: the request of row {int(order[row])} drew {drawn}; in row {row}, "
                    f"with the same seed, {moved[row].tolist()}"
                )

    def _require_logprob(self, kept: Tensor, tokens: Tensor, result: Any) -> None:
        found = getattr(result, "logprob", None)
        if found is None or found.shape != result.tokens.shape:
            raise VerificationFailed("gave no log-probability for each token")
        logp = (kept.double() * reference.inverse_temperature(self.T, kept.device)).log_softmax(1)
        wanted = logp.gather(1, tokens.clamp(0, kept.shape[1] - 1))
        error = ((found.view_as(wanted) - wanted).abs() / (1 + wanted.abs())).nan_to_num(torch.inf)
        if (worst := float(error.max())) > _LOGPROB_ERROR:
            raise VerificationFailed(f"log-probabilities are off by {worst:.2g} (of 1 + |log p|)")

    def counted(self, what: str, kept: Tensor, tokens: Tensor, rows: Tensor) -> list[Counted]:
        """Counts of tokens [steps, B, n] by temperature, of `rows` [B], which have one law."""
        first = int(rows.nonzero()[0])
        found = []
        for number, T in enumerate(self.values):
            mine = tokens[:, rows & (self.turn == number)].flatten()
            if T:
                counts = torch.bincount(mine, minlength=kept.shape[1])
                law = torch.softmax(kept[first].double() / T, 0)
                found.append((f"{what}rows of T = {T:g}", counts, law))
        return found

    def require_greedy(self, what: str, kept: Tensor, tokens: Tensor) -> None:
        """Tokens [steps, B, n] of rows of T = 0 have the largest logit; of equal ones the first."""
        rows = self.turn == len(self.values) - 1
        if not (self.able.greedy_rows and rows.any()):
            return
        fits = greedy_fits(kept[rows], tokens[:, rows].permute(1, 0, 2).flatten(1), self.able.noise)
        if not fits.all():
            row = int(rows.nonzero()[int((~fits).any(1).nonzero()[0])])
            raise VerificationFailed(f"{what}a row of T = 0 is not greedy: greedy row {row}")


def greedy_fits(logits: Tensor, tokens: Tensor, noise: str | None) -> Tensor:
    """Which of tokens [B, n] are the largest of logits [B, V], and with noise of the contract the
    first of equal ones: bool [B, n]. A row without a finite logit gives -1."""
    largest = logits.amax(1, keepdim=True)
    V = logits.shape[1]
    inside = tokens.clamp(0, V - 1)
    if noise is None:
        fits = (logits.gather(1, inside) == largest) & (tokens == inside)
    else:
        place = torch.arange(V, device=logits.device).expand_as(logits)
        fits = tokens == place.masked_fill(logits != largest, V).amin(1, keepdim=True)
    return torch.where(largest == -torch.inf, tokens == -1, fits)


def check_call(subject: Subject) -> Check:
    """Check everything claimed at once: T, seed and offset of each row, samples, log-probabilities.

    Of the rows of each T a G-test; rows of T = 0 are greedy. No two requests of one T share their
    noise, whose seeds or offsets are neighbors or differ in one bit; a request's token is its own
    in any row. The first tokens are the oracle's, under the noise contract, and every
    log-probability is that of its token.
    """
    able = subject.able
    base = min(subject.setting.second_temperature, 1e3)
    row = base * 2 * torch.randn(1, _VOCABULARY, generator=torch.Generator().manual_seed(40))
    calls = _Calls(subject, _ROWS, row)
    options = {"return_logprob": True} if able.logprob else {}
    drawn = calls.tokens("call", calls.logits, subject.effort.call_steps, 0, **options)
    tokens = torch.stack(list(drawn))
    require_inside(tokens, _VOCABULARY)
    calls.require_greedy("", calls.logits, tokens)
    rows = torch.ones(_ROWS, dtype=torch.bool, device=tokens.device)
    fit = all_fit("call", calls.counted("", calls.logits, tokens, rows), able.known_deviation)
    most: list[Alike] = []
    for number, T in enumerate(calls.values if able.per_request_seed else ()):
        mine = (calls.turn == number).nonzero()[:, 0]
        if T and len(mine) > 1:
            law = torch.softmax(calls.logits[0].double() / T, 0)
            streams = tokens[:, mine].permute(1, 0, 2).flatten(1)
            most.append(alike("the requests of rows", law, able, streams, mine.tolist()))
    shared, p_value = min(most, key=lambda each: each[1], default=("", 1.0))
    p_value = min(1.0, len(most) * p_value)
    if fit.passed and p_value <= ALPHA:
        return replace(fit, passed=False, detail=shared, p_value=p_value, statistic=None)
    return replace(fit, draws=tokens.numel())


def check_masks(subject: Subject) -> Check:
    """Masks, biases and greedy rows, as far as they are claimed, row by row.

    Half of the vocabulary is forbidden, and biases of the rest are finite: no forbidden token, and
    a G-test of the others by temperature. One row has a single token left; one, under the noise
    contract, has none: token -1. In a large vocabulary each row has three tokens left.
    """
    able, device = subject.able, subject.setting.device
    (B, V), T = subject.effort.filtered, min(subject.setting.second_temperature, 1e3)
    generator = torch.Generator().manual_seed(23)
    calls = _Calls(subject, B, T * (2 * torch.randn(1, V, generator=generator) - 8))
    allowed = (torch.rand(1, V, generator=generator) < 0.5).repeat(B, 1)
    allowed[:, 0] = True
    allowed[2] = torch.arange(V) == V - 1
    if able.noise is not None:
        allowed[4] = False
    allowed = allowed.to(device)
    bias = (T * torch.randint(-4, 5, (V,), generator=generator) / 2).to(device)
    common = torch.ones(B, dtype=torch.bool, device=device)
    common[[2, 4]] = False
    found: list[Counted] = []
    for number, (name, option, kept) in enumerate(_filters(calls, allowed, bias)):
        steps = calls.tokens(name, kept, subject.effort.filter_steps, 100 * number, **option)
        # Looked at together: a look at each step would make the host wait for the GPU.
        tokens = torch.stack(list(steps))
        _require_allowed(name, kept, tokens.permute(1, 0, 2).flatten(1))
        calls.require_greedy(f"{name}: ", kept, tokens)
        found += calls.counted(f"{name}: ", kept, tokens, common)
    _check_large(subject)
    return all_fit("masks", found, able.known_deviation)


def _filters(
    calls: _Calls, allowed: Tensor, bias: Tensor
) -> Iterator[tuple[str, dict[str, Tensor], Tensor]]:
    """(name, options of the call, logits that are left [B, V]) of what is claimed."""
    logits, forbidden = calls.logits, ~allowed
    if calls.able.mask:
        kept = logits.masked_fill(forbidden, -torch.inf)
        yield "mask", {"mask": allowed}, kept
        yield "packed mask", {"mask": packed(allowed)}, kept
    if calls.able.bias:
        own = bias.expand_as(logits).masked_fill(forbidden, -torch.inf)
        yield "bias", {"bias": own}, logits + own
        yield "bias of all rows", {"bias": own[0].contiguous()}, logits + own[0]


def _require_allowed(name: str, kept: Tensor, tokens: Tensor) -> None:
    """Raise VerificationFailed unless tokens [B, n] have a logit left; -1 in a row without any."""
    inside = tokens.clamp(0, kept.shape[1] - 1)
    fits = (tokens == inside) & (kept.gather(1, inside) > -torch.inf)
    fits = torch.where((kept == -torch.inf).all(1, keepdim=True), tokens == -1, fits)
    if not fits.all():
        row, at = (~fits).nonzero()[0].tolist()
        raise VerificationFailed(f"{name}: row {row} must not give token {int(tokens[row, at])}")


def _check_large(subject: Subject) -> None:
    """In a vocabulary of a model, rows with a few tokens left in a part of it give one of these."""
    B, V = _MASK_ROWS, max(subject.effort.vocabulary, subject.effort.filtered[1])
    calls = _Calls(subject, B, torch.zeros(1, V))
    generator = torch.Generator().manual_seed(29)
    first = torch.arange(B)[:, None] * V // B
    few = first + (torch.rand(B, _MASK_PARTS, generator=generator) * math.ceil(V / B)).long()
    allowed = torch.zeros(B, V, dtype=torch.bool).scatter(1, few.clamp_max(V - 1), True)
    allowed = allowed.to(calls.logits.device)
    filters = _filters(calls, allowed, torch.zeros(V, device=allowed.device))
    for name, option, kept in islice(filters, 3):
        for tokens in calls.tokens(f"{name} of {V} tokens", kept, 1, 1, **option):
            _require_allowed(f"{name} of {V} tokens", kept, tokens)


def packed(mask: Tensor) -> Tensor:
    """The int32 form of a bool mask [B, V]: token v in bit v % 32 of word v // 32."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 32))
    bits = padded.unflatten(1, (-1, 32)).long()
    return (bits << torch.arange(32, device=mask.device)).sum(2).to(torch.int32)
