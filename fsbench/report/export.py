"""Export results as a tidy table with a dictionary of its columns."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

ENVIRONMENT = (
    *("utc", "fsbench", "git_sha", "cpu", "driver", "cuda", "torch", "triton", "flashinfer"),
    *("transformers", "vllm", "xllamacpp"),
)
"""Fields of env.json that become columns of the table."""


def tidy(frame: pd.DataFrame, environments: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Add the machine and versions to each row of results. environments: env.json by folder."""
    records = [environments[folder] for folder in frame.folder]
    columns = {name: [each.get(name) for each in records] for name in ENVIRONMENT}
    runs = [Path(folder).name for folder in frame.folder]
    return frame.drop(columns="folder").assign(run=runs, **columns)


def dictionary(columns: Iterable[str]) -> pd.DataFrame:
    """Return the meaning of each column of the table."""
    text = (resources.files("fsbench.records") / "words.toml").read_text(encoding="utf-8")
    words = tomllib.loads(text)
    meanings = words["environment"] | words["results"] | words["cell"] | {"run": "Results folder."}
    rows = [(name, meanings[name].replace("`", "")) for name in columns]
    return pd.DataFrame(rows, columns=["column", "meaning"])
