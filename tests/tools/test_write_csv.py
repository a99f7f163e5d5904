"""tools/write_csv.py: rows are kept as they come, next to the environment."""

from __future__ import annotations

import json

import pytest
from write_csv import write_csv


def test_a_run_that_fails_leaves_its_rows_and_its_environment(tmp_path):
    path = tmp_path / "new" / "times.csv"

    def rows():
        yield "a", 1
        assert path.read_text() == "name,value\na,1\n"
        yield "b", 2
        raise RuntimeError("the GPU was taken away")

    with pytest.raises(RuntimeError, match="taken away"):
        write_csv(path, ("name", "value"), rows(), "cpu")
    assert path.read_text() == "name,value\na,1\nb,2\n"
    assert json.loads((path.parent / "times.env.json").read_text())["device"] == "cpu"
