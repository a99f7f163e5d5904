"""`fsbench recommend`: the fastest sampler for an LM head, from recorded results."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from string import ascii_lowercase
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

from fsbench.cli.options import (
    DISTRIBUTION,
    PATH,
    WORD,
    WORDS,
    DtypeOrDefault,
    Json,
    checked,
    number,
    option,
    whole,
)
from fsbench.cli.parsing import batch_range
from fsbench.cli.tables import console, table
from fsbench.errors import InvalidArgument, ResultsError, unknown_name
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsbench.provider import Provider
    from fsbench.report.recommend import Advice
    from fsbench.report.tables import Configuration

_SHORT = {
    "logprob": "logprob",
    "seed": "per_request_seed",
    "temperature": "per_row_temperature",
    "greedy": "greedy_rows",
    "mask": "mask",
    "bias": "bias",
    "samples": "num_samples",
}
_CAPABILITIES = [field.name for field in fields(Capabilities) if field.type == "bool"]


def recommend(
    model: Annotated[
        str | None, option("--model", WORD, "A named LM head; see `fsbench list`.")
    ] = None,
    d: Annotated[int | None, option("--d", whole(), "Or its hidden size D, with --v.")] = None,
    v: Annotated[int | None, option("--v", whole(), "And its vocabulary size V.")] = None,
    gpu: Annotated[str, option("--gpu", WORD, "The GPU, or cpu.")] = "h200",
    batch: Annotated[
        str,
        option(
            "--batch",
            checked("SIZES", batch_range),
            "Batch sizes: 1:256 for a range, or a comma list.",
        ),
    ] = "1:256",
    needs: Annotated[
        str | None,
        option(
            "--needs",
            WORDS,
            f"Required capabilities, comma list of {', '.join(_SHORT)}; or others of "
            "`fsbench list --capabilities`.",
        ),
    ] = None,
    top_k: Annotated[int, option("--top-k", whole(0), "Filter; 0 is off.")] = 0,
    top_p: Annotated[float, option("--top-p", number(0, 1, above=True), "Filter; 1 is off.")] = 1.0,
    min_p: Annotated[float, option("--min-p", number(0, 1), "Filter; 0 is off.")] = 0.0,
    temperature: Annotated[
        float, option("--temperature", number(0), "Temperature that was measured; 0 is greedy.")
    ] = 1.0,
    tp: Annotated[int, option("--tp", whole(1, 64), "GPUs that share the vocabulary.")] = 1,
    dtype: DtypeOrDefault = None,
    logits: Annotated[
        str | None,
        option("--logits", DISTRIBUTION, "Default: the distribution with the most cells."),
    ] = None,
    results: Annotated[
        list[Path] | None,
        option(
            "--results",
            PATH,
            "Results to read; may be repeated. Default: ./results and the results in fsbench.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the fastest sampler for an LM head, and how to call it. Needs no GPU.

    Times are from records of this size and these conditions; the times of a line are from one run,
    the latest with the strongest alternative. Without a record: the least time by the I/O model.
    """
    from fsbench.discover import discover
    from fsbench.report.recommend import calls, has_public_call
    from fsbench.report.recommend import recommend as advise

    shape = _shape(model, d, v)
    slug, device = ("", "cpu") if gpu == "cpu" else (gpu, "cuda")
    problem = Problem(
        1, *shape, dtype or ("fp32" if device == "cpu" else "bf16"), temperature, device, tp=tp,
        top_k=top_k, top_p=top_p, min_p=min_p, logits=logits or "normal:1",
    )  # fmt: skip
    required = _needs(needs) if needs else []
    batches = batch_range(batch, "--batch")
    entries = {name: entry for name, entry in discover().items() if entry.provider}
    samplers = {name: entry.provider for name, entry in entries.items() if entry.provider}
    missing = {
        name: [need for need in required if not getattr(sampler.capabilities, need)]
        for name, sampler in samplers.items()
    }
    public = {
        n for n, each in samplers.items() if has_public_call(each, entries[n].source, problem)
    }
    able = {name for name in public if not missing[name]}
    measured, sizes = _measured(results, slug, problem, logits)
    facts: dict[str, Any] = {
        "needs": required,
        "advice": [],
        "unmeasured": _unmeasured(batches, []),
    }
    if measured:
        advice = advise(measured, able, public, _forced(samplers))
        advice = [each for each in advice if each.b in batches]
        if not advice:
            raise ResultsError(
                f"recommend: no sampler that can do {', '.join(required) or 'this'} was "
                f"measured at these batch sizes; results have B = {_numbers(measured.measured.b)}"
            )
        names = measured.providers(measured.drawn)
        best = list(dict.fromkeys(each.best for each in advice))
        facts |= {
            "advice": [asdict(each) for each in advice],
            "unmeasured": _unmeasured(batches, [each.b for each in advice]),
            "configuration": [measured.title, measured.conditions],
            "runs": _runs({each.folder for each in advice}),
            "cannot": {name: missing[name] for name in names if missing.get(name)},
            "no_public_call": _faster_without_call(measured, advice, set(samplers) - public),
            "deviates": _deviations(samplers, best),
            "calls": {n: calls(samplers[n], entries[n].source, problem, required) for n in best},
        }
    else:
        kind = Kind.TRUNCATED if problem.filters else Kind.EXACT
        name = next(name for name, each in samplers.items() if each.call and each.kind is kind)
        facts |= {"sizes": sizes, **_floors(slug, problem, batches)}
        if reason := samplers[name].unsupported_reason(problem):
            raise ResultsError(f"recommend: expected what a sampler can do; {name} {reason}")
        call = calls(samplers[name], entries[name].source, problem, required, as_measured=False)
        facts["calls"] = {samplers[name].call: call}
    print(json.dumps(facts, indent=2)) if as_json else _print(facts)


