"""The source of a sampler for tests: an argmax, with what is put into it."""

from __future__ import annotations

SOURCE = '''
"""A sampler that is not shipped."""
import os, signal, sys, time
from pathlib import Path
from fsbench.provider import Capabilities, Kind, Provider

def build(problem, weight):
    {build}
    step = 0

    def launch(hidden, seed, offset):
        nonlocal step
        step += 1
        {launch}
        return (hidden @ weight.T).{draw}

    launch.config = {config}
    return launch

PROVIDER = Provider(
    name="{name}", label="{name}", kind=Kind.{kind}, build=build,
    supports=lambda problem: {supports},
    capabilities=Capabilities(devices=("cpu",), dtypes=("fp32",), zero_temperature={zero}),
)
'''


def plug_in(
    name: str = "mine",
    *,
    build: str = "pass",
    launch: str = "pass",
    draw: str = "argmax(1)",
    config: str = "''",
    kind: str = "GREEDY",
    supports: str = "None",
    zero: bool = True,
) -> str:
    """Source with one line of Python for each part; `step` counts launches from 1."""
    parts = dict(build=build, launch=launch, draw=draw, config=config, kind=kind)
    return SOURCE.format(name=name, supports=supports, zero=zero, **parts)
