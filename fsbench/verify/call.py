"""Checks of the full call: masks, biases, temperatures, seeds, samples, log-probabilities."""

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
from fsbench.verify.joint import Agreement, closest_streams
from fsbench.verify.pathwise import require_accepted
from fsbench.verify.statistics import Histogram, all_fit
from fsbench.verify.subject import SEED, Subject

_ROWS, _VOCABULARY = 301, 500  # odd, and above the sizes at which samplers change algorithms
_TEMPERATURE_FACTORS = (1.0, 13 / 7, 0.5)
"""Temperatures of rows in one call relative to the setting's: 0.7, 1.3 and 0.35 for 0.7. Engines
refuse T > 2."""

_SAMPLES = 2  # samples of a row, if the sampler can draw several
_MASK_ROWS, _MASK_TOKENS = 16, 3  # rows of `masks` in a large vocabulary, and their allowed tokens
_LOGPROB_ERROR = 1e-3  # relative to 1 + |log-probability|


def request_counters(B: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return seeds and offsets int64 [B] of B requests, and whether they are one-bit variants.

    The requests have consecutive seeds and their negatives, a seed and its one-bit variants, an
    offset and its one-bit variants, 0, -1, the limits of int64, and numbers without a pattern.

    Steps are added to the offsets. The lowest bit that varies is above the number of steps, because
    otherwise two requests would reach the same offset and draw with the same noise.
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


class _RequestCalls:
    """Calls of a sampler with B requests whose rows of logits are all equal.

    logits: [B, V] as stored.
    temperatures: the different temperatures; temperature_index: int64 [B], the one of each row.
    T, seed, offset: arguments of the call.
    n: samples of a row.
    """

    def __init__(self, subject: Subject, B: int, row: Tensor):
        caps, device = subject.caps, subject.setting.device
        base = subject.setting.second_temperature
        problem = subject.setting.problem(B, row.shape[1], base)
        require_support(subject.provider, problem)
        assert subject.provider.sample is not None
        self.caps, self.sample = caps, subject.provider.sample
        self.hidden, self.weight, self.logits = exact_head(problem, row.to(device))
        factors = _TEMPERATURE_FACTORS if caps.per_row_temperature else (1.0,)
        self.temperatures = [base * factor for factor in factors]
        self.temperatures += [0.0] * caps.greedy_rows
        generator = torch.Generator().manual_seed(41)
        # Requests and T are assigned to rows at random: no exchange of rows keeps the pattern.
        temperature_index, order = (
            torch.randint(len(self.temperatures), (B,), generator=generator),
            torch.randperm(B, generator=generator),
        )
        seed, offset, close = request_counters(B)
        self.temperature_index = temperature_index.masked_fill(close, 0)[order].to(device)
        self.n = _SAMPLES if caps.num_samples else 1
        self.seed, self.offset = scalar(37, device), scalar(0, device)
        if caps.per_request_seed:
            self.seed, self.offset = seed[order].to(device), offset[order].to(device)
        self.T: float | Tensor = base
        if caps.per_row_temperature:
            self.T = torch.tensor(self.temperatures, device=device)[self.temperature_index]

    def call(self, step: int, order: Tensor | None = None, **options: Any) -> tuple[Tensor, Any]:
        """Return tokens int64 [B, n] of a step and the sampler's result; order: of the requests."""
        options |= {"temperature": self.T, "seed": self.seed, "offset": self.offset + step}
        if order is not None:
            B = len(order)
            options = {
                name: value[order] if isinstance(value, Tensor) and len(value) == B else value
                for name, value in options.items()
            }
        if self.n > 1:
            options["num_samples"] = self.n
        torch.manual_seed(step)
        result = self.sample(self.hidden, self.weight, **options)
        shape = (len(self.hidden), self.n) if self.n > 1 else (len(self.hidden),)
        tokens = require_form(result.tokens, shape).long().view(len(self.hidden), self.n)
        return tokens.clone(), result

    def tokens(
        self, label: str, kept: Tensor, steps: int, first: int, **options: Any
    ) -> Iterator[Tensor]:
        """Yield the tokens [B, n] of each step.

        The first step is compared with the noise contract, and step 0 with the same requests in
        other rows.

        Args:
            label: beginning of messages.
            kept: logits [B, V] with biases, and -inf for forbidden tokens.
        """
        for step in range(steps):
            tokens, result = self.call(first + step, **options)
            if step == 0:
                self._require_contract(label, kept, tokens, first)
                if first == 0:
                    self._require_row_independence(label, tokens, **options)
            if options.get("return_logprob"):
                self._require_logprob(kept, tokens, result)
            yield tokens

    def _require_contract(self, label: str, kept: Tensor, tokens: Tensor, step: int) -> None:
        for number in range(self.n if self.caps.noise else 0):
            counters, form = (self.seed, self.offset + step), self.caps.noise or ""
            expected = reference.expect(kept, *counters, self.T, form, sample=number)
            require_accepted(expected, tokens[:, number], f"{label}: sample {number}, ")

    def _require_row_independence(self, label: str, tokens: Tensor, **options: Any) -> None:
        """Raise VerificationFailed if a request's tokens of step 0 depend on its row."""
        if self.caps.per_request_seed:
            order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(2))
            order = order.to(tokens.device)
            permuted, _ = self.call(0, order, **options)
            wrong = (permuted != tokens[order]).any(1)
            if wrong.any():
                row = int(wrong.nonzero()[0])
                drawn = tokens[order[row]].tolist()
                raise VerificationFailed(
                    f"{label}: the request of row {int(order[row])} drew {drawn}; in row {row}, "
                    f"with the same seed, {permuted[row].tolist()}"
                )

    def _require_logprob(self, kept: Tensor, tokens: Tensor, result: Any) -> None:
        logprob = getattr(result, "logprob", None)
        if logprob is None or logprob.shape != result.tokens.shape:
            raise VerificationFailed("returned no log-probability for each token")
        logp = (kept.double() * reference.inverse_temperature(self.T, kept.device)).log_softmax(1)
        expected = logp.gather(1, tokens.clamp(0, kept.shape[1] - 1))
        error = (logprob.view_as(expected) - expected).abs() / (1 + expected.abs())
        error = error.nan_to_num(torch.inf)
        if (worst := float(error.max())) > _LOGPROB_ERROR:
            raise VerificationFailed(f"log-probabilities are off by {worst:.2g} (of 1 + |log p|)")

    def histograms(self, label: str, kept: Tensor, tokens: Tensor, rows: Tensor) -> list[Histogram]:
        """Return a histogram of tokens [steps, B, n] for each temperature.

        rows: bool [B], the rows that are counted; they have the same logits.
        """
        first = int(rows.nonzero()[0])
        histograms = []
        for number, T in enumerate(self.temperatures):
            if T:
                drawn = tokens[:, rows & (self.temperature_index == number)].flatten()
                counts = torch.bincount(drawn, minlength=kept.shape[1])
                p = torch.softmax(kept[first].double() / T, 0)
                histograms.append((f"{label}rows of T = {T:g}", counts, p))
        return histograms

    def require_greedy(self, label: str, kept: Tensor, tokens: Tensor) -> None:
        """Raise VerificationFailed unless tokens [steps, B, n] of rows of T = 0 are greedy."""
        rows = self.temperature_index == len(self.temperatures) - 1
        if not (self.caps.greedy_rows and rows.any()):
            return
        drawn = tokens[:, rows].permute(1, 0, 2).flatten(1)
        correct = is_greedy(kept[rows], drawn, self.caps.noise)
        if not correct.all():
            row = int(rows.nonzero()[int((~correct).any(1).nonzero()[0])])
            raise VerificationFailed(f"{label}a row of T = 0 is not greedy: greedy row {row}")


