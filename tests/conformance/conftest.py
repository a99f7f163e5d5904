"""What tests of samplers share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def eager(monkeypatch):
    """Compiled samplers without the compiler: their logic at many shapes in little time."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
