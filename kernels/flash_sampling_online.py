"""Streaming Gumbel-max over vocabulary chunks, in plain torch: the memory-saving form of the idea.

Algorithm I.1 of the FlashSampling paper applied to logits that are computed chunk by chunk: at any
moment [B, 8192] logits exist, in memory, and per row one running best. The paper's "online" variant
is another, Algorithm I.3 (group_gumbel_online). It runs wherever torch does; on
a CPU the chunk of logits stays in cache between the matmul and the noise.
"""

from __future__ import annotations

from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, Tensor

TOKENS_AT_ONCE = 8192
"""Vocabulary rows per step; the last chunk is shorter."""


def flash_sampling_online(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Draw one token per row from softmax(hidden @ weight.T / temperature).

    Args:
        hidden: [B, D]; weight: [V, D], the same floating dtype and device.
        temperature: >= 0; 0 is greedy.

    Returns:
        int64 [B]; -1 for a row with a NaN or +inf logit, or without a finite one.

    Noise comes from torch's generator of the device: E ~ Exp(1), g = -log E.
    """
    import torch

    B, V = hidden.shape[0], weight.shape[0]
    best = torch.full((B,), -torch.inf, device=hidden.device)
    token = torch.full((B,), -1, dtype=torch.int64, device=hidden.device)
    undefined = torch.zeros(B, dtype=torch.bool, device=hidden.device)
    for v0 in range(0, V, TOKENS_AT_ONCE):
        scores = (hidden @ weight[v0 : v0 + TOKENS_AT_ONCE].T).float()
        # NaN and +inf both make the row maximum fail this comparison.
        undefined |= ~(scores.amax(1) < torch.inf)
        if temperature > 0:
            scores -= temperature * torch.empty_like(scores).exponential_().log_()
        score, index = scores.max(1)
        better = score > best
        best = torch.where(better, score, best)
        token = torch.where(better, v0 + index, token)
    return token.masked_fill_(undefined, -1)


def build(problem: Problem, weight: Tensor) -> Launch:
    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return flash_sampling_online(hidden, weight, problem.temperature)

    return launch


PROVIDER = Provider(
    name="flash_sampling_online",
    label="FlashSampling online (torch)",
    kind=Kind.EXACT,
    capabilities=Capabilities(
        devices=("cuda", "cpu"),
        dtypes=("bf16", "fp16", "fp32"),
        zero_temperature=True,
        fused=True,
        exact_to_gap=10.0,  # of torch's exponential: docs/design/exactness.md
        excess_beyond_gap=0.2,
        host_sync_free=True,
    ),
    build=build,
    presets=("cpu", "smoke"),
)
