"""Makes fake_vllm.py importable by name, with assertions rewritten."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
pytest.register_assert_rewrite("fake_vllm")
