"""A cell and its columns, which are the only place where the fields of Problem are listed."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from cells import cell

from fsbench.problem import Problem
from fsbench.records.cell import COLUMNS, Cell, Conditions


def test_columns_and_back():
    problem = Problem(3, 4, 5, "fp16", 0.5, top_k=7, top_p=0.9, mixed=True, tp=2)
    one = Cell("p", "P", "truncated", False, Conditions("GPU", "events", True, "warm"), problem)
    columns = one.columns()
    assert tuple(columns) == COLUMNS
    assert columns["b"] == 3 and columns["top_k"] == 7 and columns["l2"] == "warm"
    assert Cell.from_columns(columns) == one and Cell.from_columns(columns).label == "P"


def test_every_field_is_a_column_and_none_hides_another():
    names = [each.name.lower() for kind in (Conditions, Problem) for each in fields(kind)]
    assert ("provider", "label", "kind", "fused", *names) == COLUMNS
    assert len(set(COLUMNS)) == len(COLUMNS)


def test_the_label_is_not_part_of_the_identity():
    assert cell(label="new") == cell() and hash(cell(label="new")) == hash(cell())
    assert replace(cell(), fused=False) != cell() != cell(b=9)


def test_columns_from_before_filters_and_penalties():
    old = {name: value for name, value in cell().columns().items() if name != "history"}
    del old["top_k"]
    assert Cell.from_columns(old) == cell()


@pytest.mark.parametrize("changes", [{"b": 0}, {"color": "red"}, {"dtype": "int3"}])
def test_columns_of_no_cell_are_refused(changes):
    with pytest.raises((TypeError, ValueError)):
        cell(**changes)
    with pytest.raises(TypeError):
        Cell.from_columns(
            {name: value for name, value in cell().columns().items() if name != "timer"}
        )
