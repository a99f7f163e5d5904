"""Recommend the fastest sampler at each B from measured results, and show how to call it.

All times of one B are from one run. Needs no torch and no sampler.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import pandas as pd

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


def recommend(
    configuration: Configuration,
    candidates: Collection[str],
    most_bytes: float = float("inf"),
    others: Collection[str] = (),
    forced: Mapping[str, str] | None = None,
) -> list[Advice]:
    """Return advice for each B at which a candidate was measured.

    Only samplers that draw from the problem's distribution are compared. The run of a B is the one
    with the strongest alternative (`_strongest_run`): a run without a strong sampler of one
    approach would overstate the savings of the other.

    Args:
        candidates: names of providers. `flash_sampling_store` is excluded; it exists to measure the
            cost of the store.
        most_bytes: samplers with more peak_extra_bytes at a B are excluded at this B.
        others: names of providers that can be the alternative if no candidate can.
        forced: provider that forces one kernel of a public call -> provider that makes the call as
            users do. If both were measured, the latter counts.
    """
    _, stored = logits_store.pair()
    rows = configuration.rows[configuration.rows.status == "ok"]
    rows = rows.assign(over=rows.median_us / _matmul_us(rows), extra=_extra_bytes(rows))
    rows = rows[(rows.kind == configuration.drawn) & (rows.provider != stored)]
    rows["way"] = rows.provider if rows.fused.nunique() == 1 else rows.fused
    rows["able"] = rows.provider.isin(set(candidates)) & (rows.extra.fillna(0) <= most_bytes)
    rows = rows[rows.able | rows.provider.isin(set(others))]
    return [
        _advice(int(B), _strongest_run(_compared(same), forced or {}))
        for B, same in rows.groupby("b")
        if same.able.any()
    ]


def _matmul_us(rows: pd.DataFrame) -> pd.Series:
    """Return the time of the slowest lower bound (the matmul alone) of the same run and B."""
    bounds = rows[rows.kind == Kind.LOWER_BOUND].groupby(["folder", "b"]).median_us.max()
    keys = pd.MultiIndex.from_frame(rows[["folder", "b"]])
    return pd.Series(bounds.reindex(keys).to_numpy(), index=rows.index)


def _extra_bytes(rows: pd.DataFrame) -> pd.Series:
    extra = rows.get("peak_extra_bytes", pd.Series(float("nan"), index=rows.index))
    return extra.astype(float)


def _compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the candidates of one B, with the others if all candidates use one approach."""
    ways = rows[rows.able].way.unique()
    return rows if len(ways) == 1 else rows[rows.able]


def _strongest_run(rows: pd.DataFrame, forced: Mapping[str, str]) -> pd.DataFrame:
    """Return the rows of the run with the strongest alternative, the fastest first.

    The strongest sampler of each approach is chosen over all runs, by its time / time of the matmul
    alone in the same run, or by its time if no run has the matmul. Runs are preferred in this
    order: those with the strongest sampler of each approach; those with the public call (a value of
    `forced`), in which the samplers that force its kernels are left out; those in which the same
    approach wins as in the latest run, because kernels change. Among these the run is the one in
    which the best sampler saves the least, or the latest of equals.
    """
    strength = rows.over if rows.over.notna().any() else rows.median_us
    rows = rows.assign(strength=strength.fillna(float("inf"))).sort_values("strength")
    measured_calls = {name: call for name, call in forced.items() if name in set(rows.provider)}
    named = rows[~rows.provider.isin(set(measured_calls.values()))]
    strongest = set(named.drop_duplicates("way").provider.head(2))
    runs: dict[tuple[int, bool], list[pd.DataFrame]] = {}
    for _, run in rows.sort_index().groupby("folder", sort=False):
        names = set(run.provider)
        spared = {name for name, call in measured_calls.items() if call in names}
        run = run[~run.provider.isin(spared)]
        run = run.drop_duplicates("provider", keep="last").sort_values("median_us", kind="stable")
        if run.able.any():
            runs.setdefault((len(strongest - names - spared), not spared), []).append(run)
    later_first = runs[min(runs)][::-1]
    pairs = [(*_best_and_rival(run), run) for run in later_first]
    same_way = [pair for pair in pairs if pair[0].way == pairs[0][0].way]
    return min(same_way, key=lambda pair: _gain(pair[0], pair[1]))[2]


def _gain(best: pd.Series, rival: pd.Series | None) -> float:
    return float("inf") if rival is None else rival.median_us / best.median_us


def _best_and_rival(run: pd.DataFrame) -> tuple[pd.Series, pd.Series | None]:
    best = run[run.able].iloc[0]
    rivals = run[run.way != best.way].sort_values("able", ascending=False, kind="stable")
    return best, None if rivals.empty else rivals.iloc[0]


def _advice(B: int, run: pd.DataFrame) -> Advice:
    best, rival = _best_and_rival(run)
    near = run[run.able & (run.ci_lo_us <= best.ci_hi_us) & (run.provider != best.provider)]
    return Advice(
        b=B,
        best=best.provider,
        us=float(best.median_us),
        ties=tuple(near.provider),
        instead_of=None if rival is None else rival.provider,
        instead_us=None if rival is None else float(rival.median_us),
        folder=best.folder,
        extra_bytes=None if pd.isna(best.extra) else int(best.extra),
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
    plain = problem.device == "cuda" and problem.tp == 1 and not problem.filters
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
    options += [f"{name}={value!r}" for name, value in forced.items() if as_measured]
    text = ", ".join(dict.fromkeys(["hidden", *arguments, "seed=seed", "offset=step", *options]))
    if len(text) + len(call) > 65:
        text = "\n" + fill(text, 70, initial_indent="    ", subsequent_indent="    ") + "\n"
    python = f"from fsbench.kernels import {imports}\n{first}sample = {call}({text})"
    serve = f"FSBENCH_VLLM={plug_in} vllm serve MODEL"
    return {
        "python": python,
        "vllm": f"{serve} --tensor-parallel-size {problem.tp}" if sharded else serve,
    }
