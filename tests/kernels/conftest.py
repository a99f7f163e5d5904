"""Fixtures for calls like an earlier one, which go past the checks."""

from __future__ import annotations

import pytest
from repeating import Checked

from fsbench.kernels.call import repeated


@pytest.fixture
def nothing_known(monkeypatch):
    monkeypatch.setattr(repeated, "_launches", {})


@pytest.fixture
def checks_raise(request, monkeypatch):
    """From the moment that it is called, the function that the test module names in CHECKS."""

    def checked(*arguments, **options):
        raise Checked

    return lambda: monkeypatch.setattr(request.module.CHECKS, checked)
