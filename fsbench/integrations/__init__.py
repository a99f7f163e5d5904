"""flash_sample inside serving engines, no change to the engine's source.

entry is what vLLM calls, vllm has the hooks, routing decides who draws a row, vllm_batch puts a
batch together, vllm_parts takes one with drafts apart, vllm_<version> knows the engine's fields,
draw and graphed draw. May import: fsbench.kernels as any user does, machine, the contract with
discover.
"""

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.integrations import vllm as vllm
else:
    # The entry point is imported in every process of vLLM, switched on or not.
    __getattr__ = lazy_getattr(__name__, "vllm")
