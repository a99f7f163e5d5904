"""Edges: which tokens can be drawn at all, at sizes around those of tiles and at extreme logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsbench import inputs
from fsbench.provider import Kind, Provider
from fsbench.verify.check import ALPHA, Check, Setting
from fsbench.verify.drawing import (
    exact_head,
    launched_tokens,
    random_logits,
    require_form,
    require_inside,
    require_support,
    scalar,
)
from fsbench.verify.pathwise import SHAPES, Shapes, pathwise_problems
from fsbench.verify.statistics import detectable_bias, goodness_of_fit

CERTAIN = 100.0
"""Units of T between two logits that no sampler may ever cross: e^-100 in probability."""

_LOWEST = -6e4  # fp16 ends at -65504
_FILTERED = (64, 1000)  # B, V


def check_greedy(provider: Provider, setting: Setting, shapes: Shapes = SHAPES) -> Check:
    """At T = 0 the token's logit is the row's maximum, also where all logits are negative."""
    rows = 0
    for number, problem in pathwise_problems(provider, setting, 0.0, shapes):
        B, V = problem.B, problem.V
        hidden, weight, _ = exact_head(problem, random_logits(problem, number))
        # All-negative logits expose padding filled with zero.
        for shift in (0.0, -40.0):
            head = weight + torch.tensor(shift, dtype=weight.dtype, device=weight.device)
            values = hidden.float() @ head.float().T
            tokens = launched_tokens(provider.build(problem, head), hidden, 1, number)
            inside = (tokens >= 0) & (tokens < V)
            picked = values.gather(1, tokens.long().clamp(0, V - 1)[:, None])[:, 0]
            wrong = ~inside | (picked != values.max(1).values)
            if wrong.any():
                row = int(wrong.nonzero()[0])
                return Check(
                    "greedy",
                    False,
                    f"B={B} V={V} row {row}: expected {int(values[row].argmax())}, "
                    f"got {int(tokens[row])}",
                    rows,
                )
            rows += B
    return Check("greedy", True, f"{rows} rows have the maximum logit", rows)


def check_edges(provider: Provider, setting: Setting, shapes: Shapes) -> Check:
    """No token is drawn that has no probability: ids out of range, padding, far below the leader.

    The rows: one token CERTAIN above all others, at either end and inside of the vocabulary; the
    same with all logits negative, which exposes padding that counts as zero; two such tokens, tied;
    all logits equal and negative; one logit of zero and all others at the bottom of the range.
    """
    T = 0.0
    if provider.kind is not Kind.GREEDY:
        T = min(setting.sampled_temperature, -_LOWEST / CERTAIN / 2)
    rows = 0
    problems = pathwise_problems(provider, setting, T, shapes)
    for number, problem in problems:
        B, V, device = problem.B, problem.V, problem.device
        logits, allowed = (part.to(device) for part in _edge_rows(V, CERTAIN * (T or 1.0)))
        dtype = inputs.TORCH_DTYPES[problem.dtype]
        hidden, weight = inputs.head_with_logits(logits, dtype, problem.D)
        launch = provider.build(problem, weight)
        torch.manual_seed(number)
        for step in range(math.ceil(len(logits) / B)):  # until each row has had its turn
            row = (torch.arange(B, device=device) + step * B) % len(logits)
            tokens = launched_tokens(launch, hidden[row].contiguous(), 3 + number, step).long()
            require_inside(tokens, V)
            wrong = ~allowed[row, tokens]
            if wrong.any():
                at = int(wrong.nonzero()[0])
                detail = f"B={B} V={V} row {at}: drew token {int(tokens[at])}, of probability 0"
                return Check("edges", False, detail, rows)
            rows += B
    told = f"{rows} rows of {len(problems)} shapes: no token without probability"
    return Check("edges", True, told, rows)


def _edge_rows(V: int, gap: float) -> tuple[Tensor, Tensor]:
    """Logits [9, V] fp32, and which tokens have probability: bool [9, V]."""
    logits = torch.full((9, V), -2 * gap)
    for number, place in enumerate((0, V // 2, V - 1)):
        logits[number, place] = -gap
        logits[3 + number] = 0.0
        logits[3 + number, place] = gap
    logits[6, [V // 3, V - 1]] = -gap
    logits[7] = -gap
    logits[8] = _LOWEST
    logits[8, V // 3] = 0.0
    return logits, logits == logits.max(1, keepdim=True).values


def check_filters(provider: Provider, setting: Setting, steps: int) -> Check:
    """Masks, biases of -inf and greedy rows, as far as they are claimed, row beside row.

    Of the rows with half of the vocabulary forbidden: no forbidden token, and a G-test of the
    others. One row has a single token left; one, under the noise contract, has none: token -1.
    Every other row is greedy.
    """
    able = provider.capabilities
    assert provider.sample is not None
    B, V = _FILTERED
    T, device = setting.sampled_temperature, setting.device
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
