"""The entry point of vLLM's plug-in. It imports nothing that could fail.

vLLM logs an error on importing a plug-in and goes on without it; one that register raises stops it.
"""

from __future__ import annotations

import os

from fsbench import integrations


def register() -> None:
    """See fsbench.integrations.vllm.register. Nothing is imported unless it is switched on."""
    if os.environ.get("FSBENCH_VLLM") or os.environ.get("FSBENCH_VLLM_MARKS") == "1":
        integrations.vllm.register()
