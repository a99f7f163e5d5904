"""Export results as a tidy table with a dictionary, and problems in flashinfer-bench's format.

flashinfer-bench compares the output of a solution with that of a reference. Its problems are
decode steps whose tokens the noise contract defines; its solutions are the samplers that follow
this contract. The tokens of samplers with other noise cannot be compared.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

from fsbench.provider import Provider

ENVIRONMENT = (
    *("utc", "fsbench", "git_sha", "cpu", "driver", "cuda", "torch", "triton", "flashinfer"),
    *("transformers", "vllm", "xllamacpp"),
)
"""Fields of env.json that become columns of the table."""

_SHAPES = {"hidden": ["B", "D"], "weight": ["V", "D"], "seed": ["one"], "offset": ["one"]}
_TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_REFERENCE = """from fsbench import reference


def run(hidden, weight, seed, offset, temperature):
    logits = hidden.float() @ weight.float().T
    return reference.expect(logits, seed, offset, temperature, {noise!r}).tokens
"""
_SOLUTION = """from fsbench.discover import available, discover
from fsbench.problem import Problem

LAUNCHES = {{}}


def run(hidden, weight, seed, offset, temperature):
    key = (hidden.shape, weight.data_ptr(), temperature)
    if key not in LAUNCHES:
        (B, D), device = hidden.shape, weight.device.type
        problem = Problem(B, D, len(weight), {dtype!r}, temperature, device)
        LAUNCHES[key] = available(discover()[{name!r}], device).build(problem, weight)
    return LAUNCHES[key](hidden, seed, offset).long()
"""


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


def trace_set(frame: pd.DataFrame, samplers: Iterable[Provider]) -> Iterator[tuple[str, str]]:
    """Yield (path in flashinfer-bench's data set, text) for the problems without filters."""
    plain = (frame.top_k == 0) & (frame.top_p == 1) & (frame.min_p == 0) & (frame.history == 0)
    plain &= frame.weights == ""
    with_noise = [each for each in samplers if each.capabilities.noise]
    for (D, V, dtype), rows in frame[plain & (frame.tp == 1)].groupby(["d", "v", "dtype"]):
        steps = sorted(set(zip(rows.b.tolist(), rows.temperature.tolist(), strict=True)))
        for noise in ("token", "group"):
            name = f"lm_head_sampling_{noise}_d{D}_v{V}_{dtype}"
            yield f"definitions/lm_head_sampling/{name}.json", _definition(name, D, V, dtype, noise)
            lines = (_workload(name, B, T) for B, T in steps)
            yield f"workloads/lm_head_sampling/{name}.jsonl", "".join(lines)
            for each in with_noise:
                if each.capabilities.noise == noise and dtype in each.capabilities.dtypes:
                    path = f"solutions/lm_head_sampling/{name}/{each.name}.json"
                    yield path, _solution(name, each, dtype)


def _definition(name: str, D: int, V: int, dtype: str, noise: str) -> str:
    types = {
        **dict.fromkeys(_SHAPES, "int64"),
        **dict.fromkeys(("hidden", "weight"), _TYPES[dtype]),
    }
    inputs = {key: {"shape": shape, "dtype": types[key]} for key, shape in _SHAPES.items()}
    sizes = {"D": D, "V": V, "one": 1}
    definition = {
        "name": name,
        "op_type": "lm_head_sampling",
        "description": f"A token of softmax(hidden @ weight.T / T) for each row, by {noise} noise.",
        "axes": {"B": {"type": "var"}}
        | {key: {"type": "const", "value": int(value)} for key, value in sizes.items()},
        "inputs": {**inputs, "temperature": {"shape": None, "dtype": "float32"}},
        "outputs": {"tokens": {"shape": ["B"], "dtype": "int64"}},
        "reference": _REFERENCE.format(noise=noise),
    }
    return json.dumps(definition, indent=2)


def _workload(name: str, B: int, temperature: float) -> str:
    inputs: dict[str, Any] = {key: {"type": "random"} for key in _SHAPES}
    inputs["temperature"] = {"type": "scalar", "value": temperature}
    uuid = f"{name}-b{B}-t{temperature:g}"
    workload = {"axes": {"B": int(B)}, "inputs": inputs, "uuid": uuid}
    return json.dumps({"definition": name, "workload": workload}) + "\n"


def _solution(definition: str, sampler: Provider, dtype: str) -> str:
    source = _SOLUTION.format(name=sampler.name, dtype=dtype)
    solution = {
        "name": f"{definition}_{sampler.name}",
        "definition": definition,
        "author": "fsbench",
        "description": sampler.label,
        "spec": {
            "language": "python",
            "target_hardware": list(sampler.capabilities.devices),
            "entry_point": "main.py::run",
            "dependencies": ["fsbench"],
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": source}],
    }
    return json.dumps(solution, indent=2)
