"""A results folder for the tests of what is read, written and refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from cells import CELL, MACHINE, OTHER

from fsbench.records.cell import Round
from fsbench.records.store import Store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three rounds of one cell and a status of another: four lines."""
    store = Store.create(tmp_path / "run", MACHINE)
    for number in range(3):
        store.append_round(CELL, number, Round([10.0 + number]))
    store.append_status(OTHER, "oom", "no memory left")
    store.close()
    return tmp_path / "run"
