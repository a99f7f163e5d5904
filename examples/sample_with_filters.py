"""Sample with top-k, top-p, min-p and penalties, each with one value per request.

python examples/sample_with_filters.py
"""

import torch

from fsbench.kernels import Penalties, TokenHistory, truncated_sample

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
B, D, V = 3, 256, 5000
hidden = torch.randn(B, D, device=device, dtype=torch.bfloat16)
weight = torch.randn(V, D, device=device, dtype=torch.bfloat16) / 8
seed = torch.arange(B, device=device)
history = TokenHistory.from_tokens([[1, 2, 3], [4], [5, 6]], [[]] * B, capacity=64, device=device)

for step in range(3):
    sample = truncated_sample(
        hidden,
        weight,
        temperature=torch.tensor([0.6, 1.0, 0.0], device=device),  # the last request is greedy
        top_k=torch.tensor([20, 0, 0], device=device),  # 0: off
        top_p=torch.tensor([0.95, 0.9, 1.0], device=device),  # 1: off
        min_p=0.01,
        penalties=Penalties(history, repetition=1.1),
        seed=seed,
        offset=torch.tensor([step], device=device),
        return_kept=True,
    )
    history.append(sample.tokens)  # on the device: it may be part of a CUDA graph
    print(sample.tokens.tolist(), "kept", sample.kept)
