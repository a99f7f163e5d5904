"""Recommend the fastest sampler at each B from measured results, and show how to call it.

All times of one B are from one run. Needs no torch and no sampler.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from fsbench.problem import Problem
from fsbench.provider import Kind, Provider
from fsbench.report import logits_store
from fsbench.report.tables import Configuration


@dataclass(frozen=True)
class Advice:
    """The fastest sampler at one B.

    Attributes:
        us: its median time in microseconds.
        ties: other candidates whose intervals overlap that of `best`.
        instead_of: the alternative: the fastest sampler that stores logits, or the fastest fused
            one if `best` stores them; the next fastest if all samplers do the same. None if no
            alternative was measured.
        folder: the run of both times.
        extra_bytes: peak memory of `best` in addition to weight and hidden; None if unknown.
    """

    b: int
    best: str
    us: float
    ties: tuple[str, ...]
    instead_of: str | None
    instead_us: float | None
    folder: str
    extra_bytes: int | None = None

    @property
    def saves(self) -> float | None:
        """Share of the alternative's time that `best` saves."""
        return None if self.instead_us is None else 1 - self.us / self.instead_us


@dataclass(frozen=True)
class _Timing:
    """A measured cell. approach: fused or not, or the provider if all samplers do the same."""

    provider: str
    approach: bool | str
    folder: str
    us: float
    lo_us: float
    hi_us: float
    over_matmul: float
    extra_bytes: float
    is_candidate: bool


_Run = list[_Timing]
"""Timings of one B in one run, the fastest first."""


def recommend(
    configuration: Configuration,
    candidates: Collection[str],
    others: Collection[str] = (),
    forced: Mapping[str, str] | None = None,
) -> list[Advice]:
    """Return advice for each B at which a candidate was measured.

    Only samplers that draw from the problem's distribution are compared. The run of a B is the
    latest with the strongest alternative (`_strongest_run`): a run without a strong sampler of one
    approach would overstate the savings of the other.

    Args:
        candidates: names of providers. `flash_sampling_store` is excluded; it exists to measure the
            cost of the store.
        others: names of providers that can be the alternative if no candidate can.
        forced: provider that forces one kernel of a public call -> provider that makes the call as
            users do. If both were measured, the latter counts.
    """
    ok = configuration.rows[configuration.rows.status == "ok"]
    bounds = ok[ok.kind == Kind.LOWER_BOUND]  # the slowest of a run is the matmul alone
    matmul_us = bounds.groupby(["folder", "b"]).median_us.max().to_dict()
    extra = ok["peak_extra_bytes"].astype(float) if "peak_extra_bytes" in ok else math.nan
    rows = ok.assign(extra_bytes=extra)
    rows = rows[(rows.kind == configuration.drawn) & ~rows.uncaptured]
    rows = rows[rows.provider != logits_store.pair()[1]]
    has_both = rows.fused.nunique() > 1
    by_b: dict[int, _Run] = {}
    for row in rows.itertuples():
        is_candidate = row.provider in candidates
        if is_candidate or row.provider in others:
            timing = _Timing(
                row.provider,
                bool(row.fused) if has_both else row.provider,
                row.folder,
                *(row.median_us, row.ci_lo_us, row.ci_hi_us),
                row.median_us / matmul_us.get((row.folder, row.b), math.nan),
                row.extra_bytes,
                is_candidate,
            )
            by_b.setdefault(int(row.b), []).append(timing)
    advice = []
    for B, timings in sorted(by_b.items()):
        able = [timing for timing in timings if timing.is_candidate]
        if able:
            compared = able if len({timing.approach for timing in able}) > 1 else timings
            advice.append(_advice(B, _strongest_run(compared, forced or {})))
    return advice


def _strongest_run(timings: _Run, forced: Mapping[str, str]) -> _Run:
    """Return the run with the strongest alternative, the fastest sampler first.

    The strongest sampler of each approach is chosen over all runs, by its time / time of the matmul
    alone in the same run, or by its time if no run has the matmul. The run is the latest of those
    that have the strongest sampler of each approach or lack the fewest, and of these one with the
    public call (a value of `forced`), in which the samplers that force its kernels are left out.
    """
    has_matmul = any(timing.over_matmul > 0 for timing in timings)
    measured = {timing.provider for timing in timings}
    calls = {name: call for name, call in forced.items() if name in measured}

    def strength(timing: _Timing) -> float:
        if not has_matmul:
            return timing.us
        return timing.over_matmul if timing.over_matmul > 0 else math.inf

    strongest: dict[bool | str, str] = {}
    for timing in sorted(timings, key=strength):
        if timing.provider not in calls.values():
            strongest.setdefault(timing.approach, timing.provider)
    required = set([*strongest.values()][:2])
    by_folder: dict[str, dict[str, _Timing]] = {}
    for timing in timings:
        by_folder.setdefault(timing.folder, {})[timing.provider] = timing
    runs: list[tuple[int, bool, _Run]] = []
    for same in by_folder.values():
        replaced = {name for name, call in calls.items() if call in same}
        run = sorted((same[name] for name in same if name not in replaced), key=lambda t: t.us)
        if any(timing.is_candidate for timing in run):
            runs.append((len(required - same.keys() - replaced), not replaced, run))
    return min(reversed(runs), key=lambda each: each[:2])[2]


