"""FI1 without the passes that its filters cost when they are off.

    tokens = inverse_cdf_sample(softmax(logits / T))

With top-k and top-p off: FlashInfer's softmax, which applies the temperature, too, and its plain
sampler, which stops reading a row at the drawn token. One matmul with fp32 output comes before; the
probabilities are fp32. Random numbers: see
`providing.flashinfer`.

With filters: FlashInfer's sampler for filtered probabilities, top-k first: a kernel that cuts to k
tokens and normalizes them, then rejection sampling for top-p. `flashinfer_joint` has the other
order, which needs no pass for top-k.

Undefined rows, by reading: as `flashinfer_top_k_top_p`, token 0.
"""

from __future__ import annotations

from fsbench.baselines.providing.flashinfer import TOP_K_TOP_P, build_filtered, build_lean
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    if problem.filters:
        return build_filtered(problem, weight, "top_k_first")
    from flashinfer.sampling import sampling_from_probs, softmax

    temperature = problem.temperature

    def sample(logits: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        probs = softmax(logits, temperature=temperature)
        return sampling_from_probs(probs, seed=seed, offset=offset)

    return build_lean(problem, weight, sample)


PROVIDER = Provider(
    name="flashinfer_top_k_top_p_lean",
    label="FI1, lean",
    kind=Kind.EXACT,
    build=build,
    requires=("flashinfer",),
    capabilities=Capabilities(host_sync_free=True, penalties=True, **TOP_K_TOP_P),
    presets=("lean", "truncated"),
)
