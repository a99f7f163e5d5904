"""Truncated problems: the tokens drawn are those that the filters keep, in their proportions.

The law is fsbench.reference.truncate, with the order of filters that the sampler states.
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
from fsbench.verify.joint import alike
from fsbench.verify.pathwise import compared, penalized, truncation
from fsbench.verify.statistics import Counted, all_fit
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
    {"top_k": 500},  # as many as there are tokens
    {"top_k": 1000},  # more
    {"top_p": 0.9},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"min_p": 1.0},
    {"top_k": 20, "min_p": 0.3},
    {"top_k": 1, "top_p": 0.5},
)
"""The whole test of supports: what filters keep at their edges, and with each other."""

REQUESTS: Sequence[Filters] = (
    {},
    {"top_k": 20, "top_p": 0.95},  # the default request of Qwen3
    {"top_k": 20, "top_p": 0.95, "mixed": True},  # the same beside other requests
    {"top_p": 0.9},  # of Llama 3
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05},  # of llama.cpp
    {"top_k": 20},
)
"""Filters of common engine requests."""

PENALIZED: Filters = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.1,
                      "history": 150}  # fmt: skip
"""Penalties of which the samplers' tokens, or how often they come, are compared with the oracle."""

_SIZES = (64, 500)  # B, V


def check_truncation(subject: Subject) -> Check:
    """Nothing is drawn that the filters cut off, and a G-test of what they keep.

    For every case that the sampler can do, of three rows of logits: `normal` ones; `tied`, few
    different values, so that equal logits stand at every boundary; `flat`, all equal.
    In a mixed batch the rows with the same filters are tested together. Then penalties, if the
    sampler applies them (`_penalized_counts`).
    """
    provider, able, setting = subject.provider, subject.able, subject.setting
    found: list[Counted] = []
    for number, case in enumerate(GATE if subject.gate else CASES):
        B, V = _SIZES
        # Where filters stand before the temperature, and what comes after, shows at the second.
        T = (setting.second_temperature, setting.sampled_temperature)[number % 2]
        problem = replace(setting.problem(B, V, T), **case)
        if provider.unsupported_reason(problem):
            continue
        rows = _rows(problem.temperature, able)
        problem = _settled(problem, able, rows)
        drawn = Draws(provider, problem, rows)
        for name in rows:
            drawn.seed(100 * number + 7)
            found += _counted(drawn, name, math.ceil(subject.effort.truncated_draws / B))
    if not found:
        raise UnsupportedProblem(f"{provider.name}: takes none of the filters that are checked")
    return all_fit("truncation", [*found, *_penalized_counts(subject)], able.known_deviation)


def _penalized_counts(subject: Subject) -> list[Counted]:
    """Draws with penalties, counted by what the row's history has of the token.

    Every row has a history, and so a law, of its own. A class of tokens is: in the prompt or not,
    in the output never, once or more often, and a logit above 0 or not. Counts of a class over all
    rows vary less than those of draws from one law: the G-test errs on the safe side.
    """
    B, V = _SIZES
    T = subject.setting.second_temperature
    problem = replace(subject.setting.problem(B, V, T), **{**PENALIZED, "history": 400})
    if subject.gate or subject.provider.unsupported_reason(problem):
        return []
    row = min(T, 1e3) * (torch.randn(V, generator=torch.Generator().manual_seed(5)) - 1)
    drawn = Draws(subject.provider, problem, {"normal": row})
    logits, _ = penalized(problem, drawn.logits("normal").double().cpu().expand(B, V))
    prompts, outputs = (
        reference.token_counts(tokens, V) for tokens in zip(*problem.row_histories(), strict=True)
    )
    kind = (prompts > 0) * 6 + outputs.clamp_max(2) * 2 + (drawn.logits("normal").cpu() > 0)
    drawn.seed(3)
    steps = math.ceil(subject.effort.truncated_draws / B)
    tokens = drawn.draw("normal", steps).cpu()
    counts = torch.bincount(kind.gather(1, tokens.T).flatten(), minlength=12)
    laws = torch.softmax(logits / T, 1)
    shares = torch.zeros(12, dtype=torch.float64).index_add_(0, kind.flatten(), laws.flatten())
    return [(f"{problem}: by the row's history", counts, shares / B)]


