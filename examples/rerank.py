"""Rerank K candidate tokens: log-probabilities over K rows of the LM head alone.

python examples/rerank.py
"""

import torch

from fsbench.kernels import score

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
hidden = torch.randn(8, 256, device=device, dtype=torch.bfloat16)  # of the last prompt token
weight = torch.randn(5000, 256, device=device, dtype=torch.bfloat16) / 8
candidates = torch.tensor([17, 912, 4001], device=device)  # say, the ids of "yes", "no", "maybe"

# K rows of the head are a head of K tokens: targets count from 0 to K - 1.
targets = torch.arange(len(candidates), device=device).expand(len(hidden), -1).contiguous()
scores = score(hidden, weight[candidates], targets).logprob  # [B, K]: of the softmax over K tokens
assert torch.allclose(scores.exp().sum(1), torch.ones(len(hidden), device=device), atol=1e-3)
order = scores[:, 0].argsort(descending=True)  # documents by P(yes)
print(order.tolist(), scores[order, 0].exp().tolist())
