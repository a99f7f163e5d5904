"""`fsbench audit`: every sampler that runs here, put to the proof; one table."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fsbench.cli.devices import device_to_use
from fsbench.cli.judging import Providers, RecordFile, Tier, judged, recorder
from fsbench.cli.options import PATH, Device, Dtype, Json, ProviderPath, Weights, argument
from fsbench.errors import ResultsError

TEMPERATURES = [1.0, 0.6]
"""Of a plain request, and of the default requests of Qwen3 and Llama 3."""


def audit(
    records: Annotated[
        list[Path] | None,
        argument("RECORDS", PATH, "Records of verify, or folders of some, in place of a new run."),
    ] = None,
    provider: Providers = None,
    provider_path: ProviderPath = None,
    tier: Tier = "ci",
    device: Device = "auto",
    dtype: Dtype = "bf16",
    weights: Weights = None,
    as_json: Json = False,
    output: RecordFile = None,
) -> None:
    """Say of every sampler that can run here what it claims, and what it was found to do.

    The battery of `fsbench verify` at the temperatures of engines, 1 and 0.6; then one table in
    Markdown: sampler, version of its package, claims, findings, how much, and the command that
    shows it. docs/audit.md says how to read it.

    Exit code 0 if nothing was found but what samplers declare, 1 for a bias, 5 for a defect.
    """
    from fsbench.records.verdicts import read_verdicts
    from fsbench.report.audit import EXIT_CODES, audited, markdown, worst

    lines: list[dict[str, Any]] = []
    if records:
        lines += read_verdicts(records)
        if not lines:
            raise ResultsError("RECORDS: expected records of fsbench verify; got none")
    else:
        from fsbench.discover import discover, select

        found = discover(provider_path or [])
        for name, checks, seconds in judged(
            select(found, provider) if provider else found.values(),
            named=bool(provider),
            device=device_to_use(device),
            dtype=dtype,
            weights=weights or "",
            temperatures=TEMPERATURES,
            tier=tier,
            record=recorder(output, lambda text: lines.append(json.loads(text))),
            skip=lambda reason: None,
        ):
            failed = sum(not check.passed for check in checks)
            said = f"{failed} of {len(checks)} checks failed; {seconds:.0f} s"
            print(f"{name}: {said}", file=sys.stderr, flush=True)
    samplers, skipped = audited(lines)
    if as_json:
        told = [{**asdict(each), "severity": each.severity} for each in samplers]
        print(json.dumps({"samplers": told, "skipped": skipped}, indent=2))
    else:
        print(markdown(samplers, skipped))
    if code := EXIT_CODES[worst(samplers)]:
        raise typer.Exit(code)
