"""`fsbench e2e`: time per output token of a whole model, with one sampler or another in it.

An engine (hf, vllm_engine) decodes, measure asks it in turn for each sampler, records keeps what it
said, summary and tables make of that what one reads.
"""

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.e2e import vllm_served as vllm_served
else:
    # It imports vLLM, which only the worker process does, once it has redirected its output.
    __getattr__ = lazy_getattr(__name__, "vllm_served")