def _shape(model: str | None, d: int | None, v: int | None) -> tuple[int, int]:
    """Return the requested (D, V)."""
    from fsbench.problem import model as head_of

    if model is not None and (d, v) == (None, None):
        return head_of(model).D, head_of(model).V
    if model is not None or d is None or v is None:
        options = {"--model": model, "--d": d, "--v": v}
        got = " ".join(f"{name} {value}" for name, value in options.items() if value is not None)
        raise InvalidArgument(f"--model: expected a model, or --d and --v; got {got or 'neither'}")
    return d, v


def _needs(text: str) -> list[str]:
    names = [_SHORT.get(name.strip(), name.strip()) for name in text.split(",")]
    for name in names:
        if name not in _CAPABILITIES:
            raise unknown_name("--needs", name, {*_CAPABILITIES, *_SHORT})
    return list(dict.fromkeys(names))


def _forced(samplers: dict[str, Provider]) -> dict[str, str]:
    """Return samplers that force a kernel of a call -> the sampler that leaves it to the call."""
    kernels = {n: getattr(s.sample, "keywords", {}).get("kernel") for n, s in samplers.items()}
    leaves = {samplers[n].call: n for n, kernel in kernels.items() if kernel == "auto"}
    return {
        n: leaves[samplers[n].call]
        for n, kernel in kernels.items()
        if kernel not in (None, "auto") and samplers[n].call in leaves
    }


def _faster_without_call(
    measured: Configuration, advice: list[Advice], hidden: set[str]
) -> dict[str, list[int]]:
    """Return samplers without a public call -> B at which they beat the advice in its run."""
    import pandas as pd

    rows = measured.rows.merge(pd.DataFrame(advice), on=["b", "folder"])
    rows = rows[rows.provider.isin(hidden) & (rows.kind == measured.drawn)]
    rows = rows[(rows.status == "ok") & (rows.median_us < rows.us)]
    return {str(name): same.b.unique().tolist() for name, same in rows.groupby("provider")}


