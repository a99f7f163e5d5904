"""Sample with a seed per request, and read the log-probability of each token.

python examples/sample_with_seeds.py
"""

import torch

from fsbench.kernels import flash_sample

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
hidden = torch.randn(4, 256, device=device, dtype=torch.bfloat16)  # [B, D]
weight = torch.randn(5000, 256, device=device, dtype=torch.bfloat16) / 16  # [V, D]
seed = torch.tensor([11, 22, 33, 44], device=device)  # one per request
position = torch.tensor([7, 3, 12, 9], device=device)  # of each request's last token

sample = flash_sample(
    hidden, weight, temperature=0.8, seed=seed, offset=position, return_logprob=True
)
print(sample.tokens.tolist(), sample.logprob)

# A request draws the same token in another batch and at another row.
rows = torch.tensor([2, 0], device=device)
permuted = flash_sample(
    hidden[rows], weight, temperature=0.8, seed=seed[rows], offset=position[rows]
)
assert torch.equal(permuted.tokens, sample.tokens[rows])

position += 1  # without this line the next step would repeat the noise of this one
print(flash_sample(hidden, weight, temperature=0.8, seed=seed, offset=position).tokens.tolist())
