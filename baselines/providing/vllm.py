"""vLLM's own sampler on stored logits, as its model runner V2 calls it (written for 0.26.0).

`build` adds the requests of a problem to a `Sampler` of vLLM, as an engine does when they arrive. A
launch is the matmul and `Sampler.sample`, which skips what no request needs. The logits are divided
by the temperature in place, in the model's dtype: in bf16 they are rounded to 8 bits again.

Noise of the Gumbel kernel: a key from a request's seed and the position of its token, then one word
for each token of the vocabulary. An engine draws seeds when requests arrive, and gathers positions
in every step. Here each row has a seed, and one small kernel makes the position from fsbench's seed
and step, so that the noise depends on both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from fsbench.baselines.providing.logits import matmul_logits
from fsbench.problem import FILTERS, Problem
from fsbench.provider import Launch, Tensor, padded

STRIDE = 0x1E3779B97F4A7C15
"""Distance between the positions of two seeds of fsbench."""

ABLE: dict[str, Any] = {
    "zero_temperature": True,
    "per_row_temperature": True,
    "greedy_rows": True,
    "per_request_seed": True,
    "filters": FILTERS,
    "mixed_filters": True,
    "ties": "any",  # of logits equal to the kth a sort keeps all, Triton exactly k
}
"""Capabilities of the sampler with and without FlashInfer."""


def drawing(
    requests: Sequence[dict[str, Any]], seeds: Any, V: int, device: Any, flashinfer: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function (logits [B, V], positions int64 [B]) -> tokens [B]: vLLM's Sampler.

    Args:
        requests: Arguments of SamplingParams of each request.
        seeds: int64 [B].
        flashinfer: Whether FlashInfer filters, as in vLLM unless VLLM_USE_FLASHINFER_SAMPLER is 0.
    """
    import numpy as np
    import torch

    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # set below for each sampler
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    B = len(requests)
    states = RequestState(B, 8, B, 0, V, device)
    sampler = Sampler(B, V, device, states)
    sampler.use_flashinfer = flashinfer
    for row, request in enumerate(requests):
        sampler.add_request(row, 1, SamplingParams(**request))
    sampler.sampling_states.seeds.np[:B] = seeds  # not in SamplingParams: FlashInfer refuses seeds
    sampler.apply_staged_writes()
    rows = torch.arange(B, dtype=torch.int32, device=device)
    rows_np = np.arange(B, dtype=np.int32)
    zeros = torch.zeros(B, dtype=torch.int32, device=device)  # input ids, and positions in drafts
    return lambda logits, positions: sampler.sample(
        logits, rows, rows_np, positions, zeros, zeros, return_logprobs=False
    )[0]


def build_with(problem: Problem, weight: Tensor, flashinfer: bool) -> Launch:
    import numpy as np
    import torch

    B, V, device, T = problem.B, problem.V, weight.device, problem.temperature
    requests = [
        {"temperature": T, "top_k": k or -1, "top_p": p, "min_p": min_p}
        for k, p, min_p in problem.row_filters()
    ]
    seeds = np.random.SeedSequence(B).generate_state(B, np.uint64).view(np.int64)
    draw = drawing(requests, seeds, V, device, flashinfer)
    weight = padded(weight)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        position = torch.add(offset, seed, alpha=STRIDE).expand(B)
        return draw(matmul_logits(hidden, weight, V), position)

    return launch


def sample(
    hidden: Tensor,
    weight: Tensor,
    *,
    seed: Tensor,
    offset: Tensor,
    temperature: float | Tensor = 1.0,
) -> SimpleNamespace:
    """Draw with the Gumbel kernel (Provider.sample): its noise depends on seed and position only.

    vLLM returns log-probabilities of softmax(logits), or of the filtered distribution, not those of
    softmax(logits / T), so this sampler claims none.
    """
    import torch

    B, V, device = len(hidden), len(weight), weight.device
    T = torch.as_tensor(temperature, dtype=torch.float32).expand(B).tolist()
    requests = [{"temperature": value} for value in T]
    seeds = seed.expand(B) + (0 if len(seed) == B else torch.arange(B, device=device) * STRIDE)
    draw = drawing(requests, seeds.cpu().numpy(), V, device, flashinfer=False)
    logits = matmul_logits(hidden, weight, V).contiguous()
    return SimpleNamespace(tokens=draw(logits, offset.expand(B)))
