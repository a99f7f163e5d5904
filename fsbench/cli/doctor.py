"""`fsbench doctor`: what this machine lacks, and the command that fixes it."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.text import Text

from fsbench.cli.options import Json
from fsbench.errors import DeviceUnavailable

_STYLES = {"ok": "green", "missing": "bold red", "warning": "yellow"}


def doctor(as_json: Json = False) -> None:
    """Check what `fsbench run` needs on this machine, and print the fix of what is missing.

    Exit code 0 if anything can be measured here, if only on the CPU; 4 if nothing can.
    """
    from fsbench.cli.diagnosis import can_run, diagnose

    checks, usable = diagnose(), can_run()
    if as_json:
        found = {"can_run": usable, "checks": [asdict(check) for check in checks]}
        print(json.dumps(found, indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for check in checks:
            line = Text.assemble(
                (f"{check.status:<8}", _STYLES[check.status]), f"{check.name:<12}{check.detail}"
            )
            if check.fix:
                line.append(f"  ->  {check.fix}", style="bold")
            console.print(line)
    if not usable:
        raise typer.Exit(DeviceUnavailable.exit_code)
