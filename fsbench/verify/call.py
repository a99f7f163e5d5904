"""The full call: filters, temperatures and seeds of each row, and what it says of its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsbench import reference
from fsbench.errors import VerificationFailed
from fsbench.provider import Provider
from fsbench.verify.check import Check
from fsbench.verify.drawing import exact_head, require_form, require_inside, require_support, scalar
from fsbench.verify.pathwise import require_accepted
from fsbench.verify.statistics import Counted, all_fit
from fsbench.verify.subject import Subject

_ROWS, _VOCABULARY = 300, 500
_TEMPERATURES = (1.0, 0.5, 2.0)
"""Of rows side by side, in units of the setting's; logits / T are exact. Engines refuse T > 2."""

_LOGPROB_ERROR = 1e-3  # of 1 and the log-probability together


def _head(subject: Subject, B: int, V: int, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exact_head of B rows with the logits `row` [1, V], at the second temperature."""
    problem = subject.setting.problem(B, V, subject.setting.second_temperature)
    require_support(subject.provider, problem)
    return exact_head(problem, row.to(problem.device))


def _steps(
    provider: Provider, hidden: Tensor, weight: Tensor, steps: int, first: int = 0, **options: Any
) -> Iterator[tuple[Tensor, Any]]:
    """(tokens int64 [B], the sampler's result) of each step."""
    assert provider.sample is not None
    offsets = torch.arange(steps, device=hidden.device)
    for step in range(steps):
        torch.manual_seed(first + step)
        result = provider.sample(hidden, weight, offset=offsets[step : step + 1], **options)
        yield require_form(result.tokens, (len(hidden),)).long().clone(), result


def check_call(subject: Subject) -> Check:
    """All that is claimed at once: a T and a seed for each row, and log-probabilities.

    Of the rows of each T a G-test; rows of T = 0 are greedy. Which row has which T is random, so
    that no exchange of rows keeps the pattern. The first tokens are the oracle's, under the noise
    contract, and every log-probability is that of its token.
    """
    able, device = subject.able, subject.setting.device
    base = subject.setting.second_temperature
    generator = torch.Generator().manual_seed(41)
    row = min(base, 1e3) * 2 * torch.randn(1, _VOCABULARY, generator=generator)
    hidden, weight, logits = _head(subject, _ROWS, _VOCABULARY, row)
    values = [base * part for part in _TEMPERATURES] if able.per_row_temperature else [base]
    if able.greedy_rows:
        values.append(0.0)
    turn = torch.randint(len(values), (_ROWS,), generator=generator).to(device)
    T = torch.tensor(values, device=device)[turn]
    seed = scalar(37, device)
    if able.per_request_seed:
        seed = torch.arange(_ROWS, device=device) * 0x0123456789ABCD - 7
    options: dict[str, Any] = {"seed": seed, "temperature": T if able.per_row_temperature else base}
    if able.logprob:
        options["return_logprob"] = True
    drawn, worst_error = [], 0.0
    for tokens, result in _steps(
        subject.provider, hidden, weight, subject.effort.call_steps, **options
    ):
        drawn.append(tokens)
        if len(drawn) == 1 and able.noise is not None:
            require_accepted(
                reference.expect(logits, seed, scalar(0, device), T, able.noise), tokens
            )
        if able.logprob:
            logprob = getattr(result, "logprob", None)
            if logprob is None or logprob.shape != (_ROWS,):
                raise VerificationFailed("gave no log-probability for each token")
            wanted = reference.log_probability(logits, tokens.clamp(0, _VOCABULARY - 1), T)
            error = (logprob - wanted).abs() / (1 + wanted.abs())
            worst_error = max(worst_error, float(error.nan_to_num(nan=torch.inf).max()))
    if worst_error > _LOGPROB_ERROR:
        raise VerificationFailed(f"log-probabilities are off by {worst_error:.2g} (of 1 + |log p|)")
    tokens = torch.stack(drawn, 1)
    require_inside(tokens, _VOCABULARY)
    found: list[Counted] = []
    for number, value in enumerate(values):
        mine = tokens[turn == number].flatten()
        if value:
            counts = torch.bincount(mine, minlength=_VOCABULARY)
            law = torch.softmax(logits[0].double() / value, 0)
            found.append((f"rows of T = {value:g}", counts, law))
        elif (logits[0, mine] < logits[0].max()).any():
            raise VerificationFailed("a row of T = 0 is not greedy")
    return replace(all_fit("call", found, able.known_deviation), draws=tokens.numel())


def check_filters(subject: Subject) -> Check:
    """Masks, biases of -inf and greedy rows, as far as they are claimed, row beside row.

    Of the rows with half of the vocabulary forbidden: no forbidden token, and a G-test of the
    others. One row has a single token left; one, under the noise contract, has none: token -1.
    Every other row is greedy.
    """
    able, device = subject.able, subject.setting.device
    (B, V), T = subject.effort.filtered, subject.setting.second_temperature
    generator = torch.Generator().manual_seed(23)
    row = min(T, 1e3) * (2 * torch.randn(1, V, generator=generator) - 8)
    hidden, weight, logits = _head(subject, B, V, row)
    allowed = (torch.rand(1, V, generator=generator) < 0.5).repeat(B, 1)
    allowed[:, 0] = True
    allowed[2] = torch.arange(V) == V - 1
    if able.noise is not None:
        allowed[4] = False
    allowed = allowed.to(device)
    filters = {}
    if able.mask:
        filters["mask"], filters["packed mask"] = allowed, _packed(allowed)
    if able.bias:
        filters["bias"] = torch.zeros(B, V, device=device).masked_fill(~allowed, -torch.inf)
    greedy = torch.zeros(B, dtype=torch.bool, device=device)
    temperature: float | Tensor = T
    if able.greedy_rows:
        greedy[1::2] = True
        temperature = torch.full((B,), T, device=device).masked_fill(greedy, 0.0)
    kept = logits.masked_fill(~allowed, -torch.inf)
    sampled = ~greedy
    sampled[[2, 4]] = False
    undefined = ~allowed.any(1)
    law = torch.softmax(kept[0].double() / T, 0)
    found: list[Counted] = []
    for number, (name, filter_) in enumerate(filters.items()):
        options = {"temperature": temperature, name.removeprefix("packed "): filter_}
        steps = _steps(
            subject.provider,
            hidden,
            weight,
            subject.effort.filter_steps,
            100 * number,
            seed=scalar(31 + number, device),
            **options,
        )
        # Looked at together: a look at each step would make the host wait for the GPU.
        tokens = torch.stack([drawn for drawn, _ in steps], 1)
        inside = tokens.clamp(0, V - 1)
        fits = (tokens == inside) & allowed.gather(1, inside)
        fits &= (kept.gather(1, inside) == kept.amax(1, keepdim=True)) | ~greedy[:, None]
        fits = torch.where(undefined[:, None], tokens == -1, fits)
        if not fits.all():
            at, step = (~fits).nonzero()[0].tolist()
            what = "greedy row" if greedy[at] else "row"
            raise VerificationFailed(
                f"{name}: {what} {at} must not give token {int(tokens[at, step])}"
            )
        found.append((name, torch.bincount(tokens[sampled].flatten(), minlength=V), law))
    return all_fit("filters", found)


def _packed(mask: Tensor) -> Tensor:
    """The int32 form of a bool mask [B, V]: token v in bit v % 32 of word v // 32."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 32))
    bits = padded.unflatten(1, (-1, 32)).long()
    return (bits << torch.arange(32, device=mask.device)).sum(2).to(torch.int32)