def _measured(
    paths: list[Path] | None, gpu: str, problem: Problem, logits: str | None
) -> tuple[Configuration | None, list[str]]:
    """Return the configuration of a problem, of graph replays if there are; and all sizes."""
    from fsbench.cli.result_frames import by_time, read_results
    from fsbench.records.iomodel import gpu_slug
    from fsbench.records.store import folders_below, read_environment, shipped_results
    from fsbench.report.tables import configurations

    slug = gpu_slug(gpu)

    def may_fit(folder: Path) -> bool:
        name = read_environment(folder).get("gpu")
        return name is None or gpu_slug(str(name)) == slug

    if paths is None:
        paths = [path for path in (Path("results"), shipped_results()) if folders_below(path)]
    folders = list(filter(may_fit, by_time(paths)))
    if not folders:
        return None, []
    frame = read_results(folders)
    first_rows = [(each, each.rows.iloc[0]) for each in configurations(frame)]
    columns = ("d", "v", "dtype", "tp", "temperature", "top_k", "top_p", "min_p")
    expected = {name: getattr(problem, name.upper() if name in "dv" else name) for name in columns}
    fitting = [
        (bool(row.graph), len(each.measured), each)
        for each, row in first_rows
        if (row.gpu, row.device) == (slug, problem.device)
        and all(row[name] == value for name, value in expected.items())
        and row.logits == (logits or row.logits)
        and not (row.mixed or row.history or row.weights)
    ]
    sizes = {
        f"D={row.d} V={row.v} {row['dtype']}" + (f" TP={row.tp}" if row.tp > 1 else "")
        for _, row in first_rows
        if row.gpu == slug
    }
    best = max(fitting, key=lambda each: each[:2], default=(False, 0, None))
    return best[2], sorted(sizes)


def _runs(folders: set[str]) -> dict[str, dict[str, str]]:
    """Return the time, commit and version of Triton of each run, the earliest first."""
    from fsbench.records.store import read_environment

    records = {folder: read_environment(Path(folder)) for folder in folders}
    return {
        folder: {
            name: str(records[folder].get(name) or "?") for name in ("utc", "git_sha", "triton")
        }
        for folder in sorted(folders, key=lambda folder: str(records[folder].get("utc")))
    }


def _deviations(samplers: dict[str, Provider], names: list[str]) -> dict[str, str]:
    """Return the deviations that samplers declare."""
    deviations = {}
    for name in sorted(names):
        able = samplers[name].capabilities
        if able.known_deviation:
            distance = f"total variation of {able.known_deviation:g}"
            deviations[name] = f"{distance} from the exact distribution"
        elif able.exact_to_gap is not None:
            error = "too rarely or too often" if able.excess_beyond_gap else "too rarely"
            deviations[name] = f"tokens less likely than e^-{able.exact_to_gap:g} are drawn {error}"
    return deviations


def _floors(gpu: str, problem: Problem, batches: range | list[int]) -> dict[str, Any]:
    """Return the least times that the I/O model allows, and the command that measures."""
    from fsbench.records import iomodel

    options = [f"--d {problem.D} --v {problem.V} --dtype {problem.dtype}"]
    options += [f"--{name.replace('_', '-')} {getattr(problem, name)}" for name in problem.filters]
    options += [f"--temperature {problem.temperature:g}"] if problem.temperature != 1 else []
    options += [f"--tp {problem.tp}"] if problem.tp > 1 else []
    options += [f"--logits {problem.logits}"] if problem.logits != "normal:1" else []
    measure = f"fsbench run --device {problem.device} {' '.join(options)}"
    if problem.device == "cpu":
        raise ResultsError(f"--gpu cpu: expected results of this size; got none. Run: {measure}")
    if isinstance(batches, range):
        batches = sorted({batches[0], batches[-1], *(B for B in batches if B & (B - 1) == 0)})
    chip = iomodel.gpu(gpu)
    floors = {B: iomodel.floor_us(replace(problem, B=B), chip.slug) for B in batches}
    return {"gpu": chip.slug, "floors_us": floors, "measure": measure}


def _unmeasured(batches: range | list[int], measured: list[int]) -> str:
    """Return the requested batch sizes that were not measured as text."""
    if isinstance(batches, range):
        missing = len(batches) - len(set(measured))
        return f"{missing} of these {len(batches)} batch sizes" if missing else ""
    others = [B for B in batches if B not in measured]
    return f"B = {_numbers(others)}" if others else ""


