"""SGLang's sampler with its FlashInfer backend, by its own functions (written for 0.5.23).

    fp32, / T in place, softmax; plain: torch.multinomial; filters: FlashInfer, both at once

These are the calls of `Sampler.forward` on CUDA, in its order; the object itself asks for the whole
server's state. Min-p takes a renormalisation by top-k, one by top-p, and FlashInfer's min-p. Seeds
of requests are for SGLang's other backend. The noise is torch's generator, which the host reads in
every launch of FlashInfer. Not run yet: held to the source of SGLang by `make check-engines`.

Undefined rows: SGLang replaces NaN before it samples, which is left out here; as `multinomial`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.baselines.providing.logits import matmul_logits
from fsbench.problem import FILTERS, Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, padded

if TYPE_CHECKING:
    from torch import Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    import torch
    from sglang.srt.layers import sampler as engine

    V, device = problem.V, weight.device
    k, p, min_p = zip(*problem.row_filters(), strict=True)
    temperatures = torch.full((problem.B, 1), problem.temperature, device=device)
    top_ks = torch.tensor([own or V for own in k], dtype=torch.int32, device=device)
    top_ps, min_ps = (torch.tensor(own, dtype=torch.float32, device=device) for own in (p, min_p))
    weight = padded(weight)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        logits = matmul_logits(hidden, weight, V).float()
        logits.div_(temperatures)
        logits[:] = engine.sampler_softmax(logits)
        if not problem.filters:
            tokens: Tensor = engine.sampling_from_probs_torch(
                logits, sampling_seed=None, positions=None
            )
        elif any(min_p):
            probs = engine.top_k_renorm_prob(logits, top_ks)
            probs = engine.top_p_renorm_prob(probs, top_ps)
            tokens = engine.min_p_sampling_from_probs(probs, min_ps)
        else:
            tokens = engine.top_k_top_p_sampling_from_probs(
                logits.contiguous(), top_ks, top_ps, filter_apply_order="joint"
            )
        return tokens

    return launch


PROVIDER = Provider(
    name="sglang_flashinfer",
    label="SGLang, FlashInfer",
    kind=Kind.EXACT,
    build=build,
    requires=("sglang", "sgl_kernel", "flashinfer"),
    capabilities=Capabilities(
        dtypes=("bf16", "fp16", "fp32"),
        graph_safe=False,
        exact_to_gap=10.0,  # of torch's exponential: docs/exactness.md
        excess_beyond_gap=0.2,
        filters=FILTERS,
        mixed_filters=True,
        filter_order=("temperature", "top_p", "top_k", "min_p"),
        ties="kept",
    ),
)
