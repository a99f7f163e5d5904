"""Makes fake_vllm.py importable by name, with assertions rewritten, and installs it."""

import pytest

pytest.register_assert_rewrite("fake_vllm")


@pytest.fixture
def vllm(monkeypatch):
    """The fake in vLLM's place, and nothing asked of the plug-in."""
    from fake_vllm import install

    monkeypatch.delenv("FSBENCH_VLLM", raising=False)
    monkeypatch.delenv("FSBENCH_VLLM_MARKS", raising=False)
    return install(monkeypatch)
