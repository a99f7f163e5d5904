"""One call that returns a filtered token, its probabilities, and the tokens that were kept.

python examples/kept_probabilities.py
"""

import torch

from fsbench.kernels import truncated_sample

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
hidden = torch.randn(2, 256, device=device, dtype=torch.bfloat16)
weight = torch.randn(5000, 256, device=device, dtype=torch.bfloat16) / 8
seed = torch.tensor([1, 2], device=device)

sample = truncated_sample(
    hidden,
    weight,
    temperature=0.8,
    top_k=8,
    top_p=0.95,
    seed=seed,
    return_logprob=True,  # over all tokens
    return_kept_logprob=True,  # over the kept tokens: the probability of this draw
    return_top=8,  # the largest logits, with their log-probabilities
    return_support=8,  # ids of the kept tokens, -1 after the last
)
assert sample.kept is not None and sample.support is not None  # as requested above
assert sample.top_tokens is not None and sample.top_logprob is not None
assert sample.kept_logprob is not None
for row in range(len(hidden)):
    n = int(sample.kept[row])
    kept = sample.support[row, :n]
    assert torch.equal(kept, sample.top_tokens[row, :n])  # both are sorted by logit
    kept_p = sample.top_logprob[row, :n].exp()
    kept_p = kept_p / kept_p.sum()  # over the kept tokens
    index = int((kept == sample.tokens[row]).nonzero())
    assert torch.allclose(kept_p[index].log(), sample.kept_logprob[row], atol=1e-4)
    print(int(sample.tokens[row]), dict(zip(kept.tolist(), kept_p.tolist(), strict=True)))
