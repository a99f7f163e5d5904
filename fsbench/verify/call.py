"""The full call: filters, temperatures and seeds of each row, and what it says of its tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fsbench import reference
from fsbench.provider import Provider
from fsbench.verify.check import ALPHA, Check, Setting
from fsbench.verify.drawing import exact_head, require_form, require_inside, require_support, scalar
from fsbench.verify.pathwise import first_wrong
from fsbench.verify.statistics import detectable_bias, goodness_of_fit

_ROWS, _VOCABULARY = 300, 500
_TEMPERATURES = (1.0, 0.5, 2.0, 4.0)
"""Of rows side by side, in units of the setting's; logits / T are exact."""

_LOGPROB_ERROR = 1e-3  # of 1 and the log-probability together


def check_call(provider: Provider, setting: Setting, steps: int) -> Check:
    """All that is claimed at once: a T and a seed for each row, and log-probabilities.

    Of the rows of each T a G-test; rows of T = 0 are greedy. Which row has which T is random, so
    that no exchange of rows keeps the pattern. The first tokens are the oracle's, under the noise
    contract, and every log-probability is that of its token.
    """
    able = provider.capabilities
    assert provider.sample is not None
    device, base = setting.device, setting.second_temperature
    problem = setting.problem(_ROWS, _VOCABULARY, base)
    require_support(provider, problem)
    generator = torch.Generator().manual_seed(41)
    row = min(base, 1e3) * 2 * torch.randn(1, _VOCABULARY, generator=generator)
    hidden, weight, logits = exact_head(problem, row.to(device))
    values = [base * part for part in _TEMPERATURES] if able.per_row_temperature else [base]
    if able.greedy_rows:
        values.append(0.0)
    turn = torch.randint(len(values), (_ROWS,), generator=generator).to(device)
    T = torch.tensor(values, device=device)[turn]
    seed = scalar(37, device)
    if able.per_request_seed:
        seed = torch.arange(_ROWS, device=device) * 0x0123456789ABCD - 7
    options = {"temperature": T if able.per_row_temperature else base}
    if able.logprob:
        options["return_logprob"] = True
    drawn, worst_error = [], 0.0
    for step in range(steps):
        torch.manual_seed(step)
        offset = scalar(step, device)
        result = provider.sample(hidden, weight, seed=seed, offset=offset, **options)
        drawn.append(require_form(result.tokens, (_ROWS,)).long().clone())
        if step == 0 and able.noise is not None:
            expected = reference.expect(logits, seed, offset, T, able.noise)
            wrong = first_wrong(expected, drawn[0])
            if wrong:
                return Check("call", False, wrong, _ROWS)
        if able.logprob:
            logprob = getattr(result, "logprob", None)
            if logprob is None or logprob.shape != (_ROWS,):
                return Check("call", False, "gave no log-probability for each token", _ROWS)
            wanted = reference.log_probability(logits, drawn[-1].clamp(0, _VOCABULARY - 1), T)
            error = (logprob - wanted).abs() / (1 + wanted.abs())
            worst_error = max(worst_error, float(error.nan_to_num(nan=torch.inf).max()))
    if worst_error > _LOGPROB_ERROR:
        told = f"log-probabilities are off by {worst_error:.2g} (of 1 + |log p|)"
        return Check("call", False, told, steps * _ROWS)
    tokens = torch.stack(drawn, 1)
    require_inside(tokens, _VOCABULARY)
    worst, tests = 1.0, sum(value > 0 for value in values)
    for number, value in enumerate(values):
        mine = tokens[turn == number].flatten()
        if value == 0:
            if (logits[0, mine] < logits[0].max()).any():
                return Check("call", False, "a row of T = 0 is not greedy", tokens.numel())
            continue
        p = torch.softmax(logits[0].double() / value, 0).cpu().numpy()
        counts = torch.bincount(mine, minlength=_VOCABULARY).cpu().numpy()
        fit = goodness_of_fit(counts, p, able.known_deviation)
        if not fit.passed:
            return replace(fit, name="call", detail=f"rows of T = {value:g}: {fit.detail}")
        worst = worst if fit.deviates else min(worst, fit.p_value or 0.0)
    p_value = min(1.0, tests * worst)
    found = detectable_bias(_VOCABULARY // 10, tokens.numel() // len(values), ALPHA / tests)
    return Check(
        "call",
        p_value > ALPHA,
        f"{len(values)} temperatures; smallest p {worst:.2g}",
        tokens.numel(),
        worst,
        p_value,
        detects=f"{found:.1%} rms error of probabilities, in the rows of one T",
    )


def check_filters(
    provider: Provider, setting: Setting, shape: tuple[int, int], steps: int
) -> Check:
    """Masks, biases of -inf and greedy rows, as far as they are claimed, row beside row.

    Of the rows with half of the vocabulary forbidden: no forbidden token, and a G-test of the
    others. One row has a single token left; one, under the noise contract, has none: token -1.
    Every other row is greedy.

    Args:
        shape: B, V. steps: launches of each filter.
    """
    able = provider.capabilities
    assert provider.sample is not None
    B, V = shape
    T, device = setting.second_temperature, setting.device
    problem = setting.problem(B, V, T)
    require_support(provider, problem)
    generator = torch.Generator().manual_seed(23)
    row = min(T, 1e3) * (2 * torch.randn(1, V, generator=generator) - 8)
    hidden, weight, logits = exact_head(problem, row.to(device))
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
    offsets = torch.arange(steps, device=device)
    worst, rows, bins = 1.0, 0, 2
    for number, (name, filter_) in enumerate(filters.items()):
        drawn = []
        for step in range(steps):
            torch.manual_seed(100 * number + step)
            tokens = provider.sample(
                hidden,
                weight,
                seed=scalar(31 + number, device),
                offset=offsets[step : step + 1],
                temperature=temperature,
                **{name.removeprefix("packed "): filter_},
            ).tokens
            drawn.append(require_form(tokens, (B,)).long())
        # Looked at together: a look at each step would make the host wait for the GPU.
        tokens = torch.stack(drawn, 1)
        inside = tokens.clamp(0, V - 1)
        fits = (tokens == inside) & allowed.gather(1, inside)
        fits &= (kept.gather(1, inside) == kept.amax(1, keepdim=True)) | ~greedy[:, None]
        fits = torch.where(undefined[:, None], tokens == -1, fits)
        if not fits.all():
            at, step = (~fits).nonzero()[0].tolist()
            what = "greedy row" if greedy[at] else "row"
            detail = f"{name}: {what} {at} must not give token {int(tokens[at, step])}"
            return Check("filters", False, detail, rows)
        counts = torch.bincount(tokens[sampled].flatten(), minlength=V)
        rows += tokens.numel()
        p = torch.softmax(kept[0].double() / T, 0)
        fit = goodness_of_fit(counts.cpu().numpy(), p.cpu().numpy())
        assert fit.p_value is not None
        worst, bins = min(worst, fit.p_value), max(bins, int(counts.count_nonzero()))
    p_value = min(1.0, len(filters) * worst)
    draws = steps * int(sampled.sum())
    found = detectable_bias(bins - 1, draws, ALPHA / len(filters))
    told = f"{', '.join(filters)}{', greedy rows' if able.greedy_rows else ''}: p {worst:.2g}"
    detects = f"{found:.1%} rms error of the kept probabilities"
    return Check("filters", p_value > ALPHA, told, rows, None, p_value, detects=detects)


def _packed(mask: Tensor) -> Tensor:
    """The int32 form of a bool mask [B, V]: token v in bit v % 32 of word v // 32."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 32))
    bits = padded.unflatten(1, (-1, 32)).long()
    return (bits << torch.arange(32, device=mask.device)).sum(2).to(torch.int32)