def is_greedy(logits: Tensor, tokens: Tensor, noise: str | None) -> Tensor:
    """Return whether each of tokens [B, n] has the largest of logits [B, V]: bool [B, n].

    With noise of the contract it must be the first of equal tokens. The token of a row without a
    finite logit is -1.
    """
    largest = logits.amax(1, keepdim=True)
    V = logits.shape[1]
    inside = tokens.clamp(0, V - 1)
    if noise is None:
        correct = (logits.gather(1, inside) == largest) & (tokens == inside)
    else:
        index = torch.arange(V, device=logits.device).expand_as(logits)
        correct = tokens == index.masked_fill(logits != largest, V).amin(1, keepdim=True)
    return torch.where(largest == -torch.inf, tokens == -1, correct)


def check_call(subject: Subject) -> Check:
    """Check all options of a call at once: T, seed and offset by row, samples, log-probabilities.

    The tokens of each T pass a G-test; rows of T = 0 are greedy. No two requests of one T share
    noise, also if their seeds or offsets are neighbors or differ in one bit. A request's tokens do
    not depend on its row. With noise of the contract the first tokens are the oracle's. Each
    log-probability is that of its token.
    """
    caps = subject.caps
    base = min(subject.setting.second_temperature, 1e3)
    row = base * 2 * torch.randn(1, _VOCABULARY, generator=torch.Generator().manual_seed(40))
    calls = _RequestCalls(subject, _ROWS, row)
    options = {"return_logprob": True} if caps.logprob else {}
    steps = calls.tokens("call", calls.logits, subject.effort.call_steps, 0, **options)
    tokens = torch.stack(list(steps))
    require_inside(tokens, _VOCABULARY)
    calls.require_greedy("", calls.logits, tokens)
    rows = torch.ones(_ROWS, dtype=torch.bool, device=tokens.device)
    fit = all_fit("call", calls.histograms("", calls.logits, tokens, rows), caps.known_deviation)
    agreements: list[Agreement] = []
    for number, T in enumerate(calls.temperatures if caps.per_request_seed else ()):
        rows_of_T = (calls.temperature_index == number).nonzero()[:, 0]
        if T and len(rows_of_T) > 1:
            p = torch.softmax(calls.logits[0].double() / T, 0)
            streams = tokens[:, rows_of_T].permute(1, 0, 2).flatten(1)
            names = rows_of_T.tolist()
            agreements.append(closest_streams("the requests of rows", p, caps, streams, names))
    closest, p_value = min(agreements, key=lambda agreement: agreement[1], default=("", 1.0))
    p_value = min(1.0, len(agreements) * p_value)
    if fit.passed and p_value <= ALPHA:
        return replace(fit, passed=False, detail=closest, p_value=p_value, statistic=None)
    return replace(fit, draws=tokens.numel())


