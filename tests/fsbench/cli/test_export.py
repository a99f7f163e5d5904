"""`fsbench export`: a tidy table, its dictionary, and a data set in flashinfer-bench's format."""

from __future__ import annotations

import json
import types

import pandas as pd
import pytest
import torch
from cells import results_row
from planted_calls import contract
from tree import H200
from typer.testing import CliRunner

from fsbench import discover
from fsbench.cli import app
from fsbench.report.export import dictionary, tidy, trace_set
from fsbench.report.tables import normalized

RUN = "paper-20261123"


def test_of_committed_results(tmp_path):
    done = CliRunner().invoke(app, ["export", str(H200 / RUN), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    table = pd.read_csv(tmp_path / "results.csv", keep_default_na=False)
    source = pd.read_csv(H200 / RUN / "results.csv")
    assert len(table) == len(source) and set(table.run) == {RUN}
    assert set(table.git_sha) == {"2b757e565f"} and set(table.flashinfer) == {"0.6.9"}
    columns = pd.read_csv(tmp_path / "columns.csv")
    assert list(columns.column) == list(table) and columns.meaning.str.len().min() > 3
    names = {path.name for path in (tmp_path / "flashinfer-bench").rglob("*.json*")}
    assert "lm_head_sampling_group_d4096_v151936_bf16.jsonl" in names
    assert "flash_sampling.json" in names and "multinomial.json" not in names


def test_a_column_without_words_is_an_error():
    with pytest.raises(KeyError, match="no_such"):
        dictionary(["b", "no_such"])


def test_rows_of_two_runs_have_their_own_versions():
    frame = pd.DataFrame([{"b": 1, "folder": "x/one"}, {"b": 2, "folder": "x/two"}])
    table = tidy(frame, {"x/one": {"torch": "2.11"}, "x/two": {"torch": "2.13"}})
    assert table[["b", "run", "torch", "vllm"]].values.tolist() == [
        [1, "one", "2.11", None],
        [2, "two", "2.13", None],
    ]


@pytest.fixture
def files():
    rows = [results_row("ours", b, 9.0, d=64, v=300, dtype="fp32") for b in (1, 4)]
    rows.append(results_row("ours", 8, 9.0, d=64, v=300, dtype="fp32", top_k=5))
    return dict(trace_set(normalized(pd.DataFrame(rows)), [contract()]))


def test_workloads_are_the_plain_problems(files):
    (text,) = [text for path, text in files.items() if path.endswith("group_d64_v300_fp32.jsonl")]
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["workload"]["axes"] for line in lines] == [{"B": 1}, {"B": 4}]
    assert lines[0]["workload"]["inputs"]["temperature"] == {"type": "scalar", "value": 1.0}


def test_the_solution_gives_the_tokens_of_the_reference(files, monkeypatch):
    """Both run from the texts that are exported, with the inputs in the definition's order."""
    names = [path for path in files if "group" in path and path.endswith(".json")]
    definition, solution = (json.loads(files[path]) for path in sorted(names))
    assert solution["definition"] == definition["name"]
    assert list(definition["inputs"]) == ["hidden", "weight", "seed", "offset", "temperature"]
    entry = discover.Found("contract", "here", contract())
    monkeypatch.setattr(discover, "discover", lambda: {"contract": entry})
    hidden, weight = torch.randn(4, 64), torch.randn(300, 64) / 8
    inputs = (hidden, weight, torch.tensor([5]), torch.tensor([2**40]), 0.5)
    tokens = []
    for text in (definition["reference"], solution["sources"][0]["content"]):
        module = types.ModuleType("main")
        exec(text, vars(module))
        tokens.append(module.run(*inputs))
    assert torch.equal(*tokens) and tokens[0].dtype == torch.int64