def check_requests(subject: Subject) -> Check:
    """The same of REQUESTS, at an engine's batch sizes and with the vocabulary of a model.

    A sampler may have a way of its own for few rows, for many tokens, or for T = 1. The logits of
    a row are -2 T log(rank), shuffled: no filter ends among tokens that are equal in bf16.
    """
    provider, able, setting, effort = (
        *(subject.provider, subject.able, subject.setting, subject.effort),
    )
    V, found = effort.vocabulary, []
    order = torch.randperm(V, generator=torch.Generator().manual_seed(7))
    ranked = -2.0 * torch.log(torch.arange(1, V + 1, dtype=torch.float64))
    for number, request in enumerate(REQUESTS):
        T = setting.second_temperature if request else 1.0
        rows = {"zipf": (min(T, 1e3) * ranked)[order]}
        for B in effort.request_sizes:
            problem = replace(setting.problem(B, V, T), **request)
            if provider.unsupported_reason(problem):
                continue
            drawn = Draws(provider, _settled(problem, able, rows), rows)
            drawn.seed(100 * number + B)
            launches = min(effort.request_launches, math.ceil(effort.request_draws / B))
            found += _counted(drawn, "zipf", launches)
    if not found:
        raise UnsupportedProblem(f"{provider.name}: takes none of the requests that are checked")
    return all_fit("requests", found, able.known_deviation)


def _counted(drawn: Draws, name: str, steps: int) -> list[Counted]:
    """Count the draws of the next steps by distribution: rows with the same filters together.

    Raises VerificationFailed for a token that is cut off; a law of one token is left out.
    """
    problem, able = drawn.problem, drawn.able
    tokens, found = drawn.draw(name, steps), []
    for turn, law in enumerate(row_laws(problem, able, drawn.logits(name))[: problem.B]):
        mine = tokens[:, turn :: 4 if problem.mixed else 1].flatten()
        counts = torch.bincount(mine, minlength=problem.V).cpu()
        where = f"{problem}: row {turn}, {name}"
        cut = (counts > 0) & (law == 0)
        if cut.any() and not able.known_deviation:
            raise VerificationFailed(
                f"{where}: drew token {int(cut.nonzero()[0])}, which is cut off"
            )
        if int((law > 0).sum()) > 1:
            found.append((where, counts, law))
    return found


