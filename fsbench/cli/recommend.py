"""`fsbench recommend`: which sampler to use for a model, from results that are at hand."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fsbench.cli.options import PATH, WORD, WORDS, Dtype, Json, checked, number, option
from fsbench.cli.parsing import batch_range
from fsbench.cli.tables import console, plain_table
from fsbench.errors import ResultsError, unknown_name
from fsbench.provider import Capabilities, Kind

if TYPE_CHECKING:
    from fsbench.analysis.tables import Configuration
    from fsbench.provider import Provider

_SHORT = {"seed": "per_request_seed", "temperature": "per_row_temperature", "greedy": "greedy_rows"}
_KNOWN = [field.name for field in fields(Capabilities) if field.type == "bool"]


def recommend(
    model: Annotated[str, option("--model", WORD, "A named LM head; see `fsbench list`.")],
    gpu: Annotated[str, option("--gpu", WORD, "The GPU that results must be of.")] = "h200",
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
            "--needs", WORDS, "What it must be able to do, comma list: logprob, seed, mask, ..."
        ),
    ] = None,
    dtype: Dtype = "bf16",
    memory: Annotated[
        float | None,
        option("--memory", number(0), "The most GB that it may take beside weight and hidden."),
    ] = None,
    results: Annotated[
        list[Path] | None,
        option("--results", PATH, "Results to read; may be repeated. Default: results."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Which exact sampler is fastest for a model on a GPU, and what it saves. Needs no GPU.

    Nothing is extrapolated: it tells what was measured at this model's size and conditions, names
    the samplers that cannot do what is needed, and says what it does not know.
    """
    from fsbench.analysis.recommend import recommend as advise
    from fsbench.discover import discover
    from fsbench.problem import model as head_of
    from fsbench.records import iomodel

    wanted = _needs(needs) if needs else []
    head, slug = head_of(model), iomodel.gpu_slug(gpu)
    batches = batch_range(batch, "--batch")
    known = {entry.name: entry.provider for entry in discover().values() if entry.provider}
    lacking = {
        name: [need for need in wanted if not getattr(provider.capabilities, need)]
        for name, provider in known.items()
    }
    able = {name for name in known if not lacking[name]}
    configuration = _measured(results or [Path("results")], slug, head.D, head.V, dtype, model)
    most = float("inf") if memory is None else memory * 1e9
    advice = [each for each in advise(configuration, able, most) if each.b in batches]
    if not advice:
        raise ResultsError(
            f"recommend: no exact sampler that can do {', '.join(wanted) or 'this'} "
            f"{'' if memory is None else f'in {memory:g} GB beside the weight '}was measured "
            f"at these batch sizes; results have B = {_numbers(configuration.measured.b)}"
        )
    exact = configuration.providers(Kind.EXACT)
    facts: dict[str, Any] = {
        "configuration": f"{configuration.title}; {configuration.conditions}",
        "advice": [asdict(each) for each in advice],
        "labels": {name: configuration.label(name) for name in exact},
        "cannot": {name: lacking[name] for name in exact if lacking.get(name)},
        "deviates": _deviations(known, {each.best for each in advice}),
        "unmeasured": _unmeasured(batches, [each.b for each in advice]),
    }
    print(json.dumps(facts, indent=2)) if as_json else _print(facts)


def _needs(text: str) -> list[str]:
    names = [_SHORT.get(name.strip(), name.strip()) for name in text.split(",")]
    for name in names:
        if name not in _KNOWN:
            raise unknown_name("--needs", name, [*_KNOWN, *_SHORT])
    return list(dict.fromkeys(names))


def _measured(
    paths: list[Path], slug: str, D: int, V: int, dtype: str, model: str
) -> Configuration:
    """The configuration of this size, timed as engines run: from a graph, T = 1."""
    from fsbench.analysis.tables import configurations
    from fsbench.cli.reading import read_results

    found = [(each, each.rows.iloc[0]) for each in configurations(read_results(paths))]
    wanted = (slug, D, V, dtype, 1, 1.0)
    fitting = [
        (bool(row.graph), len(each.measured), each)
        for each, row in found
        if (row.gpu, row.d, row.v, row["dtype"], row.tp, row.temperature) == wanted
    ]
    if not fitting:
        sizes = {f"{row.gpu or 'cpu'} D={row.d} V={row.v} {row['dtype']}" for _, row in found}
        raise ResultsError(
            f"--gpu: expected results of {model} (D={D} V={V} {dtype}); got none of {slug}; they "
            f"have {'; '.join(sorted(sizes)) or 'nothing'}. To measure it: fsbench run "
            f"--preset lean --model {model} --dtype {dtype}"
        )
    return max(fitting, key=lambda each: each[:2])[2]


def _deviations(known: dict[str, Provider], names: set[str]) -> dict[str, str]:
    """What the recommended samplers themselves declare to be inexact."""
    told = {}
    for name in sorted(names & set(known)):
        able = known[name].capabilities
        if able.known_deviation:
            told[name] = f"total variation of {able.known_deviation:g} from the exact law"
        elif able.exact_to_gap is not None:
            how = "too rarely or too often" if able.excess_beyond_gap else "too rarely"
            told[name] = f"tokens less likely than e^-{able.exact_to_gap:g} are drawn {how}"
    return told


def _unmeasured(batches: range | list[int], measured: list[int]) -> str:
    """The batch sizes asked for that nobody measured, in words."""
    if isinstance(batches, range):
        missing = len(batches) - len(set(measured))
        return f"{missing} of these {len(batches)} batch sizes" if missing else ""
    others = [B for B in batches if B not in measured]
    return f"B = {_numbers(others)}" if others else ""


def _numbers(values: Any) -> str:
    return ", ".join(map(str, sorted(set(values))))


def _print(facts: dict[str, Any]) -> None:
    label = facts["labels"]
    table = plain_table()
    for heading in ("B", "use", "us", "takes MB", "as fast", "instead of", "saves us", "saves"):
        right = heading in ("B", "us", "takes MB", "saves us", "saves")
        table.add_column(heading, justify="right" if right else "left")
    for each in facts["advice"]:
        saved = each["saved_us"]
        table.add_row(
            str(each["b"]),
            label[each["best"]],
            f"{each['us']:.1f}",
            "-" if each["extra_bytes"] is None else f"{each['extra_bytes'] / 1e6:.0f}",
            ", ".join(label[name] for name in each["ties"]),
            label.get(each["instead_of"], "-"),
            "-" if saved is None else f"{saved:.1f}",
            "-" if saved is None else f"{saved / (each['us'] + saved):.1%}",
        )
    print_ = console().print
    print_(facts["configuration"])
    print_(table)
    for name, needs in facts["cannot"].items():
        print_(f"not considered: {label[name]}, without {', '.join(needs)}")
    for name, what in facts["deviates"].items():
        print_(f"not exact: {label.get(name, name)}: {what}")
    if facts["unmeasured"]:
        print_(f"not measured: {facts['unmeasured']}")
    print_(
        "MB: the peak beside weight and hidden, with copies of the weight (--memory sets a limit). "
        "Times are of plain sampling; docs/using-the-kernel.md tells what options of the fused "
        "kernel cost. What they cost the others was not measured."
    )
