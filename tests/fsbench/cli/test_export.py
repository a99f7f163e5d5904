"""`fsbench export`: a tidy table and its dictionary."""

from __future__ import annotations

import pandas as pd
import pytest
from tree import H200
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.report.export import dictionary, tidy

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
    assert len(list(tmp_path.iterdir())) == 2


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
