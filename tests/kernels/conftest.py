"""Lets the tests of this folder import the helpers next to them."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
pytest.register_assert_rewrite("flash_sample_cases")
