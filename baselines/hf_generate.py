"""The sampling of Hugging Face's `generate`: its logits processors, then torch.multinomial.

    fp32, / T, top-k, top-p, min-p, softmax, multinomial

The processors are transformers' own classes, in the list and the order in which `generate` puts
them, without filters that are off, as there. All rows have the same filters. T = 0 is the argmax,
`generate` without `do_sample`. All logits equal to the kth are kept; torch.sort decides which of
equal ones top-p cuts. The noise is torch's generator, and ends where that of
`multinomial` ends.

Undefined rows: as `multinomial`.
"""

from __future__ import annotations

from dataclasses import replace

from fsbench.baselines.providing.logits import TORCH_NOISE, matmul_logits
from fsbench.problem import FILTERS, Problem
from fsbench.provider import Kind, Launch, Provider, Tensor, padded


def build(problem: Problem, weight: Tensor) -> Launch:
    import torch
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList()
    sampled = problem.temperature > 0
    if sampled and problem.temperature != 1:
        processors.append(TemperatureLogitsWarper(problem.temperature))
    classes = {
        "top_k": (TopKLogitsWarper, problem.top_k),
        "top_p": (TopPLogitsWarper, problem.top_p),
        "min_p": (MinPLogitsWarper, problem.min_p),
    }
    processors += [classes[name][0](classes[name][1]) for name in problem.filters if sampled]
    weight = padded(weight)
    input_ids = torch.zeros(problem.B, 1, dtype=torch.int64, device=weight.device)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        logits = matmul_logits(hidden, weight, problem.V).to(copy=True, dtype=torch.float32)
        scores = processors(input_ids, logits)
        if not sampled:
            return scores.argmax(dim=-1)
        return torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)

    return launch


PROVIDER = Provider(
    name="hf_generate",
    label="Hugging Face generate",
    kind=Kind.EXACT,
    build=build,
    requires=("transformers",),
    capabilities=replace(
        TORCH_NOISE,
        zero_temperature=True,
        host_sync_free=False,
        filters=FILTERS,
        filter_order=("temperature", "top_k", "top_p", "min_p"),
        ties="any",
    ),
)
