"""Which cases of a test `make test` runs, and which `make test-all` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def full(*values: Any, **options: Any) -> Any:
    """A case for pytest.mark.parametrize that takes long: for make test-all only."""
    return pytest.param(*values, marks=pytest.mark.full, **options)


def first_quick(cases: Iterable[Any], quick: int = 1) -> list[Any]:
    """Return the cases of an argument; only the first `quick` are in make test."""
    return [case if number < quick else full(case) for number, case in enumerate(cases)]