def _numbers(values: Any) -> str:
    return ", ".join(map(str, sorted(set(values))))


def _print(facts: dict[str, Any]) -> None:
    print_ = console(soft_wrap=False).print
    if "floors_us" in facts:
        print_(
            f"No record of this size and these conditions on {facts['gpu']}. The least time of a "
            "fused sampler by the I/O model and the datasheet; this is not a measurement:"
        )
        floors = [{"b": B, "floor": floor} for B, floor in facts["floors_us"].items()]
        print_(table([("B", "{b}"), ("floor, us", "{floor:.1f}")], floors))
        print_(f"to measure: {facts['measure']}")
        print_(f"measured on {facts['gpu']}: {'; '.join(facts['sizes']) or 'nothing'}")
    else:
        _print_measured(facts, print_)
    calls: dict[tuple[str, str], list[str]] = {}
    for name, call in facts["calls"].items():
        calls.setdefault((call["python"], call.get("vllm", "")), []).append(name)
    for (python, vllm), names in calls.items():
        print_(f"\nIn Python, {', '.join(names)}:\n" + indent(python, "  "))
        if vllm:
            print_(f"In vLLM, where docs/guide/vllm.md says so:\n  {vllm}")
    if facts["needs"]:
        print_("\nNo time is with --needs; docs/guide/sampling.md says what options cost.")


def _print_measured(facts: dict[str, Any], print_: Callable[..., None]) -> None:
    for line in facts["configuration"]:
        print_(line)
    runs = dict(zip(facts["runs"], ascii_lowercase, strict=False))
    columns = [
        *(("B", "{b}"), ("use", "{best:<}"), ("us", "{us:.1f}"), ("instead of", "{instead_of:<}")),
        *(("us", "{instead_us:.1f}"), ("saves", "{saves:.1%}"), ("run", "{run:<}")),
    ]
    rows: list[dict[str, Any]] = []
    ties: dict[str, list[int]] = {}
    memory: dict[str, int] = {}
    missing: dict[str, list[str]] = {}
    for each in facts["advice"]:
        us, mark = each["instead_us"], "*" if each["instead_of"] in facts["cannot"] else ""
        derived = {"saves": us and 1 - each["us"] / us, "run": runs.get(each["folder"])}
        rows.append({**each, **derived, "instead_of": us and each["instead_of"] + mark})
        for name in each["ties"]:
            ties.setdefault(name, []).append(each["b"])
        if each["extra_bytes"] is not None:
            memory[each["best"]] = max(each["extra_bytes"], memory.get(each["best"], 0))
    for name, needs in facts["cannot"].items():
        missing.setdefault(", ".join(needs), []).append(name)
    alone = [each["b"] for each in facts["advice"] if each["instead_of"] is None]
    print_(table(columns, rows, padding=0))
    for folder, letter in runs.items():
        run = facts["runs"][folder]
        when, commit = run["utc"][:16].replace("T", " "), run["git_sha"][:7]
        triton = f", Triton {run['triton']}" if run["triton"] != "?" else ""
        print_(f"run {letter}: {Path(folder).name}, {when} UTC, commit {commit}{triton}")
    notes = {
        "as fast, as the intervals overlap": [f"{n} at B = {_numbers(B)}" for n, B in ties.items()],
        "peak memory in addition to weight and hidden": [
            f"{name} {most / 1e6:.0f} MB" for name, most in memory.items()
        ],
        "faster, without a public call": [
            f"{n} at B = {_numbers(B)}" for n, B in facts["no_public_call"].items()
        ],
        "not considered (*: only to compare with)": [
            f"{', '.join(names)}, without {n}" for n, names in missing.items()
        ],
        "not exact": [f"{name}, {error}" for name, error in facts["deviates"].items()],
        "nothing else was measured": [f"B = {_numbers(alone)}"] if alone else [],
        "not measured": [facts["unmeasured"]] if facts["unmeasured"] else [],
    }
    for heading, items in notes.items():
        if items:
            print_(f"{heading}: {'; '.join(items)}")