def check_masks(subject: Subject) -> Check:
    """Check masks, biases and greedy rows, if the sampler has them.

    Half of the vocabulary is forbidden; the other tokens have finite biases. No forbidden token may
    be drawn, and the tokens of each temperature pass a G-test. In one row a single token is
    allowed. In another, under the noise contract, none is: its token is -1. In a large vocabulary
    three tokens of each row are allowed.
    """
    caps, device = subject.caps, subject.setting.device
    (B, V), T = subject.effort.filtered, min(subject.setting.second_temperature, 1e3)
    generator = torch.Generator().manual_seed(23)
    calls = _RequestCalls(subject, B, T * (2 * torch.randn(1, V, generator=generator) - 8))
    allowed = (torch.rand(1, V, generator=generator) < 0.5).repeat(B, 1)
    allowed[:, 0] = True
    allowed[2] = torch.arange(V) == V - 1
    if caps.noise is not None:
        allowed[4] = False
    allowed = allowed.to(device)
    bias = (T * torch.randint(-4, 5, (V,), generator=generator) / 2).to(device)
    typical_rows = torch.ones(B, dtype=torch.bool, device=device)
    typical_rows[[2, 4]] = False
    histograms: list[Histogram] = []
    for number, (name, option, kept) in enumerate(_filters(calls, allowed, bias)):
        steps = calls.tokens(name, kept, subject.effort.filter_steps, 100 * number, **option)
        # Checked together: a check of each step would make the host wait for the GPU.
        tokens = torch.stack(list(steps))
        _require_allowed(name, kept, tokens.permute(1, 0, 2).flatten(1))
        calls.require_greedy(f"{name}: ", kept, tokens)
        histograms += calls.histograms(f"{name}: ", kept, tokens, typical_rows)
    _check_large(subject)
    return all_fit("masks", histograms, caps.known_deviation)


def _filters(
    calls: _RequestCalls, allowed: Tensor, bias: Tensor
) -> Iterator[tuple[str, dict[str, Tensor], Tensor]]:
    """Yield (name, options of the call, resulting logits [B, V]) of masks and biases."""
    logits, forbidden = calls.logits, ~allowed
    if calls.caps.mask:
        kept = logits.masked_fill(forbidden, -torch.inf)
        yield "mask", {"mask": allowed}, kept
        yield "packed mask", {"mask": packed(allowed)}, kept
    if calls.caps.bias:
        row_bias = bias.expand_as(logits).masked_fill(forbidden, -torch.inf)
        yield "bias", {"bias": row_bias}, logits + row_bias
        yield "bias of all rows", {"bias": row_bias[0].contiguous()}, logits + row_bias[0]


def _require_allowed(name: str, kept: Tensor, tokens: Tensor) -> None:
    """Raise VerificationFailed if one of tokens [B, n] is forbidden.

    The token of a row whose tokens are all forbidden is -1.
    """
    inside = tokens.clamp(0, kept.shape[1] - 1)
    allowed = (tokens == inside) & (kept.gather(1, inside) > -torch.inf)
    allowed = torch.where((kept == -torch.inf).all(1, keepdim=True), tokens == -1, allowed)
    if not allowed.all():
        row, sample = (~allowed).nonzero()[0].tolist()
        raise VerificationFailed(
            f"{name}: row {row} must not return token {int(tokens[row, sample])}"
        )


def _check_large(subject: Subject) -> None:
    """Raise VerificationFailed if masks and biases fail in the vocabulary of a model.

    Each row has a few allowed tokens in one part of the vocabulary.
    """
    B, V = _MASK_ROWS, max(subject.effort.vocabulary, subject.effort.filtered[1])
    calls = _RequestCalls(subject, B, torch.zeros(1, V))
    generator = torch.Generator().manual_seed(29)
    first_allowed = torch.arange(B)[:, None] * V // B
    step = torch.rand(B, _MASK_TOKENS, generator=generator) * math.ceil(V / B)
    tokens = (first_allowed + step.long()).clamp_max(V - 1)
    allowed = torch.zeros(B, V, dtype=torch.bool).scatter(1, tokens, True)
    allowed = allowed.to(calls.logits.device)
    filters = _filters(calls, allowed, torch.zeros(V, device=allowed.device))
    for name, option, kept in islice(filters, 3):
        for drawn in calls.tokens(f"{name} of {V} tokens", kept, 1, 1, **option):
            _require_allowed(f"{name} of {V} tokens", kept, drawn)


def packed(mask: Tensor) -> Tensor:
    """Return a bool mask [B, V] as int32: token v is bit v % 32 of word v // 32."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 32))
    bits = padded.unflatten(1, (-1, 32)).long()
    return (bits << torch.arange(32, device=mask.device)).sum(2).to(torch.int32)
