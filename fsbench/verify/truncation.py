"""Checks of filters: only kept tokens are drawn, in the right proportions.

The expected distribution is that of fsbench.reference.truncate, in the sampler's order of filters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsbench import reference
from fsbench.errors import UnsupportedProblem, VerificationFailed
from fsbench.inputs import TORCH_DTYPES
from fsbench.problem import Problem
from fsbench.provider import Capabilities
from fsbench.verify.check import ALPHA, Check
from fsbench.verify.drawing import Draws
from fsbench.verify.joint import closest_streams
from fsbench.verify.pathwise import compare_with_oracle, penalized, truncation
from fsbench.verify.statistics import Histogram, all_fit
from fsbench.verify.subject import SEED, Subject

Filters = dict[str, Any]

GATE: Sequence[Filters] = (
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 7},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "mixed": True},
    {"top_k": 20, "top_p": 0.9, "mixed": True},
)
"""Filters checked by `fsbench run` before it times a truncated problem."""

CASES: Sequence[Filters] = (
    *GATE,
    {"top_k": 1},
    {"top_k": 500},  # the size of the vocabulary
    {"top_k": 1000},  # larger than the vocabulary
    {"top_p": 0.9},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"min_p": 1.0},
    {"top_k": 20, "min_p": 0.3},
    {"top_k": 1, "top_p": 0.5},
)
"""Filters checked by the other tiers: limits of each filter, and combinations."""

REQUESTS: Sequence[Filters] = (
    {},
    {"top_k": 20, "top_p": 0.95},  # default of Qwen3
    {"top_k": 20, "top_p": 0.95, "mixed": True},  # in a batch with other requests
    {"top_p": 0.9},  # Llama 3
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05},  # llama.cpp
    {"top_k": 20},
)
"""Filters of common engine requests."""

PENALIZED: Filters = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.1,
                      "history": 150}  # fmt: skip
"""Penalties for which tokens, or their frequencies, are compared with the oracle."""

_SIZES = (64, 500)  # B, V


def check_truncation(subject: Subject) -> Check:
    """Check that no removed token is drawn; run a G-test of the kept tokens.

    Each supported case is tested on three rows of logits: `normal`; `tied`, with equal logits at
    each boundary; `flat`, all equal. Rows of a mixed batch with the same filters are tested
    together. Penalties are tested too (`_penalized_histograms`).
    """
    provider, caps, setting = subject.provider, subject.caps, subject.setting
    histograms: list[Histogram] = []
    for number, case in enumerate(GATE if subject.gate else CASES):
        B, V = _SIZES
        # The second temperature shows whether filters are applied before or after it.
        T = (setting.second_temperature, setting.sampled_temperature)[number % 2]
        problem = replace(setting.problem(B, V, T), **case)
        if provider.unsupported_reason(problem):
            continue
        rows = _logits_by_name(problem.temperature, caps)
        problem = _without_rounding(problem, caps, rows)
        draws = Draws(provider, problem, rows)
        for name in rows:
            draws.seed(100 * number + 7)
            histograms += _histograms(draws, name, math.ceil(subject.effort.truncated_draws / B))
    if not histograms:
        raise UnsupportedProblem(f"{provider.name}: takes none of the filters that are checked")
    return all_fit(
        "truncation", [*histograms, *_penalized_histograms(subject)], caps.known_deviation
    )


def _penalized_histograms(subject: Subject) -> list[Histogram]:
    """Count draws with penalties by the token's occurrences in the row's history.

    Each row has a different history and distribution. The class of a token is: in the prompt or
    not; in the output never, once or more often; a logit above 0 or not. Counts of a class over all
    rows vary less than those of draws from one distribution, so the G-test is conservative.
    """
    B, V = _SIZES
    T = subject.setting.second_temperature
    problem = replace(subject.setting.problem(B, V, T), **{**PENALIZED, "history": 400})
    if subject.gate or subject.provider.unsupported_reason(problem):
        return []
    row = min(T, 1e3) * (torch.randn(V, generator=torch.Generator().manual_seed(5)) - 1)
    draws = Draws(subject.provider, problem, {"normal": row})
    logits, _ = penalized(problem, draws.logits("normal").double().cpu().expand(B, V))
    prompts, outputs = (
        reference.token_counts(tokens, V) for tokens in zip(*problem.row_histories(), strict=True)
    )
    token_class = (prompts > 0) * 6 + outputs.clamp_max(2) * 2 + (draws.logits("normal").cpu() > 0)
    draws.seed(3)
    steps = math.ceil(subject.effort.truncated_draws / B)
    tokens = draws.draw("normal", steps).cpu()
    counts = torch.bincount(token_class.gather(1, tokens.T).flatten(), minlength=12)
    p = torch.softmax(logits / T, 1)
    shares = torch.zeros(12, dtype=torch.float64).index_add_(0, token_class.flatten(), p.flatten())
    return [(f"{problem}: by the row's history", counts, shares / B)]


def check_requests(subject: Subject) -> Check:
    """Run `truncation` for REQUESTS, at an engine's batch sizes and a model's vocabulary.

    A sampler may use another algorithm for few rows, for many tokens, or for T = 1. The logits of a
    row are -2 T log(rank), shuffled: no filter ends among tokens that are equal in bf16.
    """
    provider, caps, setting = subject.provider, subject.caps, subject.setting
    effort, histograms = subject.effort, []
    V = effort.vocabulary
    order = torch.randperm(V, generator=torch.Generator().manual_seed(7))
    ranked = -2.0 * torch.log(torch.arange(1, V + 1, dtype=torch.float64))
    for number, request in enumerate(REQUESTS):
        T = setting.second_temperature if request else 1.0
        rows = {"zipf": (min(T, 1e3) * ranked)[order]}
        for B in effort.request_sizes:
            problem = replace(setting.problem(B, V, T), **request)
            if provider.unsupported_reason(problem):
                continue
            draws = Draws(provider, _without_rounding(problem, caps, rows), rows)
            draws.seed(100 * number + B)
            launches = min(effort.request_launches, math.ceil(effort.request_draws / B))
            histograms += _histograms(draws, "zipf", launches)
    if not histograms:
        raise UnsupportedProblem(f"{provider.name}: takes none of the requests that are checked")
    return all_fit("requests", histograms, caps.known_deviation)


def _histograms(draws: Draws, name: str, steps: int) -> list[Histogram]:
    """Count the draws of the next steps; rows with the same filters are counted together.

    Rows that keep a single token have no histogram.

    Raises:
        VerificationFailed: a removed token was drawn.
    """
    problem, caps = draws.problem, draws.caps
    tokens, histograms = draws.draw(name, steps), []
    for turn, p in enumerate(row_distributions(problem, caps, draws.logits(name))[: problem.B]):
        row_tokens = tokens[:, turn :: 4 if problem.mixed else 1].flatten()
        counts = torch.bincount(row_tokens, minlength=problem.V).cpu()
        label = f"{problem}: row {turn}, {name}"
        removed = (counts > 0) & (p == 0)
        if removed.any() and not caps.known_deviation:
            token = int(removed.nonzero()[0])
            raise VerificationFailed(f"{label}: drew token {token}, which is cut off")
        if int((p > 0).sum()) > 1:
            histograms.append((label, counts, p))
    return histograms


def check_truncated_draws(subject: Subject) -> Check:
    """Test that rows, steps and seeds are independent if half of the vocabulary is removed.

    A sampler that draws again after a removed token needs more noise, which it may take from other
    draws, such as the next seed's.
    """
    caps, setting = subject.caps, subject.setting
    B, V = _SIZES
    T = setting.second_temperature
    rows, name = _logits_by_name(T, caps), "all different"
    if caps.ties != "any":
        # Many equal tokens also detect a limit to k in the sampler.
        V, name = subject.effort.vocabulary, "flat"
        rows = {name: torch.full((V,), -min(T, 1e3))}
    halves = ({"top_k": V // 2}, {"top_p": 0.5}, {"min_p": 0.2})
    half = next(filters for filters in halves if set(filters) <= set(caps.filters))
    problem = _without_rounding(replace(setting.problem(B, V, T), **half), caps, rows)
    draws = Draws(subject.provider, problem, rows)
    seeds = (SEED, SEED + caps.seed_stride, SEED + max(caps.seed_stride, 2**32))
    steps = max(2, math.ceil(subject.effort.truncated_draws / B / len(seeds)))
    streams, names = [], []
    for seed in seeds:
        draws.seed(seed)
        streams.append(draws.draw(name, steps))
        names += [f"of seed {seed} step {step}" for step in range(steps)]
    tokens = torch.cat(streams)
    (p,) = row_distributions(problem, caps, draws.logits(name))
    p = p.to(tokens.device)
    fit = all_fit("kept", [("", torch.bincount(tokens.flatten(), minlength=V), p)])
    results = [
        closest_streams("launches", p, caps, tokens, names),
        closest_streams("rows", p, caps, tokens.T, range(B)),
        (f"kept tokens: {fit.detail}", fit.p_value or 0.0)
        if not caps.known_deviation
        else ("", 1.0),
    ]
    p_value = min(1.0, len(results) * min(p for _, p in results))
    detail = min(results, key=lambda result: result[1])[0]
    return Check(
        "truncated draws",
        p_value > ALPHA,
        f"{problem}: {len(tokens)} launches; least likely {detail}",
        tokens.numel(),
        None,
        p_value,
        detects="two launches, or two rows, that share the noise of a fifth of their draws",
    )


def _logits_by_name(T: float, caps: Capabilities) -> dict[str, Tensor]:
    """Return rows of logits [V] by name, without ties if the sampler may break ties arbitrarily.

    They scale with T, so the distribution is about the same at every T.
    """
    V = _SIZES[1]
    normal = 2.0 * torch.randn(V, generator=torch.Generator().manual_seed(5))
    normal[[0, -1]] = 4.0
    scale = min(T, 1e3)  # fp16 ends at 65504
    if caps.ties == "any":
        # 500 of the 512 numbers that bf16 has between -8 and -0.5, times a power of two.
        grid = [-(128 + j) / 128 * 2.0**e for e in (-1, 0, 1, 2) for j in range(128)]
        ranked = torch.tensor(grid[:V]) * 2.0 ** round(math.log2(scale))
        return {"all different": ranked[normal.argsort().argsort()]}
    return {
        "normal": scale * normal,
        "tied": scale * normal.round().clamp(-2, 4),
        "flat": torch.full((V,), -scale),
    }


def _without_rounding(problem: Problem, caps: Capabilities, rows: dict[str, Tensor]) -> Problem:
    """Return the problem with a top_p at which rounding changes no kept token, for rows [V]."""
    if "top_p" not in problem.filters:
        return problem
    dtype = TORCH_DTYPES[problem.dtype]
    for attempt in range(40):
        candidate = replace(problem, top_p=problem.top_p * (1.0 - 0.0037 * attempt))
        stored = (row.to(dtype).double() for row in rows.values())
        bounds = [truncation(candidate, caps, row.expand(4, -1)) for row in stored]
        if all(kept is None or torch.equal(kept.surely, kept.possibly) for kept in bounds):
            return candidate
    raise VerificationFailed(f"{problem}: rounding changes the kept tokens at every top_p near it")


def row_distributions(problem: Problem, caps: Capabilities, row: Tensor) -> Tensor:
    """Return the probabilities [R, V] float64 of rows r, r + R, r + 2 R, ... of a batch.

    All rows have the logits `row` [V]. R is 4 in a mixed batch, else 1.
    """
    turns = 4 if problem.mixed else 1
    logits = row.double().cpu().expand(turns, -1)
    kept = truncation(problem, caps, logits)
    if kept is None:
        return torch.softmax(logits / problem.temperature, 1)
    return reference.filtered_probabilities(logits, kept, problem.temperature)


def check_truncated_oracle(subject: Subject) -> Check:
    """Check that tokens under filters, also in mixed batches, are those of fsbench.reference."""
    setting, cases = subject.setting, []
    for number, (B, V) in enumerate(subject.shapes):
        row_cases = [CASES[(3 * number + turn) % len(CASES)] for turn in range(3)]
        for turn, case in enumerate([*row_cases, {**row_cases[0], **PENALIZED}]):
            T = (setting.second_temperature, setting.sampled_temperature)[turn % 2]
            problem = replace(setting.problem(B, V, T), **case)
            if not subject.provider.unsupported_reason(problem):
                counters = [(0x0123456789ABCDEF - number, 2**32 - 1 - turn)]
                cases.append((number, problem, counters))
    return compare_with_oracle("truncated oracle", subject.provider, cases)
