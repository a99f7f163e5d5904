"""`fsbench e2e`: time per output token of a whole model, by sampler.

An engine (hf, vllm_engine) decodes, measure runs the samplers in turn, records stores the samples,
summary and tables derive the results.
"""

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.e2e import vllm_served as vllm_served
else:
    # It imports vLLM, which only the worker process does, after redirecting its output.
    __getattr__ = lazy_getattr(__name__, "vllm_served")
