"""FlashSampling by its authors: their Triton kernel, then their compiled reduction over tiles.

    tokens = fused_mm_sampling.core.fused_mm_sample_triton(weight, hidden, 1, T, seed)

The package is Apache-2.0, not on PyPI, and not a dependency:

    pip install nvtx git+https://github.com/FlashSampling/FlashSampling

Its launch takes the seed as a number of the host, here the next one of torch's CPU generator, so a
captured graph would repeat its draws. Uniforms have 24 bits near 1, so tokens about 16 T or more
below the largest logit are never drawn.

Undefined rows, by reading: NaN wins or not by its place in a tile; a row of -inf gives token 0.
"""

from __future__ import annotations

from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    import torch
    from fused_mm_sampling.core import fused_mm_sample_triton

    temperature = torch.tensor(problem.temperature, device=weight.device)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        number = int(torch.randint(2**31, ()))
        tokens: Tensor = fused_mm_sample_triton(weight, hidden, 1, temperature, number)
        return tokens[:, 0]

    return launch


def supports(problem: Problem) -> str | None:
    return "rows are no multiples of 16 bytes, as TMA needs" if problem.D % 8 else None


PROVIDER = Provider(
    name="flashsampling_authors",
    label="FlashSampling (authors)",
    kind=Kind.EXACT,
    build=build,
    supports=supports,
    requires=("fused_mm_sampling", "flashinfer", "nvtx"),
    capabilities=Capabilities(fused=True, graph_safe=False, host_sync_free=True, exact_to_gap=11.0),
    presets=("paper", "lean"),
)
