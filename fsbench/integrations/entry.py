"""Entry point of vLLM's plug-in. It imports nothing that could fail.

vLLM ignores a plug-in that cannot be imported, and stops if `register` raises.
"""

from __future__ import annotations

import os

from fsbench import integrations


def register() -> None:
    """Call fsbench.integrations.vllm.register if the plug-in is switched on."""
    if os.environ.get("FSBENCH_VLLM") or os.environ.get("FSBENCH_VLLM_MARKS") == "1":
        integrations.vllm.register()
