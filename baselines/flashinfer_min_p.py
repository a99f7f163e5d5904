"""FlashInfer's min-p sampler.

    tokens = min_p_sample(softmax(logits / T), min_p)

It keeps tokens whose probability is at least min_p times the largest. One matmul with fp32 output
and FlashInfer's softmax come before. FlashInfer's documentation calls the kernel rejection
sampling, but it never rejects (sampling.cuh of 0.6.9 and of 0.7.2.post1), so there are no rounds to
count: one launch reads a row for its largest probability, again for the kept mass, and a third time
up to the drawn token (inverse CDF). The kernel has neither top-k nor top-p; requests with
these are refused. Random numbers: see `providing.flashinfer`.

Where rounding leaves the uniform above the sum of the kept probabilities, the kernel returns the
last kept token. With min_p = 0 that would be a token of probability 0, for example one of the
padding; `FLOOR` replaces it.

Undefined rows, by reading: as `flashinfer_top_k_top_p`, token 0.
"""

from __future__ import annotations

from fsbench.baselines.providing.flashinfer import build_lean
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, Tensor

FLOOR = 2.0**-100
"""min_p of rows without min-p: keeps what is at least 2^-100 of the largest probability."""


def build(problem: Problem, weight: Tensor) -> Launch:
    import torch
    from flashinfer.sampling import min_p_sampling_from_probs, softmax

    temperature = problem.temperature
    min_p: float | Tensor = max(problem.min_p, FLOOR)
    if problem.mixed:
        rows = [max(least, FLOOR) for _, _, least in problem.row_filters()]
        min_p = torch.tensor(rows, dtype=torch.float32, device=weight.device)

    def sample(logits: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        probs = softmax(logits, temperature=temperature)
        return min_p_sampling_from_probs(probs, min_p, seed=seed, offset=offset)

    return build_lean(problem, weight, sample)


PROVIDER = Provider(
    name="flashinfer_min_p",
    label="FlashInfer, min-p",
    kind=Kind.TRUNCATED,
    build=build,
    requires=("flashinfer",),
    capabilities=Capabilities(
        host_sync_free=True, filters=("min_p",), mixed_filters=True, penalties=True, ties="kept"
    ),
    presets=("truncated",),
)
