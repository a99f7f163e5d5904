"""flash_sample inside serving engines, without a change to the engine's source.

vLLM calls entry. vllm installs the hooks, routing chooses each row's sampler, vllm_batch joins a
batch, vllm_parts splits one with drafts, vllm_<version> knows the engine's fields, draw and graphed
draw, decode_loop decodes with transformers. May import: fsbench.kernels as any user does, machine,
the contract with discover.
"""

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.integrations import vllm as vllm
else:
    # vLLM imports the entry point in every process, whether the plug-in is switched on or not.
    __getattr__ = lazy_getattr(__name__, "vllm")
