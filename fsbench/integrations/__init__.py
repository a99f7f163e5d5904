"""flash_sample inside serving engines, without a change to the engine's source.

Any engine:

draw                  LM head and sampling of one decode step, with any sampler
draw_kinds            the kinds of draws, so that their kernels can be compiled ahead
compile_ahead         compiles the kernels in other processes while the model loads
graphed               replays draws as CUDA graphs
routing               chooses the sampler of each row
decode_loop           decodes with transformers, with or without drafts

vLLM, in the order of a request:

entry                 the entry point that vLLM calls
vllm                  installs the hooks
vllm_expected         checks that vLLM has what the plug-in uses
vllm_0_26             reads and fills the fields of this version
vllm_runner           the plug-in in one model runner
vllm_head             finds the LM head and checks that logits are its matmul
vllm_batch            samples a batch: groups its rows, and joins the results
vllm_parts            makes batches of some rows, or of one request per row of drafts

May import: fsbench.kernels as any user does, machine, the contract with discover.
"""

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.integrations import vllm as vllm
else:
    # vLLM imports the entry point in every process, whether the plug-in is switched on or not.
    __getattr__ = lazy_getattr(__name__, "vllm")