def check_truncated_draws(subject: Subject) -> Check:
    """Rows, steps and seeds are independent also where half of the vocabulary is cut off.

    A sampler that draws again where its first token is cut off has further noise to take from
    where it should not, such as that of the next seed's first draw.
    """
    able, setting = subject.able, subject.setting
    B, V = _SIZES
    T = setting.second_temperature
    rows, name = _rows(T, able), "all different"
    if able.ties != "any":
        # Of many tokens, whose law is flat: also a limit of the sampler's own to k shows.
        V, name = subject.effort.vocabulary, "flat"
        rows = {name: torch.full((V,), -min(T, 1e3))}
    halves = ({"top_k": V // 2}, {"top_p": 0.5}, {"min_p": 0.2})
    (half, *_) = [each for each in halves if set(each) <= set(able.filters)]
    problem = _settled(replace(setting.problem(B, V, T), **half), able, rows)
    draws = Draws(subject.provider, problem, rows)
    seeds = (SEED, SEED + able.seed_stride, SEED + max(able.seed_stride, 2**32))
    steps = max(2, math.ceil(subject.effort.truncated_draws / B / len(seeds)))
    streams, names = [], []
    for seed in seeds:
        draws.seed(seed)
        streams.append(draws.draw(name, steps))
        names += [f"of seed {seed} step {step}" for step in range(steps)]
    tokens = torch.cat(streams)
    (law,) = row_laws(problem, able, draws.logits(name))
    law = law.to(tokens.device)
    fit = all_fit("kept", [("", torch.bincount(tokens.flatten(), minlength=V), law)])
    found = [
        alike("launches", law, able, tokens, names),
        alike("rows", law, able, tokens.T, range(B)),
        (f"the kept: {fit.detail}", fit.p_value or 0.0) if not able.known_deviation else ("", 1.0),
    ]
    p_value = min(1.0, len(found) * min(p for _, p in found))
    told = min(found, key=lambda each: each[1])[0]
    return Check(
        "truncated draws",
        p_value > ALPHA,
        f"{problem}: {len(tokens)} launches; most alike {told}",
        tokens.numel(),
        None,
        p_value,
        detects="two launches, or two rows, of which a fifth of the draws share noise",
    )


def _rows(T: float, able: Capabilities) -> dict[str, Tensor]:
    """Rows of logits [V] by name; they scale with T, so that the law is much the same at any T.

    Without ties, if a sampler does not say what becomes of them.
    """
    V = _SIZES[1]
    normal = 2.0 * torch.randn(V, generator=torch.Generator().manual_seed(5))
    normal[[0, -1]] = 4.0
    scale = min(T, 1e3)  # fp16 ends at 65504
    if able.ties == "any":
        # 500 of the 512 numbers that bf16 has between -8 and -0.5, times a power of two.
        grid = [-(128 + j) / 128 * 2.0**e for e in (-1, 0, 1, 2) for j in range(128)]
        ranked = torch.tensor(grid[:V]) * 2.0 ** round(math.log2(scale))
        return {"all different": ranked[normal.argsort().argsort()]}
    return {
        "normal": scale * normal,
        "tied": scale * normal.round().clamp(-2, 4),
        "flat": torch.full((V,), -scale),
    }


def _settled(problem: Problem, able: Capabilities, rows: dict[str, Tensor]) -> Problem:
    """The problem, with a top_p that leaves no token to rounding in any of the rows [V]."""
    if "top_p" not in problem.filters:
        return problem
    dtype = TORCH_DTYPES[problem.dtype]
    for attempt in range(40):
        tried = replace(problem, top_p=problem.top_p * (1.0 - 0.0037 * attempt))
        stored = (row.to(dtype).double() for row in rows.values())
        bounds = [truncation(tried, able, row.expand(4, -1)) for row in stored]
        if all(part is None or torch.equal(part.surely, part.possibly) for part in bounds):
            return tried
    raise VerificationFailed(f"{problem}: no top_p near it leaves nothing to rounding")


def row_laws(problem: Problem, able: Capabilities, row: Tensor) -> Tensor:
    """The probabilities [R, V] float64 that rows r, r + R, r + 2 R, ... of a batch draw from.

    All rows have the logits `row` [V]; in a mixed batch R is 4, the number of turns, else 1.
    """
    turns = 4 if problem.mixed else 1
    logits = row.double().cpu().expand(turns, -1)
    kept = truncation(problem, able, logits)
    if kept is None:
        return torch.softmax(logits / problem.temperature, 1)
    return reference.filtered_probabilities(logits, kept, problem.temperature)


def check_truncated_oracle(subject: Subject) -> Check:
    """The token is the one fsbench.reference draws from the kept; in mixed batches, too.

    See noise_of and docs/design/noise.md.
    """
    setting, asked = subject.setting, []
    for number, (B, V) in enumerate(subject.shapes):
        cases = [CASES[(3 * number + turn) % len(CASES)] for turn in range(3)]
        for turn, case in enumerate([*cases, {**cases[0], **PENALIZED}]):
            T = (setting.second_temperature, setting.sampled_temperature)[turn % 2]
            problem = replace(setting.problem(B, V, T), **case)
            if not subject.provider.unsupported_reason(problem):
                counters = [(0x0123456789ABCDEF - number, 2**32 - 1 - turn)]
                asked.append((number, problem, counters))
    return compared("truncated oracle", subject.provider, asked)
