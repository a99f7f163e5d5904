"""akunu's CPU pipeline: the logits go to the host, which filters and draws, row after row.

    copy, fp32, / T, softmax, the k largest, min-p, top-p, normalize, categorical draw

akunu's fallback without its Metal kernel, and the way of engines before sampling moved to the GPU:
each step waits for the copy. The k largest come from torch.topk; of equal logits it keeps any.
The token that crosses p is kept. A draw is one uniform of torch's generator, looked up in the
running sum in fp64.

Undefined rows: a NaN logit, or no finite one, leaves NaN probabilities and gives some token.
"""

from __future__ import annotations

from dataclasses import replace

from fsbench.baselines.providing.logits import STORED, matmul_logits
from fsbench.problem import FILTERS, Problem
from fsbench.provider import Kind, Launch, Provider, Tensor, padded


def pick(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """Draw a token from one row of fp32 logits [V] on the host."""
    import torch

    if temperature == 0:
        return int(logits.argmax())
    probs = torch.softmax(logits / temperature, 0)
    k = min(top_k or len(probs), len(probs))
    kept, tokens = probs.double().topk(k)
    if min_p > 0:
        n = max(1, int((kept >= min_p * kept[0]).sum()))
        kept, tokens = kept[:n], tokens[:n]
    if top_p < 1:
        total = kept.cumsum(0)
        n = 1 + int((total < top_p * total[-1]).sum())
        kept, tokens = kept[:n], tokens[:n]
    total = kept.cumsum(0)
    u = torch.rand((), dtype=torch.float64) * total[-1]
    return int(tokens[min(int(torch.searchsorted(total, u, right=True)), len(tokens) - 1)])


def build(problem: Problem, weight: Tensor) -> Launch:
    import torch

    temperature, rows = problem.temperature, problem.row_filters()
    weight = padded(weight)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        logits = matmul_logits(hidden, weight, problem.V).cpu().float()
        tokens = [
            pick(row, temperature, *filters) for row, filters in zip(logits, rows, strict=True)
        ]
        return torch.tensor(tokens, device=hidden.device)

    return launch


PROVIDER = Provider(
    name="akunu_cpu",
    label="akunu, CPU pipeline",
    kind=Kind.TRUNCATED,
    build=build,
    capabilities=replace(
        STORED,
        zero_temperature=True,
        host_sync_free=False,
        graph_safe=False,
        filters=FILTERS,
        mixed_filters=True,
        filter_order=("temperature", "top_k", "min_p", "top_p"),
        ties="any",
    ),
)
