"""`fsbench verify`: does a sampler draw what it should?"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fsbench.cli.devices import device_to_use
from fsbench.cli.judging import Providers, RecordFile, Tier, judged, recorder
from fsbench.cli.options import WORD, Device, Dtype, Json, ProviderPath, Weights, number, option
from fsbench.cli.tables import plain_table

if TYPE_CHECKING:
    from rich.table import Table

    from fsbench.verify.check import Check


def verify(
    provider: Providers = None,
    provider_path: ProviderPath = None,
    tier: Tier = "ci",
    check: Annotated[
        list[str] | None,
        option("--check", WORD, "Run only this check, such as tail; may be repeated."),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "bf16",
    weights: Weights = None,
    temperature: Annotated[
        list[float] | None,
        option(
            "--temperature",
            number(0, above=True),
            "Temperature > 0 of the sampled checks; given twice, each has about half of them. "
            "Default: 1.3 and 0.7.",
        ),
    ] = None,
    as_json: Json = False,
    output: RecordFile = None,
) -> None:
    """Judge samplers by a battery of tests, each with its power.

    Token by token against the oracle, where a sampler follows the documented
    noise; edge shapes, filters, and what a token must not depend on; the
    distribution of one row, out to its far tail; the independence of rows,
    steps, seeds and samples. docs/exactness.md says what each check sees, and
    what none can. An honest sampler fails with probability 1e-6; seeds are fixed.

    Verdicts: ok; not exact, where a sampler declares that it deviates and keeps
    to that; FAILED. At the end a sentence about each sampler: passed, or rejected
    and why. Exit code 1 if a check failed, 4 if a sampler that was asked for by
    name cannot run here.
    """
    from rich.console import Console

    from fsbench.discover import discover, select
    from fsbench.verify.check import TEMPERATURES, conclusion

    found = discover(provider_path or [])
    temperatures = temperature or [*TEMPERATURES]
    console = Console(highlight=False, stderr=as_json)

    def say(reason: str) -> None:
        if not as_json:
            console.print(f"not checked: {reason}", markup=False)

    device = device_to_use(device)
    at = " and ".join(f"{T:g}" for T in temperatures)
    conclusions, passed = {}, True
    for name, checks, seconds in judged(
        select(found, provider) if provider else found.values(),
        named=bool(provider),
        device=device,
        dtype=dtype,
        weights=weights or "",
        temperatures=temperatures,
        tier=tier,
        only=check or (),
        record=recorder(output, partial(print, flush=True) if as_json else None),
        skip=say,
    ):
        if not as_json:
            title = f"{name}: {device}, {dtype}, T = {at}; {seconds:.0f} s"
            console.print(_table(title, checks))
        conclusions[name] = conclusion(checks)
        passed &= all(done.passed for done in checks)
    for name, sentence in conclusions.items():
        console.print(f"{name} {sentence}.", markup=False, soft_wrap=True)
    if not passed:
        raise typer.Exit(1)


def _table(title: str, checks: list[Check]) -> Table:
    table = plain_table(title, title_justify="center", padding=(0, 1, 0, 0))
    for column in ("check", "verdict", "draws", "p", "seen", "would find"):
        table.add_column(column, overflow="fold")
    for done in checks:
        table.add_row(
            done.name,
            done.verdict,
            _short(done.draws),
            "" if done.p_value is None else f"{done.p_value:.2g}",
            escape(done.detail),
            escape(done.detects or ""),
        )
    return table


def _short(draws: int) -> str:
    return str(draws) if draws < 10**6 else f"{draws:.1e}"