def _best_and_rival(run: _Run) -> tuple[_Timing, _Timing | None]:
    best = next(timing for timing in run if timing.is_candidate)
    rivals = [timing for timing in run if timing.approach != best.approach]
    return best, min(rivals, key=lambda timing: not timing.is_candidate, default=None)


def _advice(B: int, run: _Run) -> Advice:
    best, rival = _best_and_rival(run)
    return Advice(
        b=B,
        best=best.provider,
        us=float(best.us),
        ties=tuple(
            timing.provider
            for timing in run
            if timing.is_candidate and timing is not best and timing.lo_us <= best.hi_us
        ),
        instead_of=None if rival is None else rival.provider,
        instead_us=None if rival is None else float(rival.us),
        folder=best.folder,
        extra_bytes=None if math.isnan(best.extra_bytes) else int(best.extra_bytes),
    )


_ARGUMENTS = {
    "per_row_temperature": "temperature=temperature",
    "greedy_rows": "temperature=temperature",
    "mask": "mask=mask",
    "bias": "bias=bias",
    "num_samples": "num_samples=n",
    "logprob": "return_logprob=True",
    "entropy": "return_entropy=True",
    "rank": "return_rank=True",
    "top": "return_top=20",
}


def has_public_call(sampler: Provider, source: str, problem: Problem) -> bool:
    """Return whether users can call a sampler: as a package, a public function or in vLLM."""
    plain = problem.device == "cuda" and not problem.filters
    return plain or bool(sampler.call) or ".kernels." not in source


def calls(
    sampler: Provider, source: str, problem: Problem, needs: list[str], as_measured: bool = True
) -> dict[str, str]:
    """Return code that calls a sampler: `python` and, if the plug-in has the sampler, `vllm`.

    Args:
        source: module or file that defines the sampler.
        needs: required capabilities; those with an argument of the call are passed.
        as_measured: pass the arguments that the sampler itself fixes, such as the kernel.
    """
    sharded = problem.tp > 1
    filters = [f"{name}={getattr(problem, name)}" for name in problem.filters]
    call = sampler.call
    if not call:
        size = [f"B, {problem.D}, {problem.V}, {problem.dtype!r}", *filters]
        size += [f"temperature={problem.temperature:g}"] if problem.temperature != 1 else []
        size += [f"tp={problem.tp}"] if sharded else []
        size += ["device='cpu'"] if problem.device == "cpu" else []
        build, head = ("build_sharded", "shard") if sharded else ("build", "weight")
        python = (
            f"from fsbench.problem import Problem\nfrom {source} import PROVIDER\n"
            f"problem = Problem({', '.join(size)})\n"
            f"launch = PROVIDER.{build}(problem, {head})\n"
            "tokens = launch(hidden, seed, step)"
        )
        plain = (problem.device, problem.temperature) == ("cuda", 1) and not (
            filters or needs or sharded
        )
        vllm = {"vllm": f"FSBENCH_VLLM={sampler.name} vllm serve MODEL"} if plain else {}
        return {"python": python, **vllm}
    imports, first, arguments = call, "", ["weight"]
    if sharded:
        imports, arguments = f"VocabShard, {call}", ["shard"]
        first = "shard = VocabShard(weight_rows_of_this_rank, group)  # once, on all ranks\n"
    plug_in = "flash_sample"
    if call == "screened_sample":
        imports = imports.replace(call, f"prepare_head, {call}")
        first += f"head = prepare_head({'shard.weight' if sharded else 'weight'})  # once\n"
        arguments = ["head", "shard=shard"] if sharded else ["head"]
        plug_in = plug_in if sharded else "screened"
    options = [*filters, *(_ARGUMENTS[need] for need in needs if need in _ARGUMENTS)]
    fixed = problem.temperature != 1 and "temperature=temperature" not in options
    options += [f"temperature={problem.temperature:g}"] if fixed else []
    forced: dict[str, Any] = getattr(sampler.sample, "keywords", {})  # of a partial
    if as_measured:
        options += [f"{n}={value!r}" for n, value in forced.items() if value != "auto"]
    text = ", ".join(dict.fromkeys(["hidden", *arguments, "seed=seed", "offset=step", *options]))
    if len(text) + len(call) > 65:
        text = "\n" + fill(text, 70, initial_indent="    ", subsequent_indent="    ") + "\n"
    python = f"from fsbench.kernels import {imports}\n{first}sample = {call}({text})"
    serve = f"FSBENCH_VLLM={plug_in} vllm serve MODEL"
    return {
        "python": python,
        "vllm": f"{serve} --tensor-parallel-size {problem.tp}" if sharded else serve,
    }
